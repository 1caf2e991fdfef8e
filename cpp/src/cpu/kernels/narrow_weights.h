#pragma once

// Words of two and three bits, like those of four and eight bits in quantized_weights.h. Included after
// simd_*.h.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "adaptrt/core/quantized_panels.h"
#include "gemm.h"
#include "quantized_weights.h"

namespace adaptrt {
namespace {

/// Number of lines that a word spans in a panel; each line has kColumnBytes of a column.
template <class Packed>
inline constexpr int kWordLines = 1;

/// True for words of two and three bits: panels and their groups consist of whole words.
template <class Packed>
inline constexpr bool kHasWholeWords = false;

/// Integer that decoders of two and three bits subtract from u. With zero points it is kInt4Zero for any
/// number of bits; the rest of the zero point is subtracted later.
inline int zero_of(const Quantization& how) {
  return how.zero_points ? kInt4Zero : 1 << (how.bits - 1);
}

/// Number of pairs of inputs whose three bits lie in one uint32. The three uint32 of a Word have one bit each
/// of its last pair.
inline constexpr int kThreeBitPairs = 5;

/// Words of packed_inputs(kBits) inputs. A decoded value is u - zero_of().
template <int kBits>
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
  /// Returns words that have the bits of the even and the odd input of a pair at shift_of(pair) in their
  /// lower and upper halves.
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
};

template <int kBits>
class NarrowPairs : public NarrowWords<kBits> {
 public:
  using Words = NarrowWords<kBits>;
  static constexpr int kUnits = Words::kInputs / 2;
  explicit NarrowPairs(const Quantization& how) : values_(zero_of(how)) {}
  template <int kUnit>
  [[nodiscard]] Simd::Pair decode(const typename Words::Word& word) const {
    const Simd::Words words = Words::template words_of<kUnit>(word);
    constexpr int kShift = Words::shift_of(kUnit);
    return {values_.template at<kShift>(words), values_.template at<kShift + 16>(words)};
  }

 private:
  Simd::CentredBits<kBits> values_;
};

#ifdef __AVX512BF16__
template <int kBits>
class NarrowBFloat16 : public NativePairs, public NarrowWords<kBits> {
 public:
  using Words = NarrowWords<kBits>;
  using Words::kColumnBytes;
  using Words::load;
  static constexpr int kUnits = Words::kInputs / 2;
  explicit NarrowBFloat16(const Quantization& how) {
    // The permutation also reads the bits above the kBits, so values repeat for all their combinations. The
    // upper half of a float32 represents such small integers exactly.
    const auto value = [&](int index) {
      return static_cast<short>(
          std::bit_cast<std::uint32_t>(static_cast<float>(index % (1 << kBits) - zero_of(how))) >> 16);
    };
    values_ = _mm512_broadcast_i32x4(
        _mm_setr_epi16(value(0), value(1), value(2), value(3), value(4), value(5), value(6), value(7)));
  }
  template <int kUnit>
  [[nodiscard]] B decode(const typename Words::Word& word) const {
    return _mm512_permutexvar_epi16(
        _mm512_srli_epi32(Words::template words_of<kUnit>(word), Words::shift_of(kUnit)), values_);
  }

 private:
  __m512i values_;
};
#else
template <int kBits>
struct NarrowBFloat16 : PairedWeights, NarrowPairs<kBits> {
  using NarrowPairs<kBits>::NarrowPairs;
  using NarrowPairs<kBits>::kColumnBytes;
  using NarrowPairs<kBits>::load;
};
#endif

template <int kBits>
class NarrowFloat32 : public SingleWeights, public NarrowWords<kBits> {
 public:
  using Words = NarrowWords<kBits>;
  using Words::kColumnBytes;
  using Words::load;
  static constexpr int kUnits = Words::kInputs;
  explicit NarrowFloat32(const Quantization& how) : values_(zero_of(how)) {}
  template <int kUnit>
  [[nodiscard]] B decode(const typename Words::Word& word) const {
    constexpr int kPair = kUnit / 2;
    return values_.template at<Words::shift_of(kPair) + 16 * (kUnit % 2)>(
        Words::template words_of<kPair>(word));
  }

 private:
  Simd::CentredBits<kBits> values_;
};

template <>
inline constexpr int kWordLines<NarrowPairs<3>> = 3;
template <>
inline constexpr int kWordLines<NarrowBFloat16<3>> = 3;
template <>
inline constexpr int kWordLines<NarrowFloat32<3>> = 3;

template <int kBits>
inline constexpr bool kHasWholeWords<NarrowPairs<kBits>> = true;
template <int kBits>
inline constexpr bool kHasWholeWords<NarrowBFloat16<kBits>> = true;
template <int kBits>
inline constexpr bool kHasWholeWords<NarrowFloat32<kBits>> = true;

/// Returns the decoder for the words of a panel. Some decoders depend on the quantisation.
template <class Packed>
Packed decoder_of(const Quantization& how) {
  if constexpr (std::is_constructible_v<Packed, const Quantization&>) {
    return Packed(how);
  } else {
    return Packed();
  }
}

/// Loads the word at `from`; if it has several lines, they are `line_bytes` apart.
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

/// Decoders of words for activations that Float multiplies.
template <class Float>
struct PackedFor;
template <>
struct PackedFor<Float32Weights> {
  using Int8 = Int8Float32;
  using Int4 = Int4Float32;
  template <int kBits>
  using Narrow = NarrowFloat32<kBits>;
};
template <>
struct PackedFor<BFloat16Weights> {
  using Int8 = Int8BFloat16;
  using Int4 = Int4BFloat16;
  template <int kBits>
  using Narrow = NarrowBFloat16<kBits>;
};

/// Calls body(std::type_identity<D>), where D is the decoder in `Choices` for the bits of kW4A16.
template <class Choices, class Body>
void with_bits(const Quantization& how, const Body& body) {
  switch (how.bits) {
    case 2:
      return body(std::type_identity<typename Choices::template Narrow<2>>{});
    case 3:
      return body(std::type_identity<typename Choices::template Narrow<3>>{});
    default:
      return body(std::type_identity<typename Choices::Int4>{});
  }
}

}  // namespace
}  // namespace adaptrt
