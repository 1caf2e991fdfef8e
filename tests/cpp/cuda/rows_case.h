#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <type_traits>
#include <vector>

#include "adaptrt/core/dtype.h"
#include "lora_case.h"

namespace adaptrt::cuda {

inline constexpr DType kRowTypes[] = {DType::kFloat16, DType::kBFloat16};

/// A tensor at an address that is a multiple of 16, followed by NaN. It is filled with NaN at first.
template <typename T>
class Tensor {
 public:
  explicit Tensor(std::int64_t size)
      : size_(static_cast<std::size_t>(size)), memory_(size_ + kRest + kAlignment / sizeof(T), poison()) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
    first_ = (kAlignment - address % kAlignment) % kAlignment / sizeof(T);
  }
  Tensor(const Tensor& other) : Tensor(static_cast<std::int64_t>(other.size_)) {
    std::copy_n(other.data(), size_, data());
  }
  Tensor& operator=(const Tensor&) = delete;
  Tensor(Tensor&&) = default;
  Tensor& operator=(Tensor&&) = default;
  ~Tensor() = default;

  [[nodiscard]] T* data() { return memory_.data() + first_; }
  [[nodiscard]] const T* data() const { return memory_.data() + first_; }
  T& operator[](std::int64_t i) { return data()[i]; }
  const T& operator[](std::int64_t i) const { return data()[i]; }
  [[nodiscard]] std::int64_t size() const { return static_cast<std::int64_t>(size_); }
  [[nodiscard]] std::vector<T> values(std::int64_t begin, std::int64_t count) const {
    return {data() + begin, data() + begin + count};
  }

  /// True if the elements after the tensor were not written.
  [[nodiscard]] bool rest_is_unchanged() const {
    const T expected = poison();
    for (std::size_t i = 0; i < kRest; ++i) {
      if (std::memcmp(data() + size_ + i, &expected, sizeof(T)) != 0) return false;
    }
    return true;
  }

 private:
  static constexpr std::size_t kAlignment = 16;
  static constexpr std::size_t kRest = 16;

  /// NaN; integers of all ones, also within structs.
  static T poison() {
    if constexpr (std::is_same_v<T, float>) {
      return std::numeric_limits<float>::quiet_NaN();
    } else if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(-1);
    } else {
      T element;
      std::memset(static_cast<void*>(&element), 0xff, sizeof(T));
      return element;
    }
  }

  std::size_t size_;
  std::vector<T> memory_;
  std::size_t first_ = 0;
};

inline float element(DType dtype, std::uint16_t bits) {
  return dtype == DType::kFloat16 ? float16_to_float(bits) : bfloat16_to_float(bits);
}

inline Tensor<std::uint16_t> random_elements(DType dtype, std::int64_t size, FreshRandom* random,
                                             float most = 4) {
  Tensor<std::uint16_t> tensor(size);
  for (std::int64_t i = 0; i < size; ++i) {
    const float value = random->real(-most, most);
    tensor[i] = dtype == DType::kFloat16 ? float_to_float16(value) : float_to_bfloat16(value);
  }
  return tensor;
}

inline Tensor<float> random_floats(std::int64_t size, FreshRandom* random, float most = 4) {
  Tensor<float> tensor(size);
  for (std::int64_t i = 0; i < size; ++i) tensor[i] = random->real(-most, most);
  return tensor;
}

inline Tensor<std::int32_t> random_indices(std::int64_t size, std::int64_t limit, FreshRandom* random) {
  Tensor<std::int32_t> tensor(size);
  for (std::int64_t i = 0; i < size; ++i) tensor[i] = random->integer(0, static_cast<int>(limit) - 1);
  return tensor;
}

/// True if a result differs from a float64 value by no more than its rounding and `extra`.
inline bool is_rounded(double expected, DType dtype, std::uint16_t bits, double extra) {
  const double rounding = dtype == DType::kFloat16 ? 0x1p-11 : 0x1p-8;
  return std::abs(element(dtype, bits) - expected) <= std::abs(expected) * rounding + 0x1p-25 + extra;
}

}  // namespace adaptrt::cuda
