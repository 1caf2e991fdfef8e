#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "adaptrt/core/compressed_panels.h"
#include "adaptrt/core/dtype.h"
#include "fetching.h"

namespace adaptrt {
namespace {

/// Four float32 in the vector types that GCC and Clang have for every target. `n` is a number of lanes, 0 to
/// kLanes; the others are zero or not touched. fma() is not fused, so results are the same on every target.
struct Simd {
  using Vec = float __attribute__((vector_size(16)));
  using Ints = std::int32_t __attribute__((vector_size(16)));
  using Words = std::uint32_t __attribute__((vector_size(16)));
  using Bytes = std::uint8_t __attribute__((vector_size(16)));
  static constexpr int kLanes = 4;
  static constexpr Fetching kFetching{};
  /// 1.5 * 2^23: adding it rounds to an integer, in the low bits.
  static constexpr float kRounder = 12582912.0F;
  struct Pair {
    Vec even;
    Vec odd;
  };

  static Vec zero() { return Vec{}; }
  static Vec set(float value) { return Vec{value, value, value, value}; }
  static Words set_bits(std::uint32_t bits) { return Words{bits, bits, bits, bits}; }
  static Vec load(const float* from) { return load(from, kLanes); }
  static Vec load(const float* from, std::int64_t n) {
    Vec x{};
    std::memcpy(&x, from, static_cast<std::size_t>(n) * sizeof(float));
    return x;
  }
  static void stream_line(const std::byte* from, std::byte* to) { std::memcpy(to, from, 64); }
  static void finish_stream() {}
  static void store(float* to, Vec x) { store(to, x, kLanes); }
  static void store(float* to, Vec x, std::int64_t n) {
    std::memcpy(to, &x, static_cast<std::size_t>(n) * sizeof(float));
  }

  static Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
  static Vec add(Vec a, Vec b) { return a + b; }
  static Vec sub(Vec a, Vec b) { return a - b; }
  static Vec mul(Vec a, Vec b) { return a * b; }
  static Vec div(Vec a, Vec b) { return a / b; }
  static Vec select(Ints mask, Vec yes, Vec no) {
    return bits_to_floats((floats_to_bits(yes) & to_words(mask)) | (floats_to_bits(no) & ~to_words(mask)));
  }
  /// 1 / x for normal x, within 6.2e-5 of it.
  static Vec about_reciprocal(Vec x) { return set(1.0F) / x; }
  static Vec max(Vec a, Vec b) { return select(a > b, a, b); }
  static Vec min(Vec a, Vec b) { return select(a < b, a, b); }
  /// Returns x in lanes [begin, end), and `others` in the other lanes.
  static Vec select_lanes(std::int64_t begin, std::int64_t end, Vec x, Vec others) {
    for (std::int64_t lane = begin; lane < end; ++lane) others[lane] = x[lane];
    return others;
  }
  static bool any_above(Vec x, Vec bound) {
    const Ints above = x > bound;
    return (above[0] | above[1] | above[2] | above[3]) != 0;
  }
  /// Returns x, but 0 in lanes where test < bound.
  static Vec zero_below(Vec test, Vec bound, Vec x) { return select(test < bound, zero(), x); }
  /// Returns x, but +0 in lanes where test <= bound.
  static Vec zero_up_to(Vec test, Vec bound, Vec x) { return select(test <= bound, zero(), x); }
  /// Writes four words of each of kLanes rows, `offset` bytes after the rows' beginnings, to four lines of
  /// `line` bytes.
  static void transpose_words(const std::byte* const* rows, std::int64_t offset, std::byte* out,
                              std::int64_t line) {
    for (std::int64_t word = 0; word < 4; ++word) {
      for (std::int64_t row = 0; row < kLanes; ++row) {
        std::memcpy(out + word * line + row * 4, rows[row] + offset + word * 4, 4);
      }
    }
  }
  /// Adds the low bits of `integer` to the exponent of x.
  static Vec add_to_exponent(Vec x, Vec integer) {
    return bits_to_floats(floats_to_bits(x) + (floats_to_bits(integer) << 23));
  }
  /// Rounds to the nearest integer, ties to even; |x| must be at most 2^22.
  static Vec round(Vec x) { return (x + set(kRounder)) - set(kRounder); }
  /// x 2^n for integers n from -150 to 127. The result may be 0 if n < -126.
  static Vec times_power_of_two(Vec x, Vec n) {
    // Multiplying keeps NaN; adding to its bits might not.
    return zero_below(n, set(-126.0F), mul(x, add_to_exponent(set(1.0F), add(n, set(kRounder)))));
  }
  static float sum(Vec x) { return (x[0] + x[2]) + (x[1] + x[3]); }
  static float greatest(Vec x) {
    const float a = x[0] > x[2] ? x[0] : x[2];
    const float b = x[1] > x[3] ? x[1] : x[3];
    return a > b ? a : b;
  }

  static Words floats_to_bits(Vec x) { return cast<Words>(x); }
  static Vec bits_to_floats(Words x) { return cast<Vec>(x); }
  static Words to_words(Ints x) { return cast<Words>(x); }

  static Words load_halves(const std::byte* from, std::int64_t n) {
    std::uint16_t halves[kLanes] = {};
    std::memcpy(halves, from, static_cast<std::size_t>(n) * sizeof(std::uint16_t));
    return Words{halves[0], halves[1], halves[2], halves[3]};
  }
  static void store_halves(std::byte* to, Words bits, std::int64_t n) {
    const std::uint16_t halves[kLanes] = {
        static_cast<std::uint16_t>(bits[0]), static_cast<std::uint16_t>(bits[1]),
        static_cast<std::uint16_t>(bits[2]), static_cast<std::uint16_t>(bits[3])};
    std::memcpy(to, halves, static_cast<std::size_t>(n) * sizeof(std::uint16_t));
  }
  static Vec load_bfloat16(const std::byte* from, std::int64_t n) {
    return bits_to_floats(load_halves(from, n) << 16);
  }
  static Vec load_float16(const std::byte* from, std::int64_t n) {
    return float16_to_floats(load_halves(from, n));
  }
  /// Converts the lower halves of the lanes.
  static Vec float16_to_floats(Words half) {
    const Words sign = (half & set_bits(0x8000)) << 16;
    // Exponent and fraction of the half, read as a float32, are 2^112 too small, also for subnormal numbers.
    const Words magnitude = (half & set_bits(0x7fff)) << 13;
    const Words finite = floats_to_bits(bits_to_floats(magnitude) * set(0x1p112F));
    const Words special = magnitude | set_bits(0x7f800000);
    const Words is_special = to_words(magnitude >= set_bits(0x0f800000));
    return bits_to_floats(sign | (special & is_special) | (finite & ~is_special));
  }
  /// Rounds x to bfloat16, in the upper halves of the lanes; the lower halves are arbitrary.
  static Vec round_to_bfloat16(Vec x) {
    const Words bits = floats_to_bits(x);
    const Words rounded = bits + set_bits(0x7fff) + ((bits >> 16) & set_bits(1));
    const Words quiet = bits | set_bits(0x400000);
    const Words is_nan = to_words(x != x);
    return bits_to_floats((quiet & is_nan) | (rounded & ~is_nan));
  }
  static void store_bfloat16(std::byte* to, Vec x, std::int64_t n) {
    store_halves(to, floats_to_bits(round_to_bfloat16(x)) >> 16, n);
  }
  /// Stores two whole vectors, x first.
  static void store_bfloat16(std::byte* to, Vec x, Vec behind) {
    store_bfloat16(to, x, kLanes);
    store_bfloat16(to + kLanes * 2, behind, kLanes);
  }
  static void store_float16(std::byte* to, Vec x, std::int64_t n) {
    std::uint16_t halves[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) halves[lane] = float_to_float16(x[lane]);
    std::memcpy(to, halves, static_cast<std::size_t>(n) * sizeof(std::uint16_t));
  }

  static Vec round_to_float16(Vec x) {
    Vec rounded{};
    for (int lane = 0; lane < kLanes; ++lane) rounded[lane] = float16_to_float(float_to_float16(x[lane]));
    return rounded;
  }

  static Vec ints_to_floats(Ints x) { return __builtin_convertvector(x, Vec); }
  static Words load_words(const std::byte* from, std::int64_t n) {
    Words words{};
    std::memcpy(&words, from, static_cast<std::size_t>(n) * sizeof(std::uint32_t));
    return words;
  }
  static void store_words(std::byte* to, Words words, std::int64_t n) {
    std::memcpy(to, &words, static_cast<std::size_t>(n) * sizeof(std::uint32_t));
  }
  static Words set_words(std::uint32_t bits) { return set_bits(bits); }
  static Words zero_words() { return Words{}; }
  static Words greatest_of(Words a, Words b) { return a > b ? a : b; }
  static Words without_sign(Vec x) { return floats_to_bits(x) & set_bits(0x7fffffff); }
  /// u - 8 of the four bits at kShift.
  template <int kShift>
  static Vec centred_nibble(Words words) {
    return ints_to_floats(cast<Ints>((words >> kShift) & set_bits(15)) - Ints{8, 8, 8, 8});
  }
  /// u - zero of the two or three bits at a shift.
  template <int kBits>
  class CentredBits {
   public:
    explicit CentredBits(int zero) : zero_{zero, zero, zero, zero} {}
    template <int kShift>
    [[nodiscard]] Vec at(Words words) const {
      constexpr int kMask = (1 << kBits) - 1;
      return ints_to_floats(cast<Ints>((words >> kShift) & set_bits(kMask)) - zero_);
    }

   private:
    Ints zero_;
  };
  /// Collects the highest bit of each half of a lane from three words: bits 0, 1 and 2 of the result's
  /// halves. Its other bits are arbitrary.
  static Words highest_bits(Words first, Words second, Words third) {
    return (first >> 15 & set_bits(0x10001)) | (second >> 14 & set_bits(0x20002)) |
           (third >> 13 & set_bits(0x40004));
  }
  /// A table of sixteen numbers; look_up() selects one by the four bits at kShift.
  using Table = const float*;
  static Table load_table(const float* numbers) { return numbers; }
  template <int kShift>
  static Vec look_up(Words words, Table table) {
    Vec chosen{};
    for (int lane = 0; lane < kLanes; ++lane) chosen[lane] = table[(words[lane] >> kShift) & 15U];
    return chosen;
  }
  /// Loads two int8 per lane.
  static Pair load_int8_pairs(const std::byte* from, std::int64_t n) {
    const auto words = cast<Ints>(load_halves(from, n));
    return {ints_to_floats((words << 24) >> 24), ints_to_floats((words << 16) >> 24)};
  }
  /// Loads two FP8 numbers (e4m3) per lane and divides them by 256: a float16 with the same bits has that
  /// value.
  static Pair load_float8_pairs(const std::byte* from, std::int64_t n) {
    const Words words = load_halves(from, n);
    return {float16_to_floats((words << 8 & set_bits(0x8000)) | (words << 7 & set_bits(0x3f80))),
            float16_to_floats((words & set_bits(0x8000)) | (words >> 1 & set_bits(0x3f80)))};
  }
  /// Loads one uint8 per lane.
  static Vec load_uint8(const std::byte* from, std::int64_t n) {
    return ints_to_floats(cast<Ints>(load_bytes(from, n)));
  }
  /// Stores the lowest byte of each lane.
  static void store_low_bytes(std::uint8_t* to, Words words, std::int64_t n) {
    for (std::int64_t lane = 0; lane < n; ++lane) to[lane] = static_cast<std::uint8_t>(words[lane]);
  }
  /// Puts the upper halves of `even` and `odd`, which are bfloat16, into the lower and upper halves of the
  /// lanes.
  static Words pack_bfloat16(Vec even, Vec odd) {
    return (floats_to_bits(even) >> 16) | (floats_to_bits(odd) & set_bits(0xffff0000));
  }
  /// Rounds two vectors to bfloat16: `even` in the lower and `odd` in the upper halves of the lanes.
  static Words round_to_pairs(Vec even, Vec odd) {
    return pack_bfloat16(round_to_bfloat16(even), round_to_bfloat16(odd));
  }
  /// Returns the bfloat16 in the lower and upper halves of the lanes.
  static Pair bfloat16_pairs(Words words) {
    return {bits_to_floats(words << 16), bits_to_floats(words & set_bits(0xffff0000U))};
  }
  /// Adds to each lane the four products of uint8 in `a` and int8 in `b`.
  static Words dot(Words sums, Words a, Words b) {
    const auto bytes = cast<Ints>(b);
    sums += (a & set_bits(255)) * cast<Words>((bytes << 24) >> 24);
    sums += ((a >> 8) & set_bits(255)) * cast<Words>((bytes << 16) >> 24);
    sums += ((a >> 16) & set_bits(255)) * cast<Words>((bytes << 8) >> 24);
    return sums + (a >> 24) * cast<Words>(bytes >> 24);
  }
  /// Loads two int8 per lane as int16.
  static Words load_int8_as_int16(const std::byte* from, std::int64_t n) {
    const auto words = cast<Ints>(load_halves(from, n));
    return (cast<Words>((words << 24) >> 24) & set_bits(0xffff)) | (cast<Words>((words << 16) >> 24) << 16);
  }
  using Int16Sums = Words;
  static Int16Sums int16_sums(Words start) { return start; }
  static Words words_of(Int16Sums sums) { return sums; }
  /// Adds to each lane the two products of int16 in `a` and `b`.
  static Int16Sums dot_int16(Int16Sums sums, Words a, Words b) {
    const auto left = cast<Ints>(a);
    const auto right = cast<Ints>(b);
    sums += cast<Words>(((left << 16) >> 16) * ((right << 16) >> 16));
    return sums + cast<Words>((left >> 16) * (right >> 16));
  }
  static Words subtract_words(Words a, Words b) { return a - b; }
  static Words add_words(Words a, Words b) { return a + b; }
  /// Reorders 32 bytes in place: byte i becomes byte order[i].
  static void reorder_bytes(std::uint8_t* bytes, const std::uint8_t* order) {
    std::uint8_t before[32];
    std::memcpy(before, bytes, sizeof(before));
    for (std::size_t i = 0; i < sizeof(before); ++i) bytes[i] = before[order[i]];
  }
  static Words multiply_words(Words a, Words b) { return a * b; }
  static Words subtract_bytes(Words a, Words b) { return cast<Words>(cast<Bytes>(a) - cast<Bytes>(b)); }
  /// Loads one uint8 per lane.
  static Words load_bytes(const std::byte* from, std::int64_t n) {
    Words words{};
    for (std::int64_t lane = 0; lane < n; ++lane) words[lane] = static_cast<std::uint32_t>(from[lane]);
    return words;
  }
  /// Shifts to the left if kShift is negative.
  template <int kShift>
  static Words shift_right(Words words) {
    return kShift < 0 ? words << (kShift < 0 ? -kShift : 0) : words >> (kShift < 0 ? 0 : kShift);
  }
  static Words bits_of(Words words, std::uint32_t mask) { return words & set_bits(mask); }
  /// Returns the bits of `a` under its mask, and the bits of `b` under its mask.
  static Words merge_bits(Words a, std::uint32_t mask_of_a, Words b, std::uint32_t mask_of_b) {
    return bits_of(a, mask_of_a) | bits_of(b, mask_of_b);
  }
  /// Adds up the products of at most eight pairs of Words, of integers u up to 15 with int8 q.
  class FewBitsDot {
   public:
    void add(Words* sums, Words u, Words q) { *sums = dot(*sums, u, q); }
    void finish(Words*) const {}
  };
  static Vec words_to_floats(Words words) { return ints_to_floats(cast<Ints>(words)); }

 private:
  template <class To, class From>
  static To cast(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
  }
};

struct Float32Weights {
  using A = float;
  using B = Simd::Vec;
  using Broadcast = Simd::Vec;
  static constexpr int kInterleave = 1;
  static constexpr std::int64_t kColumnBytes = 4;
  static B load(const std::byte* from) { return load(from, Simd::kLanes); }
  static B load(const std::byte* from, std::int64_t n) {
    B b{};
    std::memcpy(&b, from, static_cast<std::size_t>(n) * sizeof(float));
    return b;
  }
  static Broadcast broadcast(const A* a) { return Simd::set(*a); }
  static Broadcast broadcast_last(const A* a) { return broadcast(a); }
  static Simd::Vec multiply_add(Broadcast a, B b, Simd::Vec sum) { return Simd::fma(a, b, sum); }
};

struct Float16Weights : Float32Weights {
  static constexpr std::int64_t kColumnBytes = 2;
  static B load(const std::byte* from) { return Simd::load_float16(from, Simd::kLanes); }
  static B load(const std::byte* from, std::int64_t n) { return Simd::load_float16(from, n); }
};

/// Multiplies two inputs at a time; the product of the even one is added first.
struct BFloat16Weights {
  using A = std::uint16_t;
  using B = Simd::Words;
  struct Broadcast {
    Simd::Vec even;
    Simd::Vec odd;
  };
  static constexpr int kInterleave = 2;
  static constexpr std::int64_t kColumnBytes = 4;
  static B load(const std::byte* from) { return load(from, Simd::kLanes); }
  static B load(const std::byte* from, std::int64_t n) {
    B b{};
    std::memcpy(&b, from, static_cast<std::size_t>(n) * sizeof(std::uint32_t));
    return b;
  }
  static Broadcast broadcast(const A* a) {
    return {Simd::set(bfloat16_to_float(a[0])), Simd::set(bfloat16_to_float(a[1]))};
  }
  static Broadcast broadcast_last(const A* a) { return {Simd::set(bfloat16_to_float(a[0])), Simd::zero()}; }
  static Simd::Vec multiply_add(const Broadcast& a, B b, Simd::Vec sum) {
    const Simd::Vec even = Simd::bits_to_floats(b << 16);
    const Simd::Vec odd = Simd::bits_to_floats(b & Simd::set_bits(0xffff0000));
    return Simd::fma(a.odd, odd, Simd::fma(a.even, even, sum));
  }
};

/// Expands the pieces of a compressed panel to pairs of bfloat16.
class PieceExpander {
 public:
  explicit PieceExpander(const CompressedPanel& panel) : panel_(panel) {}

  /// Writes four rows of pairs of sixteen outputs to `out`, row_bytes apart.
  void expand(const std::byte* piece, std::byte* out, std::int64_t row_bytes) const {
    for (std::int64_t i = 0; i < 64; ++i) {
      std::byte* to = out + i / 8 % 2 * row_bytes + (i / 16 * 8 + i % 8) * 2;
      const auto codes = static_cast<unsigned>(piece[128 + i]);
      store(piece[i], codes & 15U, to);
      store(piece[64 + i], codes >> 4U, to + 2 * row_bytes);
    }
  }

 private:
  void store(std::byte lower, unsigned code, std::byte* to) const {
    const auto bits = static_cast<std::uint16_t>(static_cast<unsigned>(panel_.table[code]) << 8U |
                                                 static_cast<unsigned>(lower));
    std::memcpy(to, &bits, sizeof(bits));
  }

  CompressedPanel panel_;
};

inline constexpr int kTileRows = 4;
inline constexpr int kTileVectors = 2;
inline constexpr int kInt16TileVectors = kTileVectors;
/// Maximum number of rows of a tile whose weights are decoded in registers: decoding needs registers too.
inline constexpr int kDecodedTileRows = 2;
inline constexpr std::int64_t kInt8DecodedRows = 4;
inline constexpr std::int64_t kInt4DecodedRows = 4;

}  // namespace
}  // namespace adaptrt
