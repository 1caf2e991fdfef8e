#pragma once

// Products with panels of few bits on tile registers: computes the sums of groups of inputs, and adds them to
// the output. Included after tile_gemm.h and quantized_gemm.h.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "adaptrt/cpu/kernel_table.h"
#include "quantized_gemm.h"
#include "tile_gemm.h"
#include "tile_product.h"

namespace adaptrt {
namespace {

/// Number of steps of a pair of tiles of columns that are decoded at once for many rows. They fit in the
/// first-level cache together with two tiles of rows and the sums of kGroupsTogether groups.
inline constexpr std::int64_t kPairStretch = 8;
inline constexpr int kGroupsTogether = 4;

/// True if a step has two groups of `size` inputs. Each is a step of its own then, in which the inputs of the
/// other one are zeros, so that the rows' packed steps are used as they are.
inline bool is_half_step(std::int64_t size) {
  return 2 * size == kStepInputs;
}

/// Line of a step from which on the weights from `input` on are decoded, for groups of `size` inputs.
inline std::int64_t first_line_of(std::int64_t size, std::int64_t input) {
  return is_half_step(size) ? input % kStepInputs / 2 : 0;
}

/// Consecutive rows whose sums are computed together.
struct GroupRows {
  std::int64_t first;
  std::int64_t count;
};

/// The part of a group's products that does not depend on its integers: none, or the sum of the activations
/// times the zero point or the minimum.
enum class GroupOffset { kNone, kZeroPoint, kMinimum };

/// Calls body(std::integral_constant<GroupOffset, ...>) for the offset that weights have.
template <class Body>
void with_offset(const Quantization& how, const Body& body) {
  if (how.zero_points) {
    body(std::integral_constant<GroupOffset, GroupOffset::kZeroPoint>());
  } else if (how.minimums) {
    body(std::integral_constant<GroupOffset, GroupOffset::kMinimum>());
  } else {
    body(std::integral_constant<GroupOffset, GroupOffset::kNone>());
  }
}

/// The scales of a group, and its zero points or minimums, for one vector of columns.
template <GroupOffset kOffset>
struct GroupTerms {
  Simd::Vec scale;
  Simd::Vec negated_offset;

  static GroupTerms load(const Quantization& how, const GroupView& group, std::int64_t column,
                         std::int64_t lanes) {
    GroupTerms terms{load_scales(how, group.scales, column, lanes), Simd::zero()};
    if constexpr (kOffset == GroupOffset::kZeroPoint) {
      terms.negated_offset = negated(load_zeros(how, group.zeros, column, lanes));
    } else if constexpr (kOffset == GroupOffset::kMinimum) {
      terms.negated_offset = negated(load_scales(how, group.minimums, column, lanes));
    }
    return terms;
  }

  /// Returns `before` plus the group's products, with the bits of quantized_tile. `sum` is the sum of the
  /// decoded integers' products, and a_sum that of the activations. `middle` is middle_of_minimums().
  [[nodiscard]] Simd::Vec add_group(Simd::Vec sum, Simd::Vec a_sum, Simd::Vec middle,
                                    Simd::Vec before) const {
    if constexpr (kOffset == GroupOffset::kZeroPoint) sum = Simd::fma(a_sum, negated_offset, sum);
    if constexpr (kOffset == GroupOffset::kMinimum) sum = Simd::fma(a_sum, middle, sum);
    const Simd::Vec total = Simd::fma(sum, scale, before);
    return kOffset == GroupOffset::kMinimum ? Simd::fma(a_sum, negated_offset, total) : total;
  }

 private:
  static Simd::Vec negated(Simd::Vec x) { return Simd::sub(Simd::set(-0.0F), x); }
};

/// Sums of consecutive groups that finish_groups adds to the output.
struct SumsOfGroups {
  const float* data;
  std::int64_t stride;        ///< between rows
  std::int64_t group_stride;  ///< between groups
};

/// Adds kGroups groups from number `first` on to the output, for some rows and for kVectors vectors of
/// columns from `column` on; the last vector has last_lanes columns. Multiplies their sums by the scales, and
/// subtracts the shares of the zero points or the minimums.
template <GroupOffset kOffset, int kGroups, int kVectors>
void finish_groups(const QuantizedGemm& gemm, const QuantizedPanel& panel, std::int64_t first, GroupRows rows,
                   SumsOfGroups sums, std::int64_t column, std::int64_t last_lanes) {
  using Terms = GroupTerms<kOffset>;
  const std::int64_t groups = group_count(gemm.quantization, gemm.call.k);
  const std::int64_t out_stride = gemm.call.out_stride;
  const auto lanes_of = [&](int v) { return v == kVectors - 1 ? last_lanes : Simd::kLanes; };
  Terms terms[kGroups][kVectors];
  ADAPTRT_UNROLL
  for (int i = 0; i < kGroups; ++i) {
    const GroupView group = group_of(gemm, panel, first + i);
    ADAPTRT_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      terms[i][v] = Terms::load(gemm.quantization, group, column + v * Simd::kLanes, lanes_of(v));
    }
  }
  const Simd::Vec middle = Simd::set(
      kOffset == GroupOffset::kMinimum ? static_cast<float>(middle_of_minimums(gemm.quantization)) : 0.0F);
  // The first group's sums are added to negative zeros, which does not change their bits.
  const bool is_first = first == 0;
  const float* a_sums = kOffset == GroupOffset::kNone ? nullptr : gemm.a_sums + rows.first * groups + first;
  float* out = gemm.call.out + rows.first * out_stride + column;
  const float* of_row = sums.data;
  for (std::int64_t r = 0; r < rows.count; ++r) {
    Simd::Vec values[kVectors];
    ADAPTRT_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      values[v] = is_first ? Simd::set(-0.0F) : Simd::load(out + v * Simd::kLanes, lanes_of(v));
    }
    ADAPTRT_UNROLL
    for (int i = 0; i < kGroups; ++i) {
      const Simd::Vec a_sum = kOffset == GroupOffset::kNone ? Simd::zero() : Simd::set(a_sums[i]);
      ADAPTRT_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        const Simd::Vec sum = Simd::load(of_row + i * sums.group_stride + v * Simd::kLanes, lanes_of(v));
        values[v] = terms[i][v].add_group(sum, a_sum, middle, values[v]);
      }
    }
    ADAPTRT_UNROLL
    for (int v = 0; v < kVectors; ++v) Simd::store(out + v * Simd::kLanes, values[v], lanes_of(v));
    of_row += sums.stride;
    out += out_stride;
    if constexpr (kOffset != GroupOffset::kNone) a_sums += groups;
  }
}

/// Adds one group to the output, for some rows and all columns. Rows of sums are sums_stride apart.
inline void finish_group(const QuantizedGemm& gemm, const QuantizedPanel& panel, std::int64_t index,
                         GroupRows rows, const float* sums, std::int64_t sums_stride) {
  constexpr int kVectors = 2;
  with_offset(gemm.quantization, [&]<GroupOffset kOffset>(std::integral_constant<GroupOffset, kOffset>) {
    std::int64_t column = 0;
    const auto at = [&] { return SumsOfGroups{sums + column, sums_stride, 0}; };
    for (; column + kVectors * Simd::kLanes <= gemm.call.width; column += kVectors * Simd::kLanes) {
      finish_groups<kOffset, 1, kVectors>(gemm, panel, index, rows, at(), column, Simd::kLanes);
    }
    for (; column < gemm.call.width; column += Simd::kLanes) {
      const std::int64_t lanes = std::min<std::int64_t>(Simd::kLanes, gemm.call.width - column);
      finish_groups<kOffset, 1, 1>(gemm, panel, index, rows, at(), column, lanes);
    }
  });
}

/// decode_steps or decode_pairs for some Packed.
using DecodeSteps = void (*)(const QuantizedGemm&, const QuantizedPanel&, std::int64_t begin,
                             std::int64_t end, std::byte* out);

/// Multiplies by a panel with a single group of inputs. The output holds the sums without the scale until all
/// inputs are added.
inline void multiply_one_group(const QuantizedGemm& gemm, const QuantizedPanel& panel, DecodeSteps decode,
                               InputRange inputs) {
  alignas(kCacheLine) std::byte decoded[kStretchSteps * kStepBytes];
  const StepActivations a = activations_of(gemm);
  const std::int64_t most = stretch_steps(gemm.call.rows) * kStepInputs;
  for (std::int64_t begin = inputs.begin; begin < inputs.end; begin += most) {
    const std::int64_t end = std::min(begin + most, inputs.end);
    decode(gemm, panel, begin, end, decoded);
    StepPrefetch nothing;
    multiply_inputs(a, begin, end, {decoded, kStepLine, kStepBytes},
                    {gemm.call.out, gemm.call.out_stride, begin > 0}, gemm.call.rows, gemm.call.width,
                    &nothing);
  }
  if (inputs.end == gemm.call.k) {
    finish_group(gemm, panel, 0, {0, gemm.call.rows}, gemm.call.out, gemm.call.out_stride);
  }
}

/// Product with a panel of several groups of inputs, whose scales differ. A step has weights of only one
/// group, so that the groups' sums are separate. Groups are decoded once for all rows; groups larger than a
/// stretch are decoded again for each kPackedRows rows. For many rows, pairs of tiles of columns are stored
/// separately, and stay in the first-level cache while all rows are multiplied by them.
class GroupedProduct {
 public:
  GroupedProduct(const QuantizedGemm& gemm, const QuantizedPanel& panel, DecodeSteps decode,
                 DecodeSteps decode_pairs)
      : gemm_(gemm),
        panel_(panel),
        decode_(decode),
        decode_pairs_(decode_pairs),
        size_(group_size_of(gemm)),
        steps_(steps_of(size_)) {}

  void run(InputRange inputs) {
    const std::int64_t end = (inputs.end + size_ - 1) / size_;
    if (steps_ > kStretchSteps) {
      for (std::int64_t index = inputs.begin / size_; index < end; ++index) multiply_large(index);
      return;
    }
    const bool in_pairs = gemm_.call.rows >= kCopiedRows && gemm_.call.width == kPanelColumns &&
                          gemm_.a_steps != nullptr && has_packed_steps() && steps_ <= kPairStretch;
    const std::int64_t stretch = in_pairs ? kPairStretch : stretch_steps(gemm_.call.rows);
    const std::int64_t together = std::max<std::int64_t>(1, stretch / steps_);
    for (std::int64_t first = inputs.begin / size_; first < end; first += together) {
      if (in_pairs) {
        multiply_pairs(first, std::min(first + together, end));
      } else {
        multiply_together(first, std::min(first + together, end));
      }
    }
  }

 private:
  void multiply_together(std::int64_t first, std::int64_t end) {
    const auto place = [&](std::int64_t index) { return decoded_ + (index - first) * steps_ * kStepBytes; };
    for (std::int64_t index = first; index < end; ++index) {
      const GroupView group = group_of(gemm_, panel_, index);
      decode_(gemm_, panel_, group.first, group.end, place(index));
    }
    for (std::int64_t row = 0; row < gemm_.call.rows; row += kPackedRows) {
      const GroupRows rows{row, std::min(kPackedRows, gemm_.call.rows - row)};
      for (std::int64_t index = first; index < end; ++index) {
        const GroupView group = group_of(gemm_, panel_, index);
        multiply(rows, group.first, group.end, place(index), false);
        finish_group(gemm_, panel_, index, rows, sums_, kPanelColumns);
      }
    }
  }

  void multiply_pairs(std::int64_t first, std::int64_t end) {
    const auto place = [&](std::int64_t index) {
      return decoded_ + (index - first) * steps_ * kPairStepBytes;
    };
    for (std::int64_t index = first; index < end; ++index) {
      const GroupView group = group_of(gemm_, panel_, index);
      decode_pairs_(gemm_, panel_, group.first, group.end, place(index));
    }
    StepPrefetch prefetch = prefetch_after(first, end);
    for (std::int64_t column = 0; column < kPanelColumns; column += kPairColumns) {
      const std::int64_t pair = column / kPairColumns * kPairStretch * kPairStepBytes;
      for (std::int64_t row = 0; row < gemm_.call.rows; row += kPackedRows) {
        const GroupRows rows{row, std::min(kPackedRows, gemm_.call.rows - row)};
        for (std::int64_t some = first; some < end; some += kGroupsTogether) {
          const std::int64_t end_of_some = std::min(some + kGroupsTogether, end);
          for (std::int64_t index = some; index < end_of_some; ++index) {
            const GroupView group = group_of(gemm_, panel_, index);
            const TileRows a{gemm_.a_steps + group.first / kStepInputs * gemm_.a_step_bytes + row * kTileLine,
                             kTileLine, gemm_.a_step_bytes};
            multiply_rest<BFloat16Dot>(
                a, {place(index) + pair, kPairLine, kPairStepBytes}, steps_of(group.end - group.first),
                {sums_ + (index - some) * kPairSums, kPairColumns, false}, rows.count, &prefetch);
          }
          finish_pair(some, end_of_some, rows, column);
        }
      }
    }
  }

  /// Returns a prefetch of the words after groups [first, end), as many as these groups have. It is spread
  /// over the products of all rows with these groups.
  [[nodiscard]] StepPrefetch prefetch_after(std::int64_t first, std::int64_t end) const {
    const std::int64_t bits = gemm_.quantization.algo == QuantAlgo::kW4A16 ? gemm_.quantization.bits : 8;
    const std::int64_t bytes = (end - first) * size_ * kPanelColumns * bits / 8;
    const std::byte* next = end * size_ < gemm_.call.k
                                ? panel_.weights + end * size_ * kPanelColumns * bits / 8
                                : gemm_.call.next_panel;
    const std::int64_t blocks = (gemm_.call.rows + kPackedRows - 1) / kPackedRows;
    return StepPrefetch::spread(next, bytes, kPanelColumns / kPairColumns * blocks * (end - first) * steps_);
  }

  /// Finishes groups [first, end) of a pair of tiles of columns, from `column` on.
  void finish_pair(std::int64_t first, std::int64_t end, GroupRows rows, std::int64_t column) {
    constexpr int kVectors =
        static_cast<int>(std::min<std::int64_t>(2, kPairColumns / static_cast<std::int64_t>(Simd::kLanes)));
    const float* sums = sums_;
    const auto finish = [&]<GroupOffset kOffset, int kGroups>(std::integral_constant<GroupOffset, kOffset>,
                                                              std::integral_constant<int, kGroups>) {
      for (; first + kGroups <= end; first += kGroups, sums += kGroups * kPairSums) {
        for (std::int64_t v = 0; v < kPairColumns; v += kVectors * Simd::kLanes) {
          finish_groups<kOffset, kGroups, kVectors>(
              gemm_, panel_, first, rows, {sums + v, kPairColumns, kPairSums}, column + v, Simd::kLanes);
        }
      }
    };
    with_offset(gemm_.quantization, [&](auto offset) {
      finish(offset, std::integral_constant<int, kGroupsTogether>());
      finish(offset, std::integral_constant<int, 1>());
    });
  }

  void multiply_large(std::int64_t index) {
    constexpr std::int64_t kPiece = kStretchSteps * kStepInputs;
    const GroupView group = group_of(gemm_, panel_, index);
    for (std::int64_t row = 0; row < gemm_.call.rows; row += kPackedRows) {
      const GroupRows rows{row, std::min(kPackedRows, gemm_.call.rows - row)};
      for (std::int64_t begin = group.first; begin < group.end; begin += kPiece) {
        const std::int64_t end = std::min(begin + kPiece, group.end);
        decode_(gemm_, panel_, begin, end, decoded_);
        multiply(rows, begin, end, decoded_, begin > group.first);
      }
      finish_group(gemm_, panel_, index, rows, sums_, kPanelColumns);
    }
  }

  void multiply(GroupRows rows, std::int64_t begin, std::int64_t end, const std::byte* weights,
                bool continues) {
    const StepActivations all = activations_of(gemm_);
    const StepActivations a{all.rows + rows.first * all.stride, all.stride,
                            all.steps == nullptr ? nullptr : all.steps + rows.first * kTileLine,
                            all.step_bytes};
    if (is_half_step(size_)) {
      begin -= begin % kStepInputs;
      end = std::min(begin + kStepInputs, gemm_.call.k);
    }
    // If steps of groups are not steps of the packed rows, multiply_inputs packs the rows again.
    StepPrefetch nothing;
    multiply_inputs({a.rows, a.stride, has_packed_steps() ? a.steps : nullptr, a.step_bytes}, begin, end,
                    {weights, kStepLine, kStepBytes}, {sums_, kPanelColumns, continues}, rows.count,
                    gemm_.call.width, &nothing);
  }

  /// True if the steps of a group are steps of the packed rows.
  [[nodiscard]] bool has_packed_steps() const { return size_ % kStepInputs == 0 || is_half_step(size_); }

  const QuantizedGemm& gemm_;
  const QuantizedPanel panel_;
  DecodeSteps decode_;
  DecodeSteps decode_pairs_;
  std::int64_t size_;
  std::int64_t steps_;  ///< steps of a group
  alignas(kCacheLine) std::byte decoded_[kStretchSteps * kStepBytes];
  static constexpr std::int64_t kPairSums = kPackedRows * kPairColumns;
  alignas(kCacheLine) float sums_[std::max(kPackedRows * kPanelColumns, kGroupsTogether* kPairSums)];
};

/// Calls multiply(inputs, sums) for each group of inputs of a panel, and adds the sums to the output; for at
/// most one tile of rows. If there is a single group, the output holds its sums until all inputs are added.
template <class Multiply>
void multiply_by_groups(const QuantizedGemm& gemm, const QuantizedPanel& panel, InputRange inputs,
                        const Multiply& multiply) {
  if (group_count(gemm.quantization, gemm.call.k) == 1) {
    multiply(inputs, TileSums{gemm.call.out, gemm.call.out_stride, inputs.begin > 0});
    if (inputs.end < gemm.call.k) return;
    finish_group(gemm, panel, 0, {0, gemm.call.rows}, gemm.call.out, gemm.call.out_stride);
    return;
  }
  alignas(kCacheLine) float sums[kTileHeight * kPanelColumns];
  for (std::int64_t index = inputs.begin / group_size_of(gemm), first = inputs.begin; first < inputs.end;
       ++index) {
    const GroupView group = group_of(gemm, panel, index);
    multiply(InputRange{group.first, group.end}, TileSums{sums, kPanelColumns, false});
    finish_group(gemm, panel, index, {0, gemm.call.rows}, sums, kPanelColumns);
    first = group.end;
  }
}

}  // namespace
}  // namespace adaptrt
