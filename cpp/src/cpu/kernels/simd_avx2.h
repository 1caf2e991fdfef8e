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

/// Eight float32 in a 256-bit register. `n` is a number of lanes, 0 to kLanes; the others are zero or not
/// touched.
struct Simd {
  using Vec = __m256;
  using Words = __m256i;
  static constexpr int kLanes = 8;
  static constexpr Fetching kFetching{};
  /// 1.5 * 2^23: adding it rounds to an integer, in the low bits.
  static constexpr float kRounder = 12582912.0F;
  struct Pair {
    Vec even;
    Vec odd;
  };

  static __m256i first(std::int64_t n) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), lanes);
  }

  static Vec zero() { return _mm256_setzero_ps(); }
  static Vec set(float value) { return _mm256_set1_ps(value); }
  static Vec load(const float* from) { return _mm256_loadu_ps(from); }
  // Masked stores take many times as long as whole ones on some CPUs.
  static Vec load(const float* from, std::int64_t n) {
    return n == kLanes ? load(from) : _mm256_maskload_ps(from, first(n));
  }
  static void store(float* to, Vec x) { _mm256_storeu_ps(to, x); }
  static void store(float* to, Vec x, std::int64_t n) {
    if (n == kLanes) {
      store(to, x);
    } else {
      _mm256_maskstore_ps(to, first(n), x);
    }
  }

  static Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
  static Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
  static Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
  static Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
  /// 1 / x for normal x, within 6.2e-5 of it.
  static Vec about_reciprocal(Vec x) { return _mm256_div_ps(set(1.0F), x); }
  static Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
  static Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
  /// Returns x in lanes [begin, end), and `others` in the other lanes.
  static Vec select_lanes(std::int64_t begin, std::int64_t end, Vec x, Vec others) {
    return _mm256_blendv_ps(others, x, _mm256_castsi256_ps(_mm256_andnot_si256(first(begin), first(end))));
  }
  static bool any_above(Vec x, Vec bound) {
    return _mm256_movemask_ps(_mm256_cmp_ps(x, bound, _CMP_GT_OQ)) != 0;
  }
  /// Returns x, but 0 in lanes where test < bound.
  static Vec zero_below(Vec test, Vec bound, Vec x) {
    return _mm256_and_ps(_mm256_cmp_ps(test, bound, _CMP_NLT_UQ), x);
  }
  /// Returns x, but +0 in lanes where test <= bound.
  static Vec zero_up_to(Vec test, Vec bound, Vec x) {
    return _mm256_and_ps(_mm256_cmp_ps(test, bound, _CMP_NLE_UQ), x);
  }
  /// Writes four words of each of kLanes rows, `offset` bytes after the rows' beginnings, to four lines of
  /// `line` bytes.
  static void transpose_words(const std::byte* const* rows, std::int64_t offset, std::byte* out,
                              std::int64_t line) {
    const auto four = [&](int row) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[row] + offset));
    };
    const auto halves = [&](int i) {
      return _mm256_inserti128_si256(_mm256_castsi128_si256(four(i)), four(4 + i), 1);
    };
    const __m256i a = halves(0);
    const __m256i b = halves(1);
    const __m256i c = halves(2);
    const __m256i d = halves(3);
    const __m256i ab_low = _mm256_unpacklo_epi32(a, b);
    const __m256i ab_high = _mm256_unpackhi_epi32(a, b);
    const __m256i cd_low = _mm256_unpacklo_epi32(c, d);
    const __m256i cd_high = _mm256_unpackhi_epi32(c, d);
    const auto store = [&](int i, __m256i x) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i * line), x);
    };
    store(0, _mm256_unpacklo_epi64(ab_low, cd_low));
    store(1, _mm256_unpackhi_epi64(ab_low, cd_low));
    store(2, _mm256_unpacklo_epi64(ab_high, cd_high));
    store(3, _mm256_unpackhi_epi64(ab_high, cd_high));
  }
  /// Adds the low bits of `integer` to the exponent of x.
  static Vec add_to_exponent(Vec x, Vec integer) {
    return _mm256_castsi256_ps(
        _mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_castps_si256(integer), 23)));
  }
  /// Rounds to the nearest integer, ties to even; |x| must be at most 2^22.
  static Vec round(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  /// x 2^n for integers n from -150 to 127. The result may be 0 if n < -126.
  static Vec times_power_of_two(Vec x, Vec n) {
    // Multiplying keeps NaN; adding to its bits might not.
    return zero_below(n, set(-126.0F), mul(x, add_to_exponent(set(1.0F), add(n, set(kRounder)))));
  }
  static float sum(Vec x) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  static float greatest(Vec x) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
  }

  /// n two-byte elements; AVX2 has no masked load of them.
  static __m128i load_halves(const std::byte* from, std::int64_t n) {
    if (n == kLanes) return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    alignas(16) std::uint16_t halves[kLanes] = {};
    std::memcpy(halves, from, static_cast<std::size_t>(n) * sizeof(std::uint16_t));
    return _mm_load_si128(reinterpret_cast<const __m128i*>(halves));
  }
  static void store_halves(std::byte* to, __m128i halves, std::int64_t n) {
    if (n == kLanes) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to), halves);
      return;
    }
    std::memcpy(to, &halves, static_cast<std::size_t>(n) * sizeof(std::uint16_t));
  }
  static Vec load_bfloat16(const std::byte* from, std::int64_t n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_halves(from, n)), 16));
  }
  static Vec load_float16(const std::byte* from, std::int64_t n) {
    return _mm256_cvtph_ps(load_halves(from, n));
  }
  /// Rounds x to bfloat16, in the upper halves of the lanes; the lower halves are arbitrary.
  static Vec round_to_bfloat16(Vec x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    return _mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), nan);
  }
  static Vec round_to_float16(Vec x) {
    return _mm256_cvtph_ps(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static void store_bfloat16(std::byte* to, Vec x, std::int64_t n) {
    const __m256i high = _mm256_srli_epi32(_mm256_castps_si256(round_to_bfloat16(x)), 16);
    store_halves(to, _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1)), n);
  }
  /// Stores two whole vectors, x first.
  static void store_bfloat16(std::byte* to, Vec x, Vec behind) {
    store_bfloat16(to, x, kLanes);
    store_bfloat16(to + kLanes * 2, behind, kLanes);
  }
  static void store_float16(std::byte* to, Vec x, std::int64_t n) {
    store_halves(to, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), n);
  }

  static Words load_words(const std::byte* from, std::int64_t n) {
    if (n == kLanes) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm256_maskload_epi32(reinterpret_cast<const int*>(from), first(n));
  }
  static void store_words(std::byte* to, Words words, std::int64_t n) {
    if (n == kLanes) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), words);
    } else {
      _mm256_maskstore_epi32(reinterpret_cast<int*>(to), first(n), words);
    }
  }
  static Words set_words(std::uint32_t bits) { return _mm256_set1_epi32(static_cast<int>(bits)); }
  static Words zero_words() { return _mm256_setzero_si256(); }
  static Words greatest_of(Words a, Words b) { return _mm256_max_epu32(a, b); }
  static Words without_sign(Vec x) {
    return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff));
  }
  static Words floats_to_bits(Vec x) { return _mm256_castps_si256(x); }
  /// u - 8 of the four bits at kShift.
  template <int kShift>
  static Vec centred_nibble(Words words) {
    // With its highest bit flipped, u is u - 8 as a number with a sign.
    const __m256i flipped = _mm256_xor_si256(words, _mm256_set1_epi32(static_cast<int>(0x88888888U)));
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(flipped, 28 - kShift), 28));
  }
  /// u - zero of the two or three bits at a shift. Permutations read three bits of an index.
  template <int kBits>
  class CentredBits {
   public:
    explicit CentredBits(int zero) {
      const auto value = [&](int index) { return static_cast<float>(index % (1 << kBits) - zero); };
      values_ =
          _mm256_setr_ps(value(0), value(1), value(2), value(3), value(4), value(5), value(6), value(7));
    }
    template <int kShift>
    [[nodiscard]] Vec at(Words words) const {
      return _mm256_permutevar8x32_ps(values_, _mm256_srli_epi32(words, kShift));
    }

   private:
    Vec values_;
  };
  /// Collects the highest bit of each half of a lane from three words: bits 0, 1 and 2 of the result's
  /// halves. Its other bits are arbitrary.
  static Words highest_bits(Words first, Words second, Words third) {
    const auto bit = [](Words words, int mask) { return _mm256_and_si256(words, _mm256_set1_epi32(mask)); };
    return _mm256_or_si256(_mm256_or_si256(bit(_mm256_srli_epi32(first, 15), 0x10001),
                                           bit(_mm256_srli_epi32(second, 14), 0x20002)),
                           bit(_mm256_srli_epi32(third, 13), 0x40004));
  }
  /// A table of sixteen numbers; look_up() selects one by the four bits at kShift. Permutations read three of
  /// them.
  struct Table {
    Vec first;
    Vec second;
  };
  static Table load_table(const float* numbers) { return {load(numbers), load(numbers + kLanes)}; }
  template <int kShift>
  static Vec look_up(Words words, Table table) {
    const __m256i index = _mm256_srli_epi32(words, kShift);
    const __m256 fourth_bit = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.first, index),
                            _mm256_permutevar8x32_ps(table.second, index), fourth_bit);
  }
  /// Loads two int8 per lane.
  static Pair load_int8_pairs(const std::byte* from, std::int64_t n) {
    const __m256i words = _mm256_cvtepi16_epi32(load_halves(from, n));
    return {_mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(words, 24), 24)),
            _mm256_cvtepi32_ps(_mm256_srai_epi32(words, 8))};
  }
  /// Loads two FP8 numbers (e4m3) per lane and divides them by 256: a float16 with the same bits has that
  /// value.
  static Pair load_float8_pairs(const std::byte* from, std::int64_t n) {
    const __m128i bytes = load_halves(from, n);
    // Converts the upper byte of each half; its sign stays in place.
    const auto half = [](__m128i upper) {
      return _mm_and_si128(_mm_srai_epi16(upper, 1), _mm_set1_epi16(static_cast<short>(0xbf80)));
    };
    return {_mm256_cvtph_ps(half(_mm_slli_epi16(bytes, 8))), _mm256_cvtph_ps(half(bytes))};
  }
  /// Loads one uint8 per lane.
  static Vec load_uint8(const std::byte* from, std::int64_t n) {
    return _mm256_cvtepi32_ps(load_bytes(from, n));
  }
  /// Stores the lowest byte of each lane.
  static void store_low_bytes(std::uint8_t* to, Words words, std::int64_t n) {
    alignas(32) std::uint32_t lanes[kLanes];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), words);
    for (std::int64_t lane = 0; lane < n; ++lane) to[lane] = static_cast<std::uint8_t>(lanes[lane]);
  }
  /// Puts the upper halves of `even` and `odd`, which are bfloat16, into the lower and upper halves of the
  /// lanes.
  static Words pack_bfloat16(Vec even, Vec odd) {
    const __m256i low = _mm256_srli_epi32(_mm256_castps_si256(even), 16);
    return _mm256_blend_epi16(low, _mm256_castps_si256(odd), 0xaa);
  }
  /// Rounds two vectors to bfloat16: `even` in the lower and `odd` in the upper halves of the lanes.
  static Words round_to_pairs(Vec even, Vec odd) {
    return pack_bfloat16(round_to_bfloat16(even), round_to_bfloat16(odd));
  }
  /// Returns the bfloat16 in the lower and upper halves of the lanes.
  static Pair bfloat16_pairs(Words words) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(words, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(-0x10000)))};
  }
  /// Adds to each lane the four products of uint8 in `a` and int8 in `b`.
  static Words dot(Words sums, Words a, Words b) {
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, _mm256_set1_epi16(255)),
                                           _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
    return _mm256_add_epi32(sums, _mm256_add_epi32(even, odd));
  }
  /// Loads two int8 per lane as int16.
  static Words load_int8_as_int16(const std::byte* from, std::int64_t n) {
    return _mm256_cvtepi8_epi16(load_halves(from, n));
  }
  using Int16Sums = Words;
  static Int16Sums int16_sums(Words start) { return start; }
  static Words words_of(Int16Sums sums) { return sums; }
  /// Adds to each lane the two products of int16 in `a` and `b`.
  static Int16Sums dot_int16(Int16Sums sums, Words a, Words b) {
    return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
  }
  static Words subtract_words(Words a, Words b) { return _mm256_sub_epi32(a, b); }
  static Words add_words(Words a, Words b) { return _mm256_add_epi32(a, b); }
  /// Reorders 32 bytes in place: byte i becomes byte order[i].
  static void reorder_bytes(std::uint8_t* bytes, const std::uint8_t* order) { shuffle_bytes(bytes, order); }
  static Words multiply_words(Words a, Words b) { return _mm256_mullo_epi32(a, b); }
  static Words subtract_bytes(Words a, Words b) { return _mm256_sub_epi8(a, b); }
  /// Loads one uint8 per lane.
  static Words load_bytes(const std::byte* from, std::int64_t n) {
    alignas(8) std::uint8_t bytes[kLanes] = {};
    std::memcpy(bytes, from, static_cast<std::size_t>(n));
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
  }
  /// Shifts to the left if kShift is negative.
  template <int kShift>
  static Words shift_right(Words words) {
    return kShift < 0 ? _mm256_slli_epi32(words, kShift < 0 ? -kShift : 0)
                      : _mm256_srli_epi32(words, kShift < 0 ? 0 : kShift);
  }
  static Words bits_of(Words words, std::uint32_t mask) { return _mm256_and_si256(words, set_words(mask)); }
  /// Returns the bits of `a` under its mask, and the bits of `b` under its mask.
  static Words merge_bits(Words a, std::uint32_t mask_of_a, Words b, std::uint32_t mask_of_b) {
    return _mm256_or_si256(bits_of(a, mask_of_a), bits_of(b, mask_of_b));
  }
  /// Adds up the products of at most eight pairs of Words, of integers u up to 15 with int8 q. Sums of two
  /// products have sixteen bits; finish() adds them to `sums`.
  class FewBitsDot {
   public:
    void add(Words*, Words u, Words q) { halves_ = _mm256_add_epi16(halves_, _mm256_maddubs_epi16(u, q)); }
    void finish(Words* sums) const {
      *sums = _mm256_add_epi32(*sums, _mm256_madd_epi16(halves_, _mm256_set1_epi16(1)));
    }

   private:
    Words halves_ = _mm256_setzero_si256();
  };
  static Vec words_to_floats(Words words) { return _mm256_cvtepi32_ps(words); }
};

struct Float32Weights {
  using A = float;
  using B = __m256;
  using Broadcast = __m256;
  static constexpr int kInterleave = 1;
  static constexpr std::int64_t kColumnBytes = 4;
  static B load(const std::byte* from) { return _mm256_loadu_ps(reinterpret_cast<const float*>(from)); }
  static B load(const std::byte* from, std::int64_t n) {
    return Simd::load(reinterpret_cast<const float*>(from), n);
  }
  static Broadcast broadcast(const A* a) { return _mm256_set1_ps(*a); }
  static Broadcast broadcast_last(const A* a) { return broadcast(a); }
  static __m256 multiply_add(Broadcast a, B b, __m256 sum) { return _mm256_fmadd_ps(a, b, sum); }
};

struct Float16Weights : Float32Weights {
  static constexpr std::int64_t kColumnBytes = 2;
  static B load(const std::byte* from) { return Simd::load_float16(from, Simd::kLanes); }
  static B load(const std::byte* from, std::int64_t n) { return Simd::load_float16(from, n); }
};

/// Multiplies two inputs at a time; the product of the even one is added first.
struct BFloat16Weights {
  using A = std::uint16_t;
  using B = __m256i;
  struct Broadcast {
    __m256 even;
    __m256 odd;
  };
  static constexpr int kInterleave = 2;
  static constexpr std::int64_t kColumnBytes = 4;
  static B load(const std::byte* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
  static B load(const std::byte* from, std::int64_t n) {
    return _mm256_maskload_epi32(reinterpret_cast<const int*>(from), Simd::first(n));
  }
  static Broadcast broadcast(const A* a) {
    std::uint32_t pair = 0;
    std::memcpy(&pair, a, sizeof(pair));
    const auto [even, odd] = Simd::bfloat16_pairs(Simd::set_words(pair));
    return {even, odd};
  }
  static Broadcast broadcast_last(const A* a) {
    return {_mm256_set1_ps(bfloat16_to_float(a[0])), _mm256_setzero_ps()};
  }
  static __m256 multiply_add(const Broadcast& a, B b, __m256 sum) {
    const __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(b, 16));
    const __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(b, _mm256_set1_epi32(-0x10000)));
    return _mm256_fmadd_ps(a.odd, odd, _mm256_fmadd_ps(a.even, even, sum));
  }
};

/// Expands the pieces of a compressed panel to pairs of bfloat16.
class PieceExpander {
 public:
  explicit PieceExpander(const CompressedPanel& panel)
      : table_(_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(panel.table)))) {}

  /// Writes four rows of pairs of sixteen outputs to `out`, row_bytes apart.
  void expand(const std::byte* piece, std::byte* out, std::int64_t row_bytes) const {
    const __m256i nibble = _mm256_set1_epi8(15);
    for (std::int64_t part = 0; part < 64; part += 32, piece += 32, out += 32) {
      const __m256i codes = load(piece + 128);
      expand_half(load(piece), _mm256_and_si256(codes, nibble), out, row_bytes);
      expand_half(load(piece + 64), _mm256_and_si256(_mm256_srli_epi16(codes, 4), nibble),
                  out + 2 * row_bytes, row_bytes);
    }
  }

 private:
  static __m256i load(const std::byte* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  }

  void expand_half(__m256i lower, __m256i codes, std::byte* out, std::int64_t row_bytes) const {
    const __m256i upper = _mm256_shuffle_epi8(table_, codes);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_unpacklo_epi8(lower, upper));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + row_bytes), _mm256_unpackhi_epi8(lower, upper));
  }

  __m256i table_;
};

inline constexpr int kTileRows = 6;
inline constexpr int kTileVectors = 2;
inline constexpr int kInt16TileVectors = kTileVectors;
/// Maximum number of rows of a tile whose weights are decoded in registers: decoding needs registers too.
inline constexpr int kDecodedTileRows = 3;
inline constexpr std::int64_t kInt8DecodedRows = 6;
inline constexpr std::int64_t kInt4DecodedRows = 6;

}  // namespace
}  // namespace adaptrt
