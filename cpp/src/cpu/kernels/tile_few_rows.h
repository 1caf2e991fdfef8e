#pragma once

// Products of few rows of bfloat16 with vectors instead of tile registers, but with the bits of
// Tiles::dot_bfloat16. This is faster for few rows: vectors are loaded from memory faster than tiles, most
// rows of a tile would be empty, and weights of few bits are multiplied right after they are decoded. For
// tiles they would be stored and loaded again. Included after tile_product.h and quantized_weights.h.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#ifdef __SSE__
#include <xmmintrin.h>
#endif

#include "gemm.h"
#include "narrow_weights.h"
#include "quantized_weights.h"
#include "tile_product.h"

namespace adaptrt {
namespace {

/// Maximum number of rows whose sums of even and odd inputs, for all columns of a panel, stay in registers.
inline constexpr std::int64_t kFewRows = 3;
/// Number of inputs that are converted to float32 at once; a multiple of a step.
inline constexpr std::int64_t kFewInputs = 512;

/// Treats subnormal numbers as zero while it exists, as tiles do.
class FlushSubnormals {
 public:
  FlushSubnormals() : before_(read()) { write(before_ | kFlush); }
  ~FlushSubnormals() { write(before_); }
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
#if defined(__SSE__)
  using Register = unsigned;
  /// Flush to zero, and denormals are zero.
  static constexpr Register kFlush = 0x8040;
  static Register read() { return _mm_getcsr(); }
  static void write(Register value) { _mm_setcsr(value); }
#elif defined(__aarch64__)
  using Register = std::uint64_t;
  static constexpr Register kFlush = 1U << 24;
  static Register read() {
    Register value = 0;
    asm volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void write(Register value) { asm volatile("msr fpcr, %0" : : "r"(value) : "memory"); }
#else
  using Register = unsigned;
  static constexpr Register kFlush = 0;
  static Register read() { return 0; }
  static void write(Register /*value*/) {}
#endif

  Register before_;
};

/// Rows of bfloat16, `stride` bytes apart, starting with the first input.
struct FewRows {
  const std::byte* data;
  std::int64_t stride;
  std::int64_t count;
  /// For packed rows: number of bytes from one step to the next. 0: the inputs of a row are consecutive.
  std::int64_t step_bytes = 0;

  /// Address of an input of a row; in packed rows, the first input of a step.
  [[nodiscard]] const std::byte* row(std::int64_t row, std::int64_t input) const {
    return data + row * stride + (step_bytes == 0 ? input * 2 : input / kStepInputs * step_bytes);
  }
  [[nodiscard]] FewRows from(std::int64_t input) const { return {row(0, input), stride, count, step_bytes}; }
};

/// The words of a stretch of a panel, in lines of `line` bytes, and the inputs in it.
struct FewWords {
  const std::byte* data;
  std::int64_t line;
  std::int64_t inputs;
};

/// Words of weights that are bfloat16 already, like Int8Pairs and Int4Pairs.
struct BFloat16Pairs {
  using Word = Simd::Words;
  static constexpr int kUnits = 1;
  static constexpr std::int64_t kColumnBytes = 4;
  static Word load(const std::byte* from, std::int64_t n) { return Simd::load_words(from, n); }
  template <int kUnit>
  static Simd::Pair decode(Word word) {
    return Simd::bfloat16_pairs(word);
  }
};

/// At most kFewInputs inputs of few rows as float32; a zero follows an odd last input.
class FewInputs {
 public:
  FewInputs(FewRows rows, std::int64_t inputs) {
    for (std::int64_t row = 0; row < rows.count; ++row) {
      float* to = values_[row];
      for (std::int64_t step = 0; step < inputs; step += kStepInputs) {
        const std::byte* from = rows.row(row, step);
        const std::int64_t count = std::min(kStepInputs, inputs - step);
        for (std::int64_t i = 0; i < count; i += Simd::kLanes) {
          const std::int64_t lanes = std::min<std::int64_t>(Simd::kLanes, count - i);
          Simd::store(to + step + i, Simd::load_bfloat16(from + i * 2, lanes), lanes);
        }
      }
      if (inputs % 2 != 0) to[inputs] = 0.0F;
    }
  }
  [[nodiscard]] const float* row(std::int64_t row) const { return values_[row]; }

 private:
  alignas(kCacheLine) float values_[kFewRows][kFewInputs];
};

/// Computes the sums of kRows rows and kVectors vectors of columns, the last of which has last_lanes columns.
template <class Packed, int kRows, int kVectors, bool kPartial, class StepHook>
void multiply_few_columns(const Packed& words_decoder, const FewInputs& a, FewWords b,
                          std::int64_t last_lanes, TileSums sums, StepHook* hook) {
  const Packed decoder = words_decoder;
  constexpr int kWordInputs = 2 * Packed::kUnits;
  constexpr std::int64_t kVectorBytes = Simd::kLanes * Packed::kColumnBytes;
  // If the vectors are narrower than a cache line, nothing is prefetched.
  constexpr int kLines = kWordLines<Packed> * static_cast<int>(kVectors * kVectorBytes / kCacheLine);
  const auto lanes_of = [&](int v) { return kPartial && v == kVectors - 1 ? last_lanes : Simd::kLanes; };
  for (std::int64_t begin = 0; begin < b.inputs; begin += kStepInputs) {
    Simd::Vec even[kRows][kVectors];
    Simd::Vec odd[kRows][kVectors];
    ADAPTRT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      ADAPTRT_UNROLL
      for (int v = 0; v < kVectors; ++v) even[r][v] = odd[r][v] = Simd::zero();
    }
    /// Calls take(number in the word, weights) for the pairs of inputs of the next word.
    const auto take_word = [&](auto take) __attribute__((always_inline)) {
      typename Packed::Word words[kVectors];
      ADAPTRT_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        words[v] = load_word<Packed>(b.data + v * kVectorBytes, b.line, lanes_of(v));
      }
      if constexpr (kLines > 0) hook->template at_lines<kLines>();
      for_each_index<Packed::kUnits>([&](auto unit) __attribute__((always_inline)) {
        Simd::Pair columns[kVectors];
        ADAPTRT_UNROLL
        for (int v = 0; v < kVectors; ++v) columns[v] = decoder.template decode<unit()>(words[v]);
        take(unit(), columns);
      });
      b.data += kWordLines<Packed> * b.line;
    };
    const auto multiply = [&](std::int64_t first, const Simd::Pair(&columns)[kVectors])
                              __attribute__((always_inline)) {
                                ADAPTRT_UNROLL
                                for (int r = 0; r < kRows; ++r) {
                                  const float* values = a.row(r) + first;
                                  const Simd::Vec first_value = Simd::set(values[0]);
                                  const Simd::Vec second_value = Simd::set(values[1]);
                                  ADAPTRT_UNROLL
                                  for (int v = 0; v < kVectors; ++v) {
                                    even[r][v] = Simd::fma(first_value, columns[v].even, even[r][v]);
                                    odd[r][v] = Simd::fma(second_value, columns[v].odd, odd[r][v]);
                                  }
                                }
                              };
    const std::int64_t end = std::min(begin + kStepInputs, b.inputs);
    // A word of one unit is complete even if it holds only the last input.
    const std::int64_t whole = Packed::kUnits == 1 ? end + 1 : end;
    std::int64_t first = begin;
    for (; first + kWordInputs <= whole; first += kWordInputs) {
      take_word([&](int unit, const Simd::Pair(&columns)[kVectors])
                    __attribute__((always_inline)) { multiply(first + 2 * unit, columns); });
    }
    if constexpr (Packed::kUnits > 1 && !kHasWholeWords<Packed>) {
      if (first < end) {
        // This is not part of the loop above: GCC 12 would then store all sums for each word.
        take_word([&](int unit, const Simd::Pair(&columns)[kVectors]) __attribute__((always_inline)) {
          if (first + 2 * unit < end) multiply(first + 2 * unit, columns);
        });
      }
    }
    hook->at_step();
    ADAPTRT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float* out = sums.data + r * sums.stride;
      ADAPTRT_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        float* at = out + v * Simd::kLanes;
        const Simd::Vec before = sums.continues || begin > 0 ? Simd::load(at, lanes_of(v)) : Simd::zero();
        Simd::store(at, Simd::add(before, Simd::add(even[r][v], odd[r][v])), lanes_of(v));
      }
    }
  }
}

/// sums [kRows, columns] = a * b, or += if the sums continue, for at most kPanelColumns columns.
template <class Packed, int kRows, class StepHook>
void multiply_few_panel(const Packed& decoder, const FewInputs& a, FewWords b, std::int64_t columns,
                        TileSums sums, StepHook* hook) {
  constexpr std::int64_t kGroup = kTileVectors * Simd::kLanes;
  std::int64_t column = 0;
  const auto from = [&] { return FewWords{b.data + column * Packed::kColumnBytes, b.line, b.inputs}; };
  const auto to = [&] { return TileSums{sums.data + column, sums.stride, sums.continues}; };
  for (; column + kGroup <= columns; column += kGroup) {
    multiply_few_columns<Packed, kRows, kTileVectors, false>(decoder, a, from(), Simd::kLanes, to(), hook);
  }
  // Adapters have such narrow panels: the columns are ranks. Neighbouring columns are read together.
  constexpr std::int64_t kPair = 2 * Simd::kLanes;
  for (; kPair < kGroup && column + kPair <= columns; column += kPair) {
    multiply_few_columns<Packed, kRows, 2, false>(decoder, a, from(), Simd::kLanes, to(), hook);
  }
  for (; column < columns; column += Simd::kLanes) {
    const std::int64_t lanes = std::min<std::int64_t>(Simd::kLanes, columns - column);
    multiply_few_columns<Packed, kRows, 1, true>(decoder, a, from(), lanes, to(), hook);
  }
}

/// Calls multiply(number of rows as an integral_constant, FewInputs, first input, number of inputs, sums) for
/// at most kFewInputs inputs at a time. After the first call, the sums continue.
template <class Multiply>
void for_few_inputs(FewRows rows, std::int64_t inputs, TileSums sums, const Multiply& multiply) {
  const FlushSubnormals flush;
  for (std::int64_t begin = 0; begin < inputs; begin += kFewInputs) {
    const std::int64_t count = std::min(kFewInputs, inputs - begin);
    const FewInputs a(rows.from(begin), count);
    switch (rows.count) {
      case 1:
        multiply(std::integral_constant<int, 1>(), a, begin, count, sums);
        break;
      case 2:
        multiply(std::integral_constant<int, 2>(), a, begin, count, sums);
        break;
      default:
        multiply(std::integral_constant<int, kFewRows>(), a, begin, count, sums);
    }
    sums.continues = true;
  }
}

/// sums [rows, columns] = at most kFewRows rows * b, or += if the sums continue.
template <class Packed, class StepHook>
void multiply_few(const Packed& decoder, FewRows rows, FewWords b, std::int64_t columns, TileSums sums,
                  StepHook* hook) {
  for_few_inputs(rows, b.inputs, sums,
                 [&](auto num_rows, const FewInputs& a, std::int64_t begin, std::int64_t count, TileSums to) {
                   const std::int64_t lines = begin / (2 * Packed::kUnits) * kWordLines<Packed>;
                   multiply_few_panel<Packed, num_rows()>(
                       decoder, a, {b.data + lines * b.line, b.line, count}, columns, to, hook);
                 });
}

}  // namespace
}  // namespace adaptrt
