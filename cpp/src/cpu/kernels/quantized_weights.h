#pragma once

// Decodes the words of a quantised panel to weights. A unit is the part of k of one multiply-add: two inputs
// for bfloat16 activations, one for float32. A Word holds kUnits units for a vector of columns; decode<i>
// returns unit i, an exact integer as floating point. Included after simd_*.h.

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "adaptrt/core/quantized_panels.h"
#include "gemm.h"

namespace adaptrt {
namespace {

/// Calls body(std::integral_constant<int, i>) for i from 0 to kCount - 1, unrolled.
template <int kCount, class Body>
inline __attribute__((always_inline)) void for_each_index(const Body& body) {
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) __attribute__((always_inline)) {
    (body(std::integral_constant<int, kIndex>{}), ...);
  }(std::make_integer_sequence<int, kCount>{});
}

/// Prefetches words ahead of their use, as far as Simd::kFetching says.
struct FetchAhead {
  /// Must be called with each kLines lines of words that are read.
  template <int kLines>
  void at_lines(const std::byte* words) const {
    ADAPTRT_UNROLL
    for (int line = 0; line < kLines; ++line) {
      __builtin_prefetch(words + Simd::kFetching.decoded_ahead + line * kCacheLine, 0,
                         Simd::kFetching.decoded_locality);
    }
  }
};

/// Shift of input `input` in a word of kW4A16.
constexpr int int4_shift(int input) {
  return 4 * (input / 2) + 16 * (input % 2);
}

/// Words of int8. Like for Int4Pairs, decode() returns the even and the odd input of a pair as float32.
struct Int8Pairs {
  using Word = Simd::Pair;
  static constexpr int kUnits = 1;
  static constexpr std::int64_t kColumnBytes = 2;
  static Word load(const std::byte* from, std::int64_t n) { return Simd::load_int8_pairs(from, n); }
  template <int kUnit>
  static Simd::Pair decode(const Word& word) {
    return word;
  }
};

struct Int4Pairs {
  using Word = Simd::Words;
  static constexpr int kUnits = 4;
  static constexpr std::int64_t kColumnBytes = 4;
  static Word load(const std::byte* from, std::int64_t n) { return Simd::load_words(from, n); }
  template <int kUnit>
  static Simd::Pair decode(Word word) {
    return {Simd::centred_nibble<int4_shift(2 * kUnit)>(word),
            Simd::centred_nibble<int4_shift(2 * kUnit + 1)>(word)};
  }
};

/// Base of decoders for bfloat16 activations. A unit is a pair of float32 that bfloat16 represents exactly,
/// for CPUs other than those with AVX-512 BF16.
struct PairedWeights : BFloat16Weights {
  using B = Simd::Pair;
  static void store(std::byte* to, const B& b, std::int64_t n) {
    Simd::store_words(to, Simd::pack_bfloat16(b.even, b.odd), n);
  }
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
  static Simd::Vec multiply_add(Broadcast a, const B& b, Simd::Vec sum) {
    return BFloat16Weights::multiply_add(a, Simd::pack_bfloat16(b.even, b.odd), sum);
  }
#elif !defined(__AVX512BF16__)
  static Simd::Vec multiply_add(const Broadcast& a, const B& b, Simd::Vec sum) {
    return Simd::fma(a.odd, b.odd, Simd::fma(a.even, b.even, sum));
  }
#endif
};

#ifdef __AVX512BF16__
/// Base of decoders for bfloat16 activations and CPUs with products of bfloat16. A unit is a vector of pairs.
struct NativePairs : BFloat16Weights {
  static void store(std::byte* to, B b, std::int64_t n) { Simd::store_words(to, b, n); }
};

struct Int8BFloat16 : NativePairs {
  using Word = __m512i;
  static constexpr int kUnits = 1;
  static constexpr std::int64_t kColumnBytes = 2;
  static Word load(const std::byte* from, std::int64_t n) {
    __m128i first = _mm_setzero_si128();
    __m128i second = _mm_setzero_si128();
    if (n == Simd::kLanes) {
      first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
      second = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + 1);
    } else {
      const __m256i bytes = _mm256_maskz_loadu_epi16(Simd::first(n), from);
      first = _mm256_castsi256_si128(bytes);
      second = _mm256_extracti128_si256(bytes, 1);
    }
    // This conversion of two vectors keeps the order of their elements, so the pairs of a column stay
    // together.
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(first));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(second));
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
  }
  template <int kUnit>
  static B decode(Word word) {
    return word;
  }
};

struct Int4BFloat16 : NativePairs {
  using Word = __m512i;
  static constexpr int kUnits = 4;
  static constexpr std::int64_t kColumnBytes = 4;
  static Word load(const std::byte* from, std::int64_t n) { return Simd::load_words(from, n); }
  template <int kUnit>
  static B decode(Word word) {
    // bfloat16 of -8 to 7. They are repeated, because the permutation also reads the bit above the four.
    const __m256i values =
        _mm256_setr_epi16(static_cast<short>(0xc100), static_cast<short>(0xc0e0), static_cast<short>(0xc0c0),
                          static_cast<short>(0xc0a0), static_cast<short>(0xc080), static_cast<short>(0xc040),
                          static_cast<short>(0xc000), static_cast<short>(0xbf80), 0, 0x3f80, 0x4000, 0x4040,
                          0x4080, 0x40a0, 0x40c0, 0x40e0);
    return _mm512_permutexvar_epi16(_mm512_srli_epi32(word, 4 * kUnit),
                                    _mm512_inserti64x4(_mm512_castsi256_si512(values), values, 1));
  }
};
#else
struct Int8BFloat16 : PairedWeights, Int8Pairs {
  using Int8Pairs::kColumnBytes;
  using Int8Pairs::load;
};
struct Int4BFloat16 : PairedWeights, Int4Pairs {
  using Int4Pairs::kColumnBytes;
  using Int4Pairs::load;
};
#endif

/// Base of decoders for float32 activations.
struct SingleWeights : Float32Weights {
  static void store(std::byte* to, B b, std::int64_t n) { Simd::store(reinterpret_cast<float*>(to), b, n); }
};

struct Int8Float32 : SingleWeights {
  using Word = Simd::Pair;
  static constexpr int kUnits = 2;
  static constexpr std::int64_t kColumnBytes = 2;
  static Word load(const std::byte* from, std::int64_t n) { return Simd::load_int8_pairs(from, n); }
  template <int kUnit>
  static B decode(const Word& word) {
    return kUnit == 0 ? word.even : word.odd;
  }
};

struct Int4Float32 : SingleWeights {
  using Word = Simd::Words;
  static constexpr int kUnits = 8;
  static constexpr std::int64_t kColumnBytes = 4;
  static Word load(const std::byte* from, std::int64_t n) { return Simd::load_words(from, n); }
  template <int kUnit>
  static B decode(Word word) {
    return Simd::centred_nibble<int4_shift(kUnit)>(word);
  }
};

/// A panel that expand_panel made.
template <class Weights>
struct Expanded : Weights {
  using Word = typename Weights::B;
  static constexpr int kUnits = 1;
  static Word load(const std::byte* from, std::int64_t n) {
    return n == Simd::kLanes ? Weights::load(from) : Weights::load(from, n);
  }
  template <int kUnit>
  static Word decode(Word word) {
    return word;
  }
};

}  // namespace
}  // namespace adaptrt
