#pragma once

// Included behind simd_*.h. Words of two and three bits, as quantized_weights.h has those of four and eight.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "adaptrt/core/quantized_panels.h"
#include "gemm.h"
#include "quantized_weights.h"

namespace adaptrt {
namespace {

/// Lines of a panel, each with kColumnBytes of a column, that a word is in.
template <class Packed>
inline constexpr int kWordLines = 1;

/// Pairs of inputs whose bits lie in one word of three bits; the last pair of a Word is in all of them.
inline constexpr int kThreeBitPairs = 5;

/// Words of packed_inputs(kBits) inputs, of which values are u - kZero.
template <int kBits, int kZero>
struct NarrowWords {
  static constexpr int kInputs = static_cast<int>(packed_inputs(kBits));
  static constexpr int kLines = kBits == 3 ? 3 : 1;
  static constexpr std::int64_t kColumnBytes = 4;
  struct Word {
    Simd::Words lines[kLines];
  };
  static Word load(const std::byte* from, std::int64_t line_bytes, std::int64_t n) {
    Word word;
    ADAPTRT_UNROLL
    for (int line = 0; line < kLines; ++line) {
      word.lines[line] = Simd::load_words(from + line * line_bytes, n);
    }
    return word;
  }
  /// Words with the bits of a pair of inputs at shift_of(pair), in both halves.
  template <int kPair>
  static Simd::Words words_of(const Word& word) {
    if constexpr (kBits == 2) {
      return word.lines[0];
    } else if constexpr (kPair < kLines * kThreeBitPairs) {
      return word.lines[kPair / kThreeBitPairs];
    } else {
      return Simd::highest_bits(word.lines[0], word.lines[1], word.lines[2]);
    }
  }
  static constexpr int shift_of(int pair) {
    return kBits == 2 ? 2 * pair : pair < kLines * kThreeBitPairs ? 3 * (pair % kThreeBitPairs) : 0;
  }
  template <int kInput>
  static Simd::Vec value_of(const Word& word) {
    return Simd::centred_bits<kBits, kZero, shift_of(kInput / 2) + 16 * (kInput % 2)>(
        words_of<kInput / 2>(word));
  }
};

template <int kBits, int kZero>
struct NarrowPairs : NarrowWords<kBits, kZero> {
  using Words = NarrowWords<kBits, kZero>;
  static constexpr int kUnits = Words::kInputs / 2;
  template <int kUnit>
  static Simd::Pair decode(const typename Words::Word& word) {
    return {Words::template value_of<2 * kUnit>(word), Words::template value_of<2 * kUnit + 1>(word)};
  }
};

#ifdef __AVX512BF16__
template <int kBits, int kZero>
struct NarrowBFloat16 : NativePairs, NarrowWords<kBits, kZero> {
  using Words = NarrowWords<kBits, kZero>;
  using Words::kColumnBytes;
  using Words::load;
  static constexpr int kUnits = Words::kInputs / 2;
  template <int kUnit>
  static B decode(const typename Words::Word& word) {
    // The same for all values of the bits above that the permutation looks at. These integers are whole in
    // the upper halves of float32.
    constexpr auto kValue = [](int index) {
      return static_cast<short>(
          std::bit_cast<std::uint32_t>(static_cast<float>(index % (1 << kBits) - kZero)) >> 16);
    };
    const __m128i values = _mm_setr_epi16(kValue(0), kValue(1), kValue(2), kValue(3), kValue(4), kValue(5),
                                          kValue(6), kValue(7));
    return _mm512_permutexvar_epi16(
        _mm512_srli_epi32(Words::template words_of<kUnit>(word), Words::shift_of(kUnit)),
        _mm512_broadcast_i32x4(values));
  }
};
#else
template <int kBits, int kZero>
struct NarrowBFloat16 : PairedWeights, NarrowPairs<kBits, kZero> {
  using NarrowPairs<kBits, kZero>::kColumnBytes;
  using NarrowPairs<kBits, kZero>::load;
};
#endif

template <int kBits, int kZero>
struct NarrowFloat32 : SingleWeights, NarrowWords<kBits, kZero> {
  using Words = NarrowWords<kBits, kZero>;
  using Words::kColumnBytes;
  using Words::load;
  static constexpr int kUnits = Words::kInputs;
  template <int kUnit>
  static B decode(const typename Words::Word& word) {
    return Words::template value_of<kUnit>(word);
  }
};

template <int kZero>
inline constexpr int kWordLines<NarrowPairs<3, kZero>> = 3;
template <int kZero>
inline constexpr int kWordLines<NarrowBFloat16<3, kZero>> = 3;
template <int kZero>
inline constexpr int kWordLines<NarrowFloat32<3, kZero>> = 3;

/// The word at `from`, whose lines are `line_bytes` apart where it has several.
template <class Packed>
inline __attribute__((always_inline)) typename Packed::Word load_word(const std::byte* from,
                                                                      std::int64_t line_bytes,
                                                                      std::int64_t n) {
  if constexpr (requires { Packed::load(from, line_bytes, n); }) {
    return Packed::load(from, line_bytes, n);
  } else {
    return Packed::load(from, n);
  }
}

/// How words are decoded for activations that Float multiplies.
template <class Float>
struct PackedFor;
template <>
struct PackedFor<Float32Weights> {
  using Int8 = Int8Float32;
  using Int4 = Int4Float32;
  template <int kBits, int kZero>
  using Narrow = NarrowFloat32<kBits, kZero>;
};
template <>
struct PackedFor<BFloat16Weights> {
  using Int8 = Int8BFloat16;
  using Int4 = Int4BFloat16;
  template <int kBits, int kZero>
  using Narrow = NarrowBFloat16<kBits, kZero>;
};

/// Calls body(std::type_identity) with what of `Choices` decodes the integers of a kW4A16. The sums of those
/// with zero points are of u - kInt4Zero, however few bits they have.
template <class Choices, class Body>
void with_bits(const Quantization& how, const Body& body) {
  const auto narrow = [&]<int kBits>(std::integral_constant<int, kBits>) {
    if (how.zero_points) {
      body(std::type_identity<typename Choices::template Narrow<kBits, kInt4Zero>>{});
    } else {
      body(std::type_identity<typename Choices::template Narrow<kBits, 1 << (kBits - 1)>>{});
    }
  };
  switch (how.bits) {
    case 2:
      return narrow(std::integral_constant<int, 2>{});
    case 3:
      return narrow(std::integral_constant<int, 3>{});
    default:
      return body(std::type_identity<typename Choices::Int4>{});
  }
}

}  // namespace
}  // namespace adaptrt
