#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace adaptrt::bindings {

[[nodiscard]] inline std::size_t bytes_of(const pybind11::buffer_info& info) {
  return static_cast<std::size_t>(info.size * info.itemsize);
}

/// First byte of a C-contiguous buffer, bytes_of() bytes long. Throws ValueError for another buffer, and for
/// one that does not begin at a multiple of `alignment` bytes.
[[nodiscard]] inline std::byte* data_of(const pybind11::buffer_info& info, const char* what,
                                        std::size_t alignment = 1) {
  pybind11::ssize_t expected = info.itemsize;
  for (auto axis = static_cast<std::size_t>(info.ndim); axis-- > 0;) {
    if (info.shape[axis] > 1 && info.strides[axis] != expected) {
      throw pybind11::value_error(std::string(what) + ": the buffer is not contiguous");
    }
    expected *= info.shape[axis];
  }
  if (reinterpret_cast<std::uintptr_t>(info.ptr) % alignment != 0) {
    throw pybind11::value_error(std::string(what) + ": the buffer is not aligned to " +
                                std::to_string(alignment) + " bytes");
  }
  return static_cast<std::byte*>(info.ptr);
}

/// Throws ValueError for sizes of a matrix W[n, k] whose bytes might not be counted.
inline void check_matrix_sizes(const char* what, std::int64_t n, std::int64_t k) {
  constexpr std::int64_t kLimit = std::int64_t{1} << 31;
  if (n < 0 || k < 0 || n >= kLimit || k >= kLimit) {
    throw pybind11::value_error(std::string(what) + ": n is " + std::to_string(n) + " and k is " +
                                std::to_string(k) + "; expected numbers in [0, 2**31)");
  }
}

}  // namespace adaptrt::bindings
