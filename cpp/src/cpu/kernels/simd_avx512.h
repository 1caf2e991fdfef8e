#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "adaptrt/core/compressed_panels.h"
#include "adaptrt/core/dtype.h"
#include "fetching.h"
#include "shuffle_x86.h"

namespace adaptrt {
namespace {

/// Sixteen float32 in a 512-bit register. `n` is a number of lanes, 0 to kLanes; the others are zero or not
/// touched.
struct Simd {
  using Vec = __m512;
  using Ints = __m512i;
  using Words = __m512i;
  static constexpr int kLanes = 16;
#if defined(__AVX512BF16__) && !defined(ADAPTRT_WITH_TILES)
  // AMD's CPUs use this table (kernel_choice.cpp). There, prefetching to the first level takes one of the few
  // line fill buffers that loads need, and memory would be idle while rows are multiplied.
  static constexpr Fetching kFetching{
      .locality = 2, .for_one_tile = false, .part_steps = 512, .decoded_locality = 2, .decoded_ahead = 16384};
#else
  static constexpr Fetching kFetching{};
#endif
  struct Pair {
    Vec even;
    Vec odd;
  };
  /// 32 consecutive values.
  struct TwoVecs {
    Vec low;
    Vec high;
  };

  static __mmask16 first(std::int64_t n) {
    return static_cast<__mmask16>((1U << static_cast<unsigned>(n)) - 1U);
  }

  static Vec zero() { return _mm512_setzero_ps(); }
  static Vec set(float value) { return _mm512_set1_ps(value); }
  static Vec load(const float* from) { return _mm512_loadu_ps(from); }
  static Vec load(const float* from, std::int64_t n) { return _mm512_maskz_loadu_ps(first(n), from); }
  static void store(float* to, Vec x) { _mm512_storeu_ps(to, x); }
  /// Stores 64 bytes without the caches, to an address that is a multiple of 64. Other threads see them after
  /// finish_stream().
  static void stream_line(const std::byte* from, std::byte* to) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
  }
  static void finish_stream() { _mm_sfence(); }
  static void store(float* to, Vec x, std::int64_t n) { _mm512_mask_storeu_ps(to, first(n), x); }

  static Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
  static Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
  static Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
  static Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
  /// 1 / x for normal x, within 6.2e-5 of it.
  static Vec about_reciprocal(Vec x) { return _mm512_rcp14_ps(x); }
  static Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
  static Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
  /// Returns x in lanes [begin, end), and `others` in the other lanes.
  static Vec select_lanes(std::int64_t begin, std::int64_t end, Vec x, Vec others) {
    const auto chosen = static_cast<__mmask16>(first(end) & ~first(begin));
    return _mm512_mask_mov_ps(others, chosen, x);
  }
  static bool any_above(Vec x, Vec bound) { return _mm512_cmp_ps_mask(x, bound, _CMP_GT_OQ) != 0; }
  /// Returns x, but 0 in lanes where test < bound.
  static Vec zero_below(Vec test, Vec bound, Vec x) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(test, bound, _CMP_NLT_UQ), x);
  }
  /// Returns x, but +0 in lanes where test <= bound.
  static Vec zero_up_to(Vec test, Vec bound, Vec x) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(test, bound, _CMP_NLE_UQ), x);
  }
  /// Writes four words of each of kLanes rows, `offset` bytes after the rows' beginnings, to four lines of
  /// `line` bytes.
  static void transpose_words(const std::byte* const* rows, std::int64_t offset, std::byte* out,
                              std::int64_t line) {
    const auto four = [&](int row) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[row] + offset));
    };
    // Quarter q of rows[i] has four words of row 4 q + i.
    const auto quarters = [&](int i) {
      __m512i x = _mm512_castsi128_si512(four(i));
      x = _mm512_mask_broadcast_i32x4(x, 0x00f0, four(4 + i));
      x = _mm512_mask_broadcast_i32x4(x, 0x0f00, four(8 + i));
      return _mm512_mask_broadcast_i32x4(x, 0xf000, four(12 + i));
    };
    const __m512i a = quarters(0);
    const __m512i b = quarters(1);
    const __m512i c = quarters(2);
    const __m512i d = quarters(3);
    const __m512i ab_low = _mm512_unpacklo_epi32(a, b);
    const __m512i ab_high = _mm512_unpackhi_epi32(a, b);
    const __m512i cd_low = _mm512_unpacklo_epi32(c, d);
    const __m512i cd_high = _mm512_unpackhi_epi32(c, d);
    _mm512_storeu_si512(out, _mm512_unpacklo_epi64(ab_low, cd_low));
    _mm512_storeu_si512(out + line, _mm512_unpackhi_epi64(ab_low, cd_low));
    _mm512_storeu_si512(out + 2 * line, _mm512_unpacklo_epi64(ab_high, cd_high));
    _mm512_storeu_si512(out + 3 * line, _mm512_unpackhi_epi64(ab_high, cd_high));
  }
  /// Adds the low bits of `integer` to the exponent of x.
  static Vec add_to_exponent(Vec x, Vec integer) {
    return _mm512_castsi512_ps(
        _mm512_add_epi32(_mm512_castps_si512(x), _mm512_slli_epi32(_mm512_castps_si512(integer), 23)));
  }
  /// Rounds to the nearest integer, ties to even.
  static Vec round(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  /// x 2^n for integers n from -150 to 127. The result may be 0 if n < -126.
  static Vec times_power_of_two(Vec x, Vec n) {
    // Underflow takes a hundred cycles on some CPUs, even if the result is zero.
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(n, set(-126.0F), _CMP_NLT_UQ), x, n);
  }
  static float sum(Vec x) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  static float greatest(Vec x) {
    const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
  }

  static Vec load_bfloat16(const std::byte* from, std::int64_t n) {
    const __m256i halves = _mm256_maskz_loadu_epi16(first(n), from);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  }
  static Vec load_float16(const std::byte* from, std::int64_t n) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), from));
  }
  static Vec round_to_float16(Vec x) {
    return _mm512_cvtph_ps(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
#ifdef __AVX512BF16__
  // Subnormal numbers become 0; the products of bfloat16 treat them as 0 too.
  static void store_bfloat16(std::byte* to, Vec x, std::int64_t n) {
    _mm256_mask_storeu_epi16(to, first(n), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
  }
  /// Rounds x to bfloat16, in the upper halves of the lanes; the lower halves are arbitrary.
  static Vec round_to_bfloat16(Vec x) {
    const auto halves = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  }
  /// Stores two whole vectors, x first.
  static void store_bfloat16(std::byte* to, Vec x, Vec behind) {
    _mm512_storeu_si512(to, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(behind, x)));
  }
  /// Rounds two vectors to bfloat16: `even` in the lower and `odd` in the upper halves of the lanes.
  static Words round_to_pairs(Vec even, Vec odd) {
    const __m512i lanes = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23,
                                           7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(lanes, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even)));
  }
  /// Rounds consecutive values to bfloat16, two in each lane.
  static Words round_to_pairs(const TwoVecs& x) {
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(x.high, x.low));
  }
  /// Each value of x twice, one after the other.
  static TwoVecs twice_each(Vec x) {
    const __m512i low = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    return {_mm512_permutexvar_ps(low, x),
            _mm512_permutexvar_ps(_mm512_add_epi32(low, _mm512_set1_epi32(8)), x)};
  }
  /// Returns true if all lanes are powers of two from 2^least to 2^greatest, which are normal numbers.
  static bool are_powers_of_two(Vec x, int least, int greatest) {
    constexpr int kMantissaBits = 23, kBias = 127;
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i above = _mm512_sub_epi32(bits, _mm512_set1_epi32((least + kBias) << kMantissaBits));
    const __mmask16 in_range =
        _mm512_cmple_epu32_mask(above, _mm512_set1_epi32((greatest - least) << kMantissaBits));
    return in_range == 0xffff &&
           _mm512_test_epi32_mask(bits, _mm512_set1_epi32((1 << kMantissaBits) - 1)) == 0;
  }
  /// Returns the operand of add_to_exponents() that multiplies by a lane's power of two, twice in each lane.
  static Words exponent_pairs(Vec powers) {
    constexpr short kOne = 0x3f80;  // 1.0, whose exponent is 0
    const __m512i words = _mm512_srli_epi32(_mm512_castps_si512(powers), 16);
    return _mm512_sub_epi16(_mm512_or_si512(words, _mm512_slli_epi32(words, 16)), _mm512_set1_epi16(kOne));
  }
  /// Pairs of bfloat16 times powers of two. All products must be normal or zero.
  static Words add_to_exponents(Words pairs, Words exponents) {
    const __mmask32 is_number = _mm512_test_epi16_mask(pairs, _mm512_set1_epi16(0x7fff));
    return _mm512_mask_add_epi16(pairs, is_number, pairs, exponents);
  }
  /// Loads 16 numbers that bfloat16 represents exactly.
  static Words load_pair_table(const float* numbers) {
    const Vec all = load(numbers);
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(all, all));
  }
  /// Returns, for both halves of each lane, the number whose index is in the four bits at kShift.
  template <int kShift>
  static Words look_up_pairs(Words words, Words table) {
    return _mm512_permutexvar_epi16(_mm512_srli_epi32(words, kShift), table);
  }
  /// Loads one uint16 per lane.
  static Words load_uint16(const std::byte* from) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  /// Loads one int8 per lane.
  static Vec load_int8(const std::byte* from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
  }
  /// Loads FP8 numbers (e4m3) and divides them by 256: a float16 with the same bits has that value.
  static TwoVecs load_float8(const std::byte* from) {
    // After the shift, the sign is one bit too low. Adding it to itself moves it.
    const auto numbers = [](const std::byte* bytes) {
      const __m128i loaded = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
      const __m256i shifted = _mm256_slli_epi16(_mm256_cvtepu8_epi16(loaded), 7);
      return _mm512_cvtph_ps(_mm256_add_epi16(shifted, _mm256_and_si256(shifted, _mm256_set1_epi16(0x4000))));
    };
    return {numbers(from), numbers(from + kLanes)};
  }
#else
  /// Rounds two vectors to bfloat16: `even` in the lower and `odd` in the upper halves of the lanes.
  static Words round_to_pairs(Vec even, Vec odd) {
    return pack_bfloat16(round_to_bfloat16(even), round_to_bfloat16(odd));
  }
  /// Rounds x to bfloat16, in the upper halves of the lanes; the lower halves are arbitrary.
  static Vec round_to_bfloat16(Vec x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_epi32(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_castsi512_ps(_mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000)));
  }
  static void store_bfloat16(std::byte* to, Vec x, std::int64_t n) {
    const __m512i rounded = _mm512_castps_si512(round_to_bfloat16(x));
    _mm256_mask_storeu_epi16(to, first(n), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
  }
  /// Stores two whole vectors, x first.
  static void store_bfloat16(std::byte* to, Vec x, Vec behind) {
    store_bfloat16(to, x, kLanes);
    store_bfloat16(to + kLanes * 2, behind, kLanes);
  }
#endif
  static void store_float16(std::byte* to, Vec x, std::int64_t n) {
    _mm256_mask_storeu_epi16(to, first(n), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  static Words load_words(const std::byte* from, std::int64_t n) {
    return _mm512_maskz_loadu_epi32(first(n), from);
  }
  static void store_words(std::byte* to, Words words, std::int64_t n) {
    _mm512_mask_storeu_epi32(to, first(n), words);
  }
  static Words set_words(std::uint32_t bits) { return _mm512_set1_epi32(static_cast<int>(bits)); }
  static Words zero_words() { return _mm512_setzero_si512(); }
  static Words greatest_of(Words a, Words b) { return _mm512_max_epu32(a, b); }
  static Words without_sign(Vec x) {
    return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
  }
  static Words floats_to_bits(Vec x) { return _mm512_castps_si512(x); }
  /// u - 8 of the four bits at kShift. Permutations read no other bits of an index.
  template <int kShift>
  static Vec centred_nibble(Words words) {
    const __m512 values = _mm512_setr_ps(-8.0F, -7.0F, -6.0F, -5.0F, -4.0F, -3.0F, -2.0F, -1.0F, 0.0F, 1.0F,
                                         2.0F, 3.0F, 4.0F, 5.0F, 6.0F, 7.0F);
    return _mm512_permutexvar_ps(_mm512_srli_epi32(words, kShift), values);
  }
  /// u - zero of the two or three bits at a shift. Permutations also read the bits above them, so the table
  /// repeats its values for all combinations of these.
  template <int kBits>
  class CentredBits {
   public:
    explicit CentredBits(int zero) {
      const auto value = [&](int index) { return static_cast<float>(index % (1 << kBits) - zero); };
      values_ = _mm512_broadcast_f32x8(
          _mm256_setr_ps(value(0), value(1), value(2), value(3), value(4), value(5), value(6), value(7)));
    }
    template <int kShift>
    [[nodiscard]] Vec at(Words words) const {
      return _mm512_permutexvar_ps(_mm512_srli_epi32(words, kShift), values_);
    }

   private:
    Vec values_;
  };
  /// Collects the highest bit of each half of a lane from three words: bits 0, 1 and 2 of the result's
  /// halves. Its other bits are arbitrary.
  static Words highest_bits(Words first, Words second, Words third) {
    // For each bit: the first operand where the mask is set, otherwise the second.
    constexpr int kChoose = 0xca;
    const Words lowest = _mm512_ternarylogic_epi32(_mm512_set1_epi32(0x10001), _mm512_srli_epi32(first, 15),
                                                   _mm512_srli_epi32(second, 14), kChoose);
    return _mm512_ternarylogic_epi32(_mm512_set1_epi32(0x30003), lowest, _mm512_srli_epi32(third, 13),
                                     kChoose);
  }
  /// A table of sixteen numbers; look_up() selects one by the four bits at kShift.
  using Table = __m512;
  static Table load_table(const float* numbers) { return _mm512_loadu_ps(numbers); }
  template <int kShift>
  static Vec look_up(Words words, Table table) {
    return _mm512_permutexvar_ps(_mm512_srli_epi32(words, kShift), table);
  }
  /// Loads two int8 per lane.
  static Pair load_int8_pairs(const std::byte* from, std::int64_t n) {
    const __m512i words = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(n), from));
    return {to_float<0>(words), to_float<8>(words)};
  }
  /// Converts the int8 at bit kBit of each lane. Its bits, with 128 added, replace mantissa bits of a large
  /// number whose mantissa bit kBit has the value 1. Subtracting that number gives the exact result, in fewer
  /// instructions than shifting and converting.
  template <int kBit>
  static Vec to_float(Words words) {
    constexpr int kMantissaBits = 23;
    constexpr int kExponent = 127 + kMantissaBits - kBit;
    constexpr int kBase = kExponent << kMantissaBits | 0x80 << kBit;
    constexpr int kAndXor = 0x6a;  // (a & b) ^ c
    const Words biased =
        _mm512_ternarylogic_epi32(words, _mm512_set1_epi32(0xff << kBit), _mm512_set1_epi32(kBase), kAndXor);
    return _mm512_sub_ps(_mm512_castsi512_ps(biased), _mm512_castsi512_ps(_mm512_set1_epi32(kBase)));
  }
  /// Loads two FP8 numbers (e4m3) per lane and divides them by 256: a float16 with the same bits has that
  /// value.
  static Pair load_float8_pairs(const std::byte* from, std::int64_t n) {
    const __m256i bytes = _mm256_maskz_loadu_epi16(first(n), from);
    // Converts the upper byte of each half; its sign stays in place.
    const auto half = [](__m256i upper) {
      return _mm256_and_si256(_mm256_srai_epi16(upper, 1), _mm256_set1_epi16(static_cast<short>(0xbf80)));
    };
    return {_mm512_cvtph_ps(half(_mm256_slli_epi16(bytes, 8))), _mm512_cvtph_ps(half(bytes))};
  }
  /// Loads one uint8 per lane.
  static Vec load_uint8(const std::byte* from, std::int64_t n) {
    return _mm512_cvtepi32_ps(load_bytes(from, n));
  }
  /// Stores the lowest byte of each lane.
  static void store_low_bytes(std::uint8_t* to, Words words, std::int64_t n) {
    _mm512_mask_cvtepi32_storeu_epi8(to, first(n), words);
  }
  /// Puts the upper halves of `even` and `odd`, which are bfloat16, into the lower and upper halves of the
  /// lanes.
  static Words pack_bfloat16(Vec even, Vec odd) {
    const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even), 16);
    return _mm512_mask_blend_epi16(0xaaaaaaaaU, low, _mm512_castps_si512(odd));
  }
  /// Returns the bfloat16 in the lower and upper halves of the lanes.
  static Pair bfloat16_pairs(Words words) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(words, 16)),
            _mm512_castsi512_ps(_mm512_and_epi32(words, _mm512_set1_epi32(-0x10000)))};
  }
  /// Adds to each lane the four products of uint8 in `a` and int8 in `b`.
  static Words dot(Words sums, Words a, Words b) {
#ifdef __AVX512VNNI__
    // GCC 12 copies the sums around its own intrinsic, and spills them.
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
    return sums;
#else
    const __m512i even = _mm512_madd_epi16(_mm512_and_si512(a, _mm512_set1_epi16(255)),
                                           _mm512_srai_epi16(_mm512_slli_epi16(b, 8), 8));
    const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(a, 8), _mm512_srai_epi16(b, 8));
    return _mm512_add_epi32(sums, _mm512_add_epi32(even, odd));
#endif
  }
  /// Loads two int8 per lane as int16.
  static Words load_int8_as_int16(const std::byte* from, std::int64_t n) {
    return _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi16(first(n), from));
  }
  using Int16Sums = Words;
  static Int16Sums int16_sums(Words start) { return start; }
  static Words words_of(Int16Sums sums) { return sums; }
  /// Adds to each lane the two products of int16 in `a` and `b`.
  static Int16Sums dot_int16(Int16Sums sums, Words a, Words b) {
#ifdef __AVX512VNNI__
    // See dot().
    asm("vpdpwssd %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
    return sums;
#else
    return _mm512_add_epi32(sums, _mm512_madd_epi16(a, b));
#endif
  }
  static Words subtract_words(Words a, Words b) { return _mm512_sub_epi32(a, b); }
  static Words add_words(Words a, Words b) { return _mm512_add_epi32(a, b); }
  /// Reorders 32 bytes in place: byte i becomes byte order[i].
  static void reorder_bytes(std::uint8_t* bytes, const std::uint8_t* order) { shuffle_bytes(bytes, order); }
  static Words multiply_words(Words a, Words b) { return _mm512_mullo_epi32(a, b); }
  static Words subtract_bytes(Words a, Words b) { return _mm512_sub_epi8(a, b); }
  /// Loads one uint8 per lane.
  static Words load_bytes(const std::byte* from, std::int64_t n) {
    return _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(first(n), from));
  }
  /// Shifts to the left if kShift is negative.
  template <int kShift>
  static Words shift_right(Words words) {
    return kShift < 0 ? _mm512_slli_epi32(words, kShift < 0 ? -kShift : 0)
                      : _mm512_srli_epi32(words, kShift < 0 ? 0 : kShift);
  }
  static Words bits_of(Words words, std::uint32_t mask) { return _mm512_and_si512(words, set_words(mask)); }
  /// Returns the bits of `a` under its mask, and the bits of `b` under its mask.
  static Words merge_bits(Words a, std::uint32_t mask_of_a, Words b, std::uint32_t mask_of_b) {
    constexpr int kFirstTwoOrThird = 0xea;
    return _mm512_ternarylogic_epi32(a, set_words(mask_of_a), bits_of(b, mask_of_b), kFirstTwoOrThird);
  }
#ifdef __AVX512VNNI__
  /// Adds up the products of at most eight pairs of Words, of integers u up to 15 with int8 q.
  class FewBitsDot {
   public:
    void add(Words* sums, Words u, Words q) { *sums = dot(*sums, u, q); }
    void finish(Words*) const {}
  };
#else
  /// Adds up the products of at most eight pairs of Words, of integers u up to 15 with int8 q. Sums of two
  /// products have sixteen bits; finish() adds them to `sums`.
  class FewBitsDot {
   public:
    void add(Words*, Words u, Words q) { halves_ = _mm512_add_epi16(halves_, _mm512_maddubs_epi16(u, q)); }
    void finish(Words* sums) const {
      *sums = _mm512_add_epi32(*sums, _mm512_madd_epi16(halves_, _mm512_set1_epi16(1)));
    }

   private:
    Words halves_ = _mm512_setzero_si512();
  };
#endif
  static Vec words_to_floats(Words words) { return _mm512_cvtepi32_ps(words); }
};

struct Float32Weights {
  using A = float;
  using B = __m512;
  using Broadcast = __m512;
  static constexpr int kInterleave = 1;
  static constexpr std::int64_t kColumnBytes = 4;
  static B load(const std::byte* from) { return _mm512_loadu_ps(from); }
  static B load(const std::byte* from, std::int64_t n) { return _mm512_maskz_loadu_ps(Simd::first(n), from); }
  static Broadcast broadcast(const A* a) { return _mm512_set1_ps(*a); }
  static Broadcast broadcast_last(const A* a) { return broadcast(a); }
  static __m512 multiply_add(Broadcast a, B b, __m512 sum) { return _mm512_fmadd_ps(a, b, sum); }
};

struct Float16Weights : Float32Weights {
  static constexpr std::int64_t kColumnBytes = 2;
  static B load(const std::byte* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static B load(const std::byte* from, std::int64_t n) { return Simd::load_float16(from, n); }
};

/// Multiplies two inputs at a time; the product of the even one is added first.
struct BFloat16Weights {
  using A = std::uint16_t;
  using B = __m512i;
  static constexpr int kInterleave = 2;
  static constexpr std::int64_t kColumnBytes = 4;
  static B load(const std::byte* from) { return _mm512_loadu_si512(from); }
  static B load(const std::byte* from, std::int64_t n) {
    return _mm512_maskz_loadu_epi32(Simd::first(n), from);
  }
#ifdef __AVX512BF16__
  using Broadcast = __m512i;
  static Broadcast broadcast(const A* a) {
    std::int32_t pair = 0;
    std::memcpy(&pair, a, sizeof(pair));
    return _mm512_set1_epi32(pair);
  }
  static Broadcast broadcast_last(const A* a) { return _mm512_set1_epi32(*a); }
  static __m512 multiply_add(Broadcast a, B b, __m512 sum) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
#else
  struct Broadcast {
    __m512 even;
    __m512 odd;
  };
  static Broadcast broadcast(const A* a) {
    return {_mm512_set1_ps(bfloat16_to_float(a[0])), _mm512_set1_ps(bfloat16_to_float(a[1]))};
  }
  static Broadcast broadcast_last(const A* a) {
    return {_mm512_set1_ps(bfloat16_to_float(a[0])), _mm512_setzero_ps()};
  }
  static __m512 multiply_add(const Broadcast& a, B b, __m512 sum) {
    const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(b, 16));
    const __m512 odd = _mm512_castsi512_ps(_mm512_and_epi32(b, _mm512_set1_epi32(-0x10000)));
    return _mm512_fmadd_ps(a.odd, odd, _mm512_fmadd_ps(a.even, even, sum));
  }
#endif
};

/// Expands the pieces of a compressed panel to pairs of bfloat16.
class PieceExpander {
 public:
  explicit PieceExpander(const CompressedPanel& panel)
      : table_(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(panel.table)))) {}

  /// Returns four vectors of pairs of sixteen outputs.
  void expand(const std::byte* piece, __m512i (&pairs)[4]) const {
    const __m512i nibble = _mm512_set1_epi8(15);
    const __m512i codes = _mm512_loadu_si512(piece + 128);
    expand_half(_mm512_loadu_si512(piece), _mm512_and_si512(codes, nibble), pairs);
    expand_half(_mm512_loadu_si512(piece + 64), _mm512_and_si512(_mm512_srli_epi16(codes, 4), nibble),
                pairs + 2);
  }

  /// Writes these vectors to `out`, row_bytes apart.
  void expand(const std::byte* piece, std::byte* out, std::int64_t row_bytes) const {
    __m512i pairs[4];
    expand(piece, pairs);
    for (const __m512i& pair : pairs) {
      _mm512_storeu_si512(out, pair);
      out += row_bytes;
    }
  }

 private:
  void expand_half(__m512i lower, __m512i codes, __m512i* pairs) const {
    const __m512i upper = _mm512_shuffle_epi8(table_, codes);
    pairs[0] = _mm512_unpacklo_epi8(lower, upper);
    pairs[1] = _mm512_unpackhi_epi8(lower, upper);
  }

  __m512i table_;
};

/// Size of the largest tile whose sums stay in the 32 registers.
inline constexpr int kTileRows = 6;
inline constexpr int kTileVectors = 4;
inline constexpr int kInt16TileVectors = kTileVectors;
/// Maximum number of rows of a tile whose weights are decoded in registers: decoding needs registers too.
inline constexpr int kDecodedTileRows = 6;
inline constexpr std::int64_t kInt8DecodedRows = 24;
inline constexpr std::int64_t kInt4DecodedRows = 48;

}  // namespace
}  // namespace adaptrt
