#pragma once

// Products of int8 activations and integers of few bits on tile registers, with the bits of w4a8_gemm.h: sums
// of integers are exact. Included after tile_decode_ahead.h, tile_int8.h and w4a8_gemm.h.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "adaptrt/cpu/kernel_table.h"
#include "tile_decode_ahead.h"
#include "tile_groups.h"
#include "tile_int8.h"
#include "tile_product.h"
#include "w4a8_gemm.h"

namespace adaptrt {
namespace {

/// Number of inputs in a step of tiles: kInt8StepInputs, or the size of groups if that is smaller.
inline std::int64_t w4a8_step_inputs(const W4A8Gemm& gemm) {
  return std::min(kInt8StepInputs, W4A8Group::size_of_groups(gemm));
}

/// True if steps end where groups end, except for the last group.
inline bool has_whole_byte_steps(const W4A8Gemm& gemm) {
  return group_count(gemm.quantization, gemm.call.k) == 1 ||
         W4A8Group::size_of_groups(gemm) % w4a8_step_inputs(gemm) == 0;
}

/// Decodes the integers of a panel of kPanelColumns columns to int8, minus their zero points.
template <int kBits>
class ByteSteps {
 public:
  ByteSteps(const W4A8Gemm& gemm, const QuantizedPanel& panel) : gemm_(gemm), panel_(panel) {}

  [[nodiscard]] const std::byte* source(std::int64_t input) const {
    return panel_.weights + input / Word::kInputs * Word::kLines * kLineBytes;
  }
  [[nodiscard]] std::int64_t step_inputs() const { return w4a8_step_inputs(gemm_); }
  [[nodiscard]] bool leaves_lines() const { return step_inputs() < kInt8StepInputs; }

  /// Writes inputs [begin, end) of a group, at most a step, to `out`.
  void decode(std::int64_t begin, std::int64_t end, std::byte* out, StepPrefetch* prefetch) const {
    decode_columns({0, kPanelColumns}, begin, end, out, kStepLine, FetchWith{prefetch});
  }

  /// The same for some columns, with lines of `out_line` bytes.
  template <class Fetch>
  void decode_columns(InputRange columns, std::int64_t begin, std::int64_t end, std::byte* out,
                      std::int64_t out_line, const Fetch& fetch) const {
    constexpr std::int64_t kVectorBytes = Simd::kLanes * Word::kColumnBytes;
    constexpr int kLines = static_cast<int>((kVectorBytes + kCacheLine - 1) / kCacheLine);
    const W4A8Group group(gemm_, panel_, begin / W4A8Group::size_of_groups(gemm_));
    for (std::int64_t column = columns.begin; column < columns.end;
         column += Simd::kLanes, out += kVectorBytes) {
      const Simd::Words zeros = zeros_of(group, column);
      const std::byte* from = source(begin) + column * Word::kColumnBytes;
      std::byte* to = out;
      for (std::int64_t input = begin; input < end; input += Word::kInputs) {
        const Word word(from, kLineBytes, Simd::kLanes);
        [&]<int... kQuad>(std::integer_sequence<int, kQuad...>) __attribute__((always_inline)) {
          (Simd::store_words(to + kQuad * out_line, Simd::subtract_bytes(word.template quad<kQuad>(), zeros),
                             Simd::kLanes),
           ...);
        }(std::make_integer_sequence<int, Word::kQuads>{});
        ADAPTRT_UNROLL
        for (int line = 0; line < Word::kLines; ++line) {
          fetch.template at_lines<kLines>(from);
          from += kLineBytes;
        }
        to += Word::kQuads * out_line;
      }
    }
  }

 private:
  using Word = ByteWords<kBits>;
  static constexpr std::int64_t kLineBytes = kPanelColumns * Word::kColumnBytes;
  static_assert(kInt8StepInputs % Word::kInputs == 0);

  /// Zero point of each column, in each byte of its word.
  [[nodiscard]] Simd::Words zeros_of(const W4A8Group& group, std::int64_t column) const {
    constexpr std::uint32_t kEachByte = 0x01010101U;
    if (group.zeros == nullptr) return Simd::set_words((1U << (kBits - 1)) * kEachByte);
    return Simd::multiply_words(Simd::load_bytes(group.zeros + column, Simd::kLanes),
                                Simd::set_words(kEachByte));
  }

  const W4A8Gemm& gemm_;
  const QuantizedPanel panel_;
};

struct FetchNothing {
  template <int kLines>
  void at_lines(const std::byte*) const {}
};

/// Groups whose sums are added to the output together.
struct GroupRange {
  std::int64_t begin;
  std::int64_t end;
};

/// Adds kGroups groups from `first` on to rows of the output, for one vector of columns. The sums of the
/// first group are at `sums`, and consecutive groups are group_stride apart; rows are sums_stride apart.
template <int kGroups>
void finish_w4a8_groups(const W4A8Gemm& gemm, const QuantizedPanel& panel, std::int64_t first, GroupRows rows,
                        std::int64_t column, const float* sums, std::int64_t sums_stride,
                        std::int64_t group_stride) {
  Simd::Vec scales[kGroups];
  ADAPTRT_UNROLL
  for (int i = 0; i < kGroups; ++i) {
    scales[i] =
        load_as(W4A8Group(gemm, panel, first + i).scales, gemm.quantization.scale_type, column, Simd::kLanes);
  }
  const bool is_last = first + kGroups == group_count(gemm.quantization, gemm.call.k);
  for (std::int64_t r = 0; r < rows.count; ++r) {
    float* out = gemm.call.out + (rows.first + r) * gemm.call.out_stride + column;
    Simd::Vec value = first == 0 ? Simd::zero() : Simd::load(out);
    ADAPTRT_UNROLL
    for (int i = 0; i < kGroups; ++i) {
      const auto* sum = reinterpret_cast<const std::byte*>(sums + i * group_stride + r * sums_stride);
      value = Simd::fma(Simd::words_to_floats(Simd::load_words(sum, Simd::kLanes)), scales[i], value);
    }
    if (is_last) value = Simd::mul(value, Simd::set(gemm.a_scales[rows.first + r]));
    Simd::store(out, value);
  }
}

/// The same for any number of groups, and for `columns`, which are whole vectors; `sums` begin at the first
/// column.
inline void finish_w4a8(const W4A8Gemm& gemm, const QuantizedPanel& panel, GroupRange groups, GroupRows rows,
                        InputRange columns, const float* sums, std::int64_t sums_stride,
                        std::int64_t group_stride) {
  for (std::int64_t column = columns.begin; column < columns.end;
       column += Simd::kLanes, sums += Simd::kLanes) {
    std::int64_t group = groups.begin;
    for (; group + kGroupsTogether <= groups.end; group += kGroupsTogether) {
      finish_w4a8_groups<kGroupsTogether>(gemm, panel, group, rows, column,
                                          sums + (group - groups.begin) * group_stride, sums_stride,
                                          group_stride);
    }
    for (; group < groups.end; ++group) {
      finish_w4a8_groups<1>(gemm, panel, group, rows, column, sums + (group - groups.begin) * group_stride,
                            sums_stride, group_stride);
    }
  }
}

/// Steps of the rows from `row` and input `begin` on, as arrange_int8_row arranges them. Whole tiles and
/// whole steps must be readable.
inline TileRows byte_rows(const W4A8Gemm& gemm, std::int64_t row, std::int64_t begin) {
  return {static_cast<const std::byte*>(gemm.call.a) + row * gemm.call.a_stride + begin, gemm.call.a_stride,
          w4a8_step_inputs(gemm)};
}

inline std::int64_t byte_steps(const W4A8Gemm& gemm, std::int64_t inputs) {
  const std::int64_t step = w4a8_step_inputs(gemm);
  return (inputs + step - 1) / step;
}

/// Multiplies one tile of rows, and decodes the panel one step ahead.
template <int kBits>
void w4a8_one_tile(const W4A8Gemm& gemm, const QuantizedPanel& panel, InputRange inputs) {
  ByteSteps<kBits> steps(gemm, panel);
  StepPrefetch prefetch = prefetch_words(steps, inputs, gemm.call.next_panel);
  DecodeNextStep decoder(&steps, inputs, &prefetch);
  const auto multiply = [&](InputRange some, TileSums sums, std::int64_t rows) {
    multiply_decoded<SignedInt8Dot>(byte_rows(gemm, 0, some.begin), byte_steps(gemm, some.end - some.begin),
                                    sums, rows, &decoder);
  };
  const GroupRows rows{0, gemm.call.rows};
  if (group_count(gemm.quantization, gemm.call.k) == 1) {
    multiply(inputs, {gemm.call.out, gemm.call.out_stride, inputs.begin > 0}, gemm.call.rows);
    if (inputs.end == gemm.call.k) {
      finish_w4a8(gemm, panel, {0, 1}, rows, {0, kPanelColumns}, gemm.call.out, gemm.call.out_stride, 0);
    }
    return;
  }
  alignas(kCacheLine) float sums[kTileHeight * kPanelColumns];
  for (std::int64_t first = inputs.begin; first < inputs.end;) {
    const W4A8Group group(gemm, panel, first / W4A8Group::size_of_groups(gemm));
    multiply({group.first, group.end}, {sums, kPanelColumns, false}, kTileHeight);
    finish_w4a8(gemm, panel, {group.index, group.index + 1}, rows, {0, kPanelColumns}, sums, kPanelColumns,
                0);
    first = group.end;
  }
}

/// Product of many rows with a panel. A stretch of steps is decoded once for all rows, one pair of tiles of
/// columns at a time, so that the pair stays in the first-level cache while all rows are multiplied by it.
template <int kBits>
class W4A8Product {
 public:
  W4A8Product(const W4A8Gemm& gemm, const QuantizedPanel& panel)
      : gemm_(gemm), panel_(panel), steps_(gemm, panel), step_inputs_(w4a8_step_inputs(gemm)) {
    if (step_inputs_ < kInt8StepInputs) std::memset(decoded_, 0, sizeof(decoded_));
  }

  void run(InputRange inputs) {
    const bool is_one_group = group_count(gemm_.quantization, gemm_.call.k) == 1;
    const std::int64_t size = W4A8Group::size_of_groups(gemm_);
    const std::int64_t most =
        is_one_group ? kPairStretch * step_inputs_ : kPairStretch * step_inputs_ / size * size;
    for (std::int64_t begin = inputs.begin; begin < inputs.end; begin += most) {
      const InputRange stretch{begin, std::min(begin + most, inputs.end)};
      prefetch_ = prefetch_after(stretch);
      for (std::int64_t column = 0; column < kPanelColumns; column += kPairColumns) {
        decode(stretch, column);
        for (std::int64_t row = 0; row < gemm_.call.rows; row += kPackedRows) {
          const GroupRows rows{row, std::min(kPackedRows, gemm_.call.rows - row)};
          if (is_one_group) {
            multiply_part(stretch, rows, column);
          } else {
            multiply_groups(stretch, rows, column);
          }
        }
      }
    }
    if (is_one_group && inputs.end == gemm_.call.k) {
      finish_w4a8(gemm_, panel_, {0, 1}, {0, gemm_.call.rows}, {0, kPanelColumns}, gemm_.call.out,
                  gemm_.call.out_stride, 0);
    }
  }

  /// True if stretches can consist of whole groups.
  static bool takes(const W4A8Gemm& gemm) {
    return group_count(gemm.quantization, gemm.call.k) == 1 ||
           W4A8Group::size_of_groups(gemm) <= kPairStretch * kInt8StepInputs;
  }

 private:
  void decode(InputRange stretch, std::int64_t column) {
    std::byte* to = decoded_;
    for (std::int64_t begin = stretch.begin; begin < stretch.end;
         begin += step_inputs_, to += kPairStepBytes) {
      const std::int64_t end = std::min(begin + step_inputs_, stretch.end);
      if (end - begin < step_inputs_) std::memset(to, 0, kPairStepBytes);
      steps_.decode_columns({column, column + kPairColumns}, begin, end, to, kPairLine, FetchNothing{});
    }
  }

  /// Returns a prefetch of the words after a stretch, as many as the stretch has. It is spread over the
  /// products of all rows with the stretch.
  [[nodiscard]] StepPrefetch prefetch_after(InputRange stretch) const {
    const std::byte* next = stretch.end < gemm_.call.k ? steps_.source(stretch.end) : gemm_.call.next_panel;
    const std::int64_t blocks = (gemm_.call.rows + kPackedRows - 1) / kPackedRows;
    return StepPrefetch::spread(
        next, steps_.source(stretch.end) - steps_.source(stretch.begin),
        kPanelColumns / kPairColumns * blocks * byte_steps(gemm_, stretch.end - stretch.begin));
  }

  void multiply_part(InputRange stretch, GroupRows rows, std::int64_t column) {
    multiply_rest<SignedInt8Dot>(byte_rows(gemm_, rows.first, stretch.begin),
                                 {decoded_, kPairLine, kPairStepBytes},
                                 byte_steps(gemm_, stretch.end - stretch.begin),
                                 {gemm_.call.out + rows.first * gemm_.call.out_stride + column,
                                  gemm_.call.out_stride, stretch.begin > 0},
                                 rows.count, &prefetch_);
  }

  void multiply_groups(InputRange stretch, GroupRows rows, std::int64_t column) {
    constexpr std::int64_t kGroupSums = kPackedRows * kPairColumns;
    const std::int64_t size = W4A8Group::size_of_groups(gemm_);
    const std::int64_t end = (stretch.end + size - 1) / size;
    // Whole tiles are multiplied; finish_w4a8 ignores the sums of missing rows.
    const std::int64_t whole = (rows.count + kTileHeight - 1) / kTileHeight * kTileHeight;
    for (std::int64_t first = stretch.begin / size; first < end; first += kGroupsTogether) {
      const GroupRange groups{first, std::min(first + kGroupsTogether, end)};
      for (std::int64_t index = groups.begin; index < groups.end; ++index) {
        const W4A8Group group(gemm_, panel_, index);
        const std::int64_t first_step = (group.first - stretch.begin) / step_inputs_;
        multiply_rest<SignedInt8Dot>(byte_rows(gemm_, rows.first, group.first),
                                     {decoded_ + first_step * kPairStepBytes, kPairLine, kPairStepBytes},
                                     byte_steps(gemm_, group.end - group.first),
                                     {sums_ + (index - groups.begin) * kGroupSums, kPairColumns, false},
                                     whole, &prefetch_);
      }
      finish_w4a8(gemm_, panel_, groups, rows, {column, column + kPairColumns}, sums_, kPairColumns,
                  kGroupSums);
    }
  }

  const W4A8Gemm& gemm_;
  const QuantizedPanel panel_;
  ByteSteps<kBits> steps_;
  std::int64_t step_inputs_;
  StepPrefetch prefetch_;  ///< for the current stretch
  alignas(kCacheLine) std::byte decoded_[kPairStretch * kPairStepBytes];
  alignas(kCacheLine) float sums_[kGroupsTogether * kPackedRows * kPairColumns];
};

/// Multiplies a few rows at a time in registers: a single row as fast as memory delivers the words, and any
/// panel.
template <int kBits>
void w4a8_few_rows(const W4A8Gemm& gemm, const QuantizedPanel& panel, InputRange inputs) {
  using Word = ByteWords<kBits>;
  constexpr int kMostRows = static_cast<int>(kFewRows);
  constexpr std::int64_t kGroup = kTileVectors * Simd::kLanes;
  constexpr int kLines = static_cast<int>((kGroup * Word::kColumnBytes + kCacheLine - 1) / kCacheLine);
  const std::int64_t words = (gemm.call.k + Word::kInputs - 1) / Word::kInputs;
  const std::int64_t bytes = words * Word::kLines * gemm.call.width * Word::kColumnBytes;
  std::int64_t column = 0;
  for (; column + kGroup <= gemm.call.width; column += kGroup) {
    auto prefetch = StepPrefetch::stream_in_quarters(panel.weights + column * Word::kColumnBytes, bytes,
                                                     kFromCacheAhead, gemm.call.next_panel);
    for (std::int64_t row = 0; row < gemm.call.rows; row += kMostRows) {
      const std::int64_t rows = std::min<std::int64_t>(kMostRows, gemm.call.rows - row);
      w4a8_rows<kBits, kTileVectors, false, kLines, kMostRows>(gemm, panel, inputs, row, rows, column,
                                                               Simd::kLanes, prefetch);
      prefetch = StepPrefetch();
    }
  }
  for (; column < gemm.call.width; column += Simd::kLanes) {
    const std::int64_t lanes = std::min<std::int64_t>(Simd::kLanes, gemm.call.width - column);
    for (std::int64_t row = 0; row < gemm.call.rows; ++row) {
      w4a8_tile<kBits, 1, 1, true, 0>(gemm, panel, inputs, row, column, lanes, Prefetch{});
    }
  }
}

void tile_w4a8_gemm(const W4A8Gemm& gemm) {
  const QuantizedPanel panel =
      parts_of_panel(gemm.quantization, gemm.call.panel, gemm.call.k, gemm.call.width);
  const InputRange inputs = inputs_of(gemm);
  const bool fits = gemm.call.width == kPanelColumns && has_whole_byte_steps(gemm);
  with_number_of_bits(gemm.quantization, [&]<int kBits>(std::integral_constant<int, kBits>) {
    if (gemm.call.rows > kTileHeight && fits && W4A8Product<kBits>::takes(gemm)) {
      Tiles::configure();
      W4A8Product<kBits>(gemm, panel).run(inputs);
    } else if (gemm.call.rows > 1 && gemm.call.rows <= kTileHeight && fits) {
      Tiles::configure();
      w4a8_one_tile<kBits>(gemm, panel, inputs);
    } else {
      w4a8_few_rows<kBits>(gemm, panel, inputs);
    }
  });
}

}  // namespace
}  // namespace adaptrt
