#pragma once

// Copies rows with non-temporal stores. Included after simd_*.h.

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace adaptrt {
namespace {

/// Streams rows of whole cache lines to addresses that are multiples of a cache line. Copies other rows.
void stream_rows(const std::byte* from, std::int64_t stride, std::int64_t count, std::int64_t bytes,
                 std::byte* out, std::int64_t out_stride) {
  constexpr std::int64_t kLine = 64;
  for (std::int64_t r = 0; r < count; ++r, from += stride, out += out_stride) {
    if (bytes % kLine != 0 || reinterpret_cast<std::uintptr_t>(out) % kLine != 0) {
      std::memcpy(out, from, static_cast<std::size_t>(bytes));
      continue;
    }
    for (std::int64_t i = 0; i < bytes; i += kLine) Simd::stream_line(from + i, out + i);
  }
  Simd::finish_stream();
}

}  // namespace
}  // namespace adaptrt
