#pragma once

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "adaptrt/core/compressed_panels.h"
#include "adaptrt/core/dtype.h"
#include "fetching.h"

namespace adaptrt {
namespace {

/// Four float32 in a 128-bit register of a 64-bit Arm CPU. `n` is a number of lanes, 0 to kLanes; the others
/// are zero or not touched. Products of integers are exact, with dot product instructions and without.
struct Simd {
  using Vec = float32x4_t;
  using Words = uint32x4_t;
  static constexpr int kLanes = 4;
  static constexpr Fetching kFetching{};
  /// 1.5 * 2^23: adding it rounds to an integer, in the low bits.
  static constexpr float kRounder = 12582912.0F;
  struct Pair {
    Vec even;
    Vec odd;
  };

  static Vec zero() { return vdupq_n_f32(0.0F); }
  static Vec set(float value) { return vdupq_n_f32(value); }
  static Vec load(const float* from) { return vld1q_f32(from); }
  static Vec load(const float* from, std::int64_t n) {
    if (n == kLanes) return load(from);
    Vec x = zero();
    std::memcpy(&x, from, static_cast<std::size_t>(n) * sizeof(float));
    return x;
  }
  static void stream_line(const std::byte* from, std::byte* to) { std::memcpy(to, from, 64); }
  static void finish_stream() {}
  static void store(float* to, Vec x) { vst1q_f32(to, x); }
  static void store(float* to, Vec x, std::int64_t n) {
    if (n == kLanes) {
      store(to, x);
      return;
    }
    std::memcpy(to, &x, static_cast<std::size_t>(n) * sizeof(float));
  }

  static Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
  static Vec add(Vec a, Vec b) { return vaddq_f32(a, b); }
  static Vec sub(Vec a, Vec b) { return vsubq_f32(a, b); }
  static Vec mul(Vec a, Vec b) { return vmulq_f32(a, b); }
  static Vec div(Vec a, Vec b) { return vdivq_f32(a, b); }
  /// 1 / x for normal x, within 6.2e-5 of it.
  static Vec about_reciprocal(Vec x) { return vdivq_f32(set(1.0F), x); }
  // FMAX and FMIN return NaN if either operand is NaN; other tables return b.
  static Vec max(Vec a, Vec b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
  static Vec min(Vec a, Vec b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
  /// Returns x in lanes [begin, end), and `others` in the other lanes.
  static Vec select_lanes(std::int64_t begin, std::int64_t end, Vec x, Vec others) {
    return vbslq_f32(vandq_u32(first(end), vmvnq_u32(first(begin))), x, others);
  }
  static bool any_above(Vec x, Vec bound) { return vmaxvq_u32(vcgtq_f32(x, bound)) != 0; }
  /// Returns x, but 0 in lanes where test < bound.
  static Vec zero_below(Vec test, Vec bound, Vec x) { return without(vcltq_f32(test, bound), x); }
  /// Returns x, but +0 in lanes where test <= bound.
  static Vec zero_up_to(Vec test, Vec bound, Vec x) { return without(vcleq_f32(test, bound), x); }
  /// Writes four words of each of kLanes rows, `offset` bytes after the rows' beginnings, to four lines of
  /// `line` bytes.
  static void transpose_words(const std::byte* const* rows, std::int64_t offset, std::byte* out,
                              std::int64_t line) {
    const auto four = [&](int row) { return load_words(rows[row] + offset, kLanes); };
    const uint32x4x2_t even = vzipq_u32(four(0), four(2));
    const uint32x4x2_t odd = vzipq_u32(four(1), four(3));
    for (int half = 0; half < 2; ++half) {
      const uint32x4x2_t lines = vzipq_u32(even.val[half], odd.val[half]);
      store_words(out + 2 * half * line, lines.val[0], kLanes);
      store_words(out + (2 * half + 1) * line, lines.val[1], kLanes);
    }
  }
  /// Adds the low bits of `integer` to the exponent of x.
  static Vec add_to_exponent(Vec x, Vec integer) {
    return bits_to_floats(vaddq_u32(floats_to_bits(x), vshlq_n_u32(floats_to_bits(integer), 23)));
  }
  /// Rounds to the nearest integer, ties to even; |x| must be at most 2^22.
  static Vec round(Vec x) { return vrndnq_f32(x); }
  /// x 2^n for integers n from -150 to 127. The result may be 0 if n < -126.
  static Vec times_power_of_two(Vec x, Vec n) {
    // Multiplying keeps NaN; adding to its bits might not.
    return zero_below(n, set(-126.0F), mul(x, add_to_exponent(set(1.0F), add(n, set(kRounder)))));
  }
  static float sum(Vec x) {
    const float32x2_t two = vadd_f32(vget_low_f32(x), vget_high_f32(x));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
  }
  static float greatest(Vec x) {
    const float a = x[0] > x[2] ? x[0] : x[2];
    const float b = x[1] > x[3] ? x[1] : x[3];
    return a > b ? a : b;
  }

  static Words floats_to_bits(Vec x) { return vreinterpretq_u32_f32(x); }
  static Vec bits_to_floats(Words x) { return vreinterpretq_f32_u32(x); }

  static uint16x4_t load_halves(const std::byte* from, std::int64_t n) {
    std::uint16_t halves[kLanes] = {};
    std::memcpy(halves, from, static_cast<std::size_t>(n) * sizeof(std::uint16_t));
    return vld1_u16(halves);
  }
  static void store_halves(std::byte* to, uint16x4_t halves, std::int64_t n) {
    std::memcpy(to, &halves, static_cast<std::size_t>(n) * sizeof(std::uint16_t));
  }
  static Vec load_bfloat16(const std::byte* from, std::int64_t n) {
    return bits_to_floats(vshll_n_u16(load_halves(from, n), 16));
  }
  static Vec load_float16(const std::byte* from, std::int64_t n) {
    return vcvt_f32_f16(vreinterpret_f16_u16(load_halves(from, n)));
  }
  /// Rounds x to bfloat16, in the upper halves of the lanes; the lower halves are arbitrary.
  static Vec round_to_bfloat16(Vec x) {
    const Words bits = floats_to_bits(x);
    const Words odd = vandq_u32(vshrq_n_u32(bits, 16), set_words(1));
    const Words rounded = vaddq_u32(vaddq_u32(bits, set_words(0x7fff)), odd);
    const Words quiet = vorrq_u32(bits, set_words(0x400000));
    return bits_to_floats(vbslq_u32(vceqq_f32(x, x), rounded, quiet));
  }
  static Vec round_to_float16(Vec x) { return vcvt_f32_f16(vcvt_f16_f32(x)); }
  static void store_bfloat16(std::byte* to, Vec x, std::int64_t n) {
    store_halves(to, vshrn_n_u32(floats_to_bits(round_to_bfloat16(x)), 16), n);
  }
  /// Stores two whole vectors, x first.
  static void store_bfloat16(std::byte* to, Vec x, Vec behind) {
    store_bfloat16(to, x, kLanes);
    store_bfloat16(to + kLanes * 2, behind, kLanes);
  }
  static void store_float16(std::byte* to, Vec x, std::int64_t n) {
    store_halves(to, vreinterpret_u16_f16(vcvt_f16_f32(x)), n);
  }

  static Words load_words(const std::byte* from, std::int64_t n) {
    Words words = zero_words();
    std::memcpy(&words, from, static_cast<std::size_t>(n) * sizeof(std::uint32_t));
    return words;
  }
  static void store_words(std::byte* to, Words words, std::int64_t n) {
    std::memcpy(to, &words, static_cast<std::size_t>(n) * sizeof(std::uint32_t));
  }
  static Words set_words(std::uint32_t bits) { return vdupq_n_u32(bits); }
  static Words zero_words() { return vdupq_n_u32(0); }
  static Words greatest_of(Words a, Words b) { return vmaxq_u32(a, b); }
  static Words without_sign(Vec x) { return vandq_u32(floats_to_bits(x), set_words(0x7fffffff)); }
  /// u - 8 of the four bits at kShift.
  template <int kShift>
  static Vec centred_nibble(Words words) {
    return words_to_floats(vsubq_u32(vandq_u32(shift_right<kShift>(words), set_words(15)), set_words(8)));
  }
  /// u - zero of the two or three bits at a shift.
  template <int kBits>
  class CentredBits {
   public:
    explicit CentredBits(int zero) : zero_(set_words(static_cast<std::uint32_t>(zero))) {}
    template <int kShift>
    [[nodiscard]] Vec at(Words words) const {
      constexpr std::uint32_t kMask = (1U << kBits) - 1;
      return words_to_floats(vsubq_u32(vandq_u32(shift_right<kShift>(words), set_words(kMask)), zero_));
    }

   private:
    Words zero_;
  };
  /// Collects the highest bit of each half of a lane from three words: bits 0, 1 and 2 of the result's
  /// halves. Its other bits are arbitrary.
  static Words highest_bits(Words first, Words second, Words third) {
    return vorrq_u32(vorrq_u32(vandq_u32(vshrq_n_u32(first, 15), set_words(0x10001)),
                               vandq_u32(vshrq_n_u32(second, 14), set_words(0x20002))),
                     vandq_u32(vshrq_n_u32(third, 13), set_words(0x40004)));
  }
  /// A table of sixteen numbers; look_up() selects one by the four bits at kShift.
  using Table = uint8x16x4_t;
  static Table load_table(const float* numbers) {
    return vld1q_u8_x4(reinterpret_cast<const std::uint8_t*>(numbers));
  }
  template <int kShift>
  static Vec look_up(Words words, Table table) {
    // The four bytes of number i are at 4i to 4i + 3.
    const Words index = vandq_u32(shift_right<kShift>(words), set_words(15));
    const Words bytes = vmlaq_u32(set_words(0x03020100), index, set_words(0x04040404));
    return vreinterpretq_f32_u8(vqtbl4q_u8(table, vreinterpretq_u8_u32(bytes)));
  }
  /// Loads two int8 per lane.
  static Pair load_int8_pairs(const std::byte* from, std::int64_t n) {
    const int32x4_t words = vreinterpretq_s32_u32(vmovl_u16(load_halves(from, n)));
    return {vcvtq_f32_s32(vshrq_n_s32(vshlq_n_s32(words, 24), 24)),
            vcvtq_f32_s32(vshrq_n_s32(vshlq_n_s32(words, 16), 24))};
  }
  /// Loads two FP8 numbers (e4m3) per lane and divides them by 256: a float16 with the same bits has that
  /// value.
  static Pair load_float8_pairs(const std::byte* from, std::int64_t n) {
    const int16x4_t bytes = vreinterpret_s16_u16(load_halves(from, n));
    // Converts the upper byte of each half; its sign stays in place.
    const auto half = [](int16x4_t upper) {
      const uint16x4_t bits = vand_u16(vreinterpret_u16_s16(vshr_n_s16(upper, 1)), vdup_n_u16(0xbf80));
      return vcvt_f32_f16(vreinterpret_f16_u16(bits));
    };
    return {half(vshl_n_s16(bytes, 8)), half(bytes)};
  }
  /// Loads one uint8 per lane.
  static Vec load_uint8(const std::byte* from, std::int64_t n) { return vcvtq_f32_u32(load_bytes(from, n)); }
  /// Stores the lowest byte of each lane.
  static void store_low_bytes(std::uint8_t* to, Words words, std::int64_t n) {
    for (std::int64_t lane = 0; lane < n; ++lane) to[lane] = static_cast<std::uint8_t>(words[lane]);
  }
  /// Puts the upper halves of `even` and `odd`, which are bfloat16, into the lower and upper halves of the
  /// lanes.
  static Words pack_bfloat16(Vec even, Vec odd) {
    return vsriq_n_u32(floats_to_bits(odd), floats_to_bits(even), 16);
  }
  /// Rounds two vectors to bfloat16: `even` in the lower and `odd` in the upper halves of the lanes.
  static Words round_to_pairs(Vec even, Vec odd) {
    return pack_bfloat16(round_to_bfloat16(even), round_to_bfloat16(odd));
  }
  /// Returns the bfloat16 in the lower and upper halves of the lanes.
  static Pair bfloat16_pairs(Words words) {
    return {bits_to_floats(vshlq_n_u32(words, 16)), bits_to_floats(vandq_u32(words, set_words(0xffff0000U)))};
  }
  /// Adds to each lane the four products of uint8 in `a` and int8 in `b`.
  static Words dot(Words sums, Words a, Words b) {
    const auto wholes = vreinterpretq_s32_u32(sums);
    const auto left = vreinterpretq_u8_u32(a);
    const auto right = vreinterpretq_s8_u32(b);
#if defined(__ARM_FEATURE_MATMUL_INT8)
    return vreinterpretq_u32_s32(vusdotq_s32(wholes, left, right));
#elif defined(__ARM_FEATURE_DOTPROD)
    // Both operands of the instruction are signed: u q = (u - 128) q + 128 q.
    const int8x16_t centred = vreinterpretq_s8_u8(veorq_u8(left, vdupq_n_u8(0x80)));
    const int32x4_t times_one = vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(1), right);
    return vreinterpretq_u32_s32(vaddq_s32(vdotq_s32(wholes, centred, right), vshlq_n_s32(times_one, 7)));
#else
    const int16x8_t low =
        vmulq_s16(vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(left))), vmovl_s8(vget_low_s8(right)));
    const int16x8_t high = vmulq_s16(vreinterpretq_s16_u16(vmovl_high_u8(left)), vmovl_high_s8(right));
    return vreinterpretq_u32_s32(vaddq_s32(wholes, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high))));
#endif
  }
  /// Loads two int8 per lane as int16.
  static Words load_int8_as_int16(const std::byte* from, std::int64_t n) {
    std::int8_t bytes[8] = {};
    std::memcpy(bytes, from, static_cast<std::size_t>(n) * 2);
    return vreinterpretq_u32_s16(vmovl_s8(vld1_s8(bytes)));
  }
  /// Sums of products of int16. Each lane has two, which are added when all products are in them: the lower
  /// half of the lanes in `low`, the upper one in `high`.
  struct Int16Sums {
    int32x4_t low;
    int32x4_t high;
  };
  static Int16Sums int16_sums(Words start) {
    const auto whole = vreinterpretq_s32_u32(start);
    return {vzip1q_s32(whole, vdupq_n_s32(0)), vzip2q_s32(whole, vdupq_n_s32(0))};
  }
  /// Adds to each lane the two products of int16 in `a` and `b`.
  static Int16Sums dot_int16(Int16Sums sums, Words a, Words b) {
    const auto left = vreinterpretq_s16_u32(a);
    const auto right = vreinterpretq_s16_u32(b);
    return {vmlal_s16(sums.low, vget_low_s16(left), vget_low_s16(right)),
            vmlal_high_s16(sums.high, left, right)};
  }
  static Words words_of(Int16Sums sums) { return vreinterpretq_u32_s32(vpaddq_s32(sums.low, sums.high)); }
  static Words subtract_words(Words a, Words b) { return vsubq_u32(a, b); }
  static Words add_words(Words a, Words b) { return vaddq_u32(a, b); }
  /// Reorders 32 bytes in place: byte i becomes byte order[i].
  static void reorder_bytes(std::uint8_t* bytes, const std::uint8_t* order) {
    const uint8x16x2_t before = vld1q_u8_x2(bytes);
    vst1q_u8(bytes, vqtbl2q_u8(before, vld1q_u8(order)));
    vst1q_u8(bytes + 16, vqtbl2q_u8(before, vld1q_u8(order + 16)));
  }
  static Words multiply_words(Words a, Words b) { return vmulq_u32(a, b); }
  static Words subtract_bytes(Words a, Words b) {
    return vreinterpretq_u32_u8(vsubq_u8(vreinterpretq_u8_u32(a), vreinterpretq_u8_u32(b)));
  }
  /// Loads one uint8 per lane.
  static Words load_bytes(const std::byte* from, std::int64_t n) {
    std::uint8_t bytes[8] = {};
    std::memcpy(bytes, from, static_cast<std::size_t>(n));
    return vmovl_u16(vget_low_u16(vmovl_u8(vld1_u8(bytes))));
  }
  /// Shifts to the left if kShift is negative.
  template <int kShift>
  static Words shift_right(Words words) {
    if constexpr (kShift < 0) {
      return vshlq_n_u32(words, -kShift);
    } else if constexpr (kShift > 0) {
      return vshrq_n_u32(words, kShift);
    } else {
      return words;
    }
  }
  static Words bits_of(Words words, std::uint32_t mask) { return vandq_u32(words, set_words(mask)); }
  /// Returns the bits of `a` under its mask, and the bits of `b` under its mask.
  static Words merge_bits(Words a, std::uint32_t mask_of_a, Words b, std::uint32_t mask_of_b) {
    return vorrq_u32(bits_of(a, mask_of_a), bits_of(b, mask_of_b));
  }
#ifdef __ARM_FEATURE_DOTPROD
  /// Adds up the products of at most eight pairs of Words, of integers u up to 15 with int8 q.
  class FewBitsDot {
   public:
    void add(Words* sums, Words u, Words q) {
      *sums = vreinterpretq_u32_s32(
          vdotq_s32(vreinterpretq_s32_u32(*sums), vreinterpretq_s8_u32(u), vreinterpretq_s8_u32(q)));
    }
    void finish(Words*) const {}
  };
#else
  /// Adds up the products of at most eight pairs of Words, of integers u up to 15 with int8 q. Sums of
  /// products at the same place have sixteen bits; finish() adds them to `sums`.
  class FewBitsDot {
   public:
    void add(Words*, Words u, Words q) {
      const int8x16_t left = vreinterpretq_s8_u32(u);
      const int8x16_t right = vreinterpretq_s8_u32(q);
      low_ = vmlal_s8(low_, vget_low_s8(left), vget_low_s8(right));
      high_ = vmlal_high_s8(high_, left, right);
    }
    void finish(Words* sums) const {
      const int32x4_t wholes = vpaddq_s32(vpaddlq_s16(low_), vpaddlq_s16(high_));
      *sums = vaddq_u32(*sums, vreinterpretq_u32_s32(wholes));
    }

   private:
    int16x8_t low_ = vdupq_n_s16(0);
    int16x8_t high_ = vdupq_n_s16(0);
  };
#endif
  static Vec words_to_floats(Words words) { return vcvtq_f32_s32(vreinterpretq_s32_u32(words)); }

 private:
  /// All bits of the first n lanes.
  static Words first(std::int64_t n) {
    const std::uint32_t lanes[kLanes] = {0, 1, 2, 3};
    return vcltq_u32(vld1q_u32(lanes), set_words(static_cast<std::uint32_t>(n)));
  }
  static Vec without(Words mask, Vec x) { return bits_to_floats(vbicq_u32(floats_to_bits(x), mask)); }
};

struct Float32Weights {
  using A = float;
  using B = Simd::Vec;
  using Broadcast = Simd::Vec;
  static constexpr int kInterleave = 1;
  static constexpr std::int64_t kColumnBytes = 4;
  static B load(const std::byte* from) { return load(from, Simd::kLanes); }
  static B load(const std::byte* from, std::int64_t n) {
    return Simd::load(reinterpret_cast<const float*>(from), n);
  }
  static Broadcast broadcast(const A* a) { return vld1q_dup_f32(a); }
  static Broadcast broadcast_last(const A* a) { return broadcast(a); }
  static Simd::Vec multiply_add(Broadcast a, B b, Simd::Vec sum) { return Simd::fma(a, b, sum); }
};

struct Float16Weights : Float32Weights {
  static constexpr std::int64_t kColumnBytes = 2;
  static B load(const std::byte* from) { return Simd::load_float16(from, Simd::kLanes); }
  static B load(const std::byte* from, std::int64_t n) { return Simd::load_float16(from, n); }
};

struct BFloat16Weights {
  using A = std::uint16_t;
  using B = Simd::Words;
  static constexpr int kInterleave = 2;
  static constexpr std::int64_t kColumnBytes = 4;
  static B load(const std::byte* from) { return load(from, Simd::kLanes); }
  static B load(const std::byte* from, std::int64_t n) { return Simd::load_words(from, n); }
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
  // BFDOT adds the two products before it adds them to the sum. It rounds in its own way, and takes subnormal
  // numbers as 0.
  using Broadcast = Simd::Words;
  static Broadcast broadcast(const A* a) {
    std::uint32_t pair = 0;
    std::memcpy(&pair, a, sizeof(pair));
    return Simd::set_words(pair);
  }
  static Broadcast broadcast_last(const A* a) { return Simd::set_words(*a); }
  static Simd::Vec multiply_add(Broadcast a, B b, Simd::Vec sum) {
    return vbfdotq_f32(sum, vreinterpretq_bf16_u32(a), vreinterpretq_bf16_u32(b));
  }
#else
  /// Multiplies two inputs at a time; the product of the even one is added first.
  struct Broadcast {
    Simd::Vec even;
    Simd::Vec odd;
  };
  static Broadcast broadcast(const A* a) {
    return {Simd::set(bfloat16_to_float(a[0])), Simd::set(bfloat16_to_float(a[1]))};
  }
  static Broadcast broadcast_last(const A* a) { return {Simd::set(bfloat16_to_float(a[0])), Simd::zero()}; }
  static Simd::Vec multiply_add(const Broadcast& a, B b, Simd::Vec sum) {
    const auto [even, odd] = Simd::bfloat16_pairs(b);
    return Simd::fma(a.odd, odd, Simd::fma(a.even, even, sum));
  }
#endif
};

/// Expands the pieces of a compressed panel to pairs of bfloat16.
class PieceExpander {
 public:
  explicit PieceExpander(const CompressedPanel& panel)
      : table_(vld1q_u8(reinterpret_cast<const std::uint8_t*>(panel.table))) {}

  /// Writes four rows of pairs of sixteen outputs to `out`, row_bytes apart.
  void expand(const std::byte* piece, std::byte* out, std::int64_t row_bytes) const {
    for (std::int64_t part = 0; part < 64; part += 16, piece += 16, out += 16) {
      const uint8x16_t codes = load(piece + 128);
      expand_half(load(piece), vandq_u8(codes, vdupq_n_u8(15)), out, row_bytes);
      expand_half(load(piece + 64), vshrq_n_u8(codes, 4), out + 2 * row_bytes, row_bytes);
    }
  }

 private:
  static uint8x16_t load(const std::byte* from) {
    return vld1q_u8(reinterpret_cast<const std::uint8_t*>(from));
  }

  void expand_half(uint8x16_t lower, uint8x16_t codes, std::byte* out, std::int64_t row_bytes) const {
    const uint8x16_t upper = vqtbl1q_u8(table_, codes);
    vst1q_u8(reinterpret_cast<std::uint8_t*>(out), vzip1q_u8(lower, upper));
    vst1q_u8(reinterpret_cast<std::uint8_t*>(out + row_bytes), vzip2q_u8(lower, upper));
  }

  uint8x16_t table_;
};

/// Size of the largest tile whose sums stay in the 32 registers.
inline constexpr int kTileRows = 6;
inline constexpr int kTileVectors = 4;
/// Sums of products of int16 take two registers.
inline constexpr int kInt16TileVectors = 2;
/// Maximum number of rows of a tile whose weights are decoded in registers: decoding needs registers too.
inline constexpr int kDecodedTileRows = 4;
inline constexpr std::int64_t kInt8DecodedRows = 6;
inline constexpr std::int64_t kInt4DecodedRows = 6;

}  // namespace
}  // namespace adaptrt
