#pragma once

// Functions on 128 bits that AVX2 and AVX-512 share. Included by their simd_*.h.

#include <immintrin.h>

#include <cstdint>

namespace adaptrt {
namespace {

/// Puts 32 bytes into the order of their numbers in `order`.
inline void shuffle_bytes(std::uint8_t* bytes, const std::uint8_t* order) {
  auto* halves = reinterpret_cast<__m128i*>(bytes);
  const __m128i lower = _mm_loadu_si128(halves);
  const __m128i upper = _mm_loadu_si128(halves + 1);
  for (int half = 0; half < 2; ++half) {
    const __m128i from = _mm_loadu_si128(reinterpret_cast<const __m128i*>(order) + half);
    // Shuffles give zero where an index has its highest bit.
    const __m128i of_lower = _mm_shuffle_epi8(lower, _mm_add_epi8(from, _mm_set1_epi8(0x70)));
    const __m128i of_upper = _mm_shuffle_epi8(upper, _mm_sub_epi8(from, _mm_set1_epi8(16)));
    _mm_storeu_si128(halves + half, _mm_or_si128(of_lower, of_upper));
  }
}

}  // namespace
}  // namespace adaptrt
