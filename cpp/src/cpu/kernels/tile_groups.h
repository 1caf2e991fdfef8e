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

/// Consecutive rows whose sums are computed together.
struct GroupRows {
  std::int64_t first;
  std::int64_t count;
};

/// The zero points or the minimums of a group, for one vector of columns.
class GroupOffset {
 public:
  GroupOffset() = default;
  GroupOffset(const Quantization& how, const GroupView& group, std::int64_t column, std::int64_t lanes)
      : has_zeros_(group.zeros != nullptr), has_minimums_(group.minimums != nullptr) {
    if (has_zeros_) offset_ = load_zeros(how, group.zeros, column, lanes);
    if (!has_minimums_) return;
    offset_ = load_scales(how, group.minimums, column, lanes);
    middle_ = static_cast<float>(middle_of_minimums(how));
  }

  /// True if add_group() reads a_sum.
  [[nodiscard]] bool is_needed() const { return has_zeros_ || has_minimums_; }

  /// Returns `before` plus the group's products, with the bits of quantized_tile. `sum` is the sum of the
  /// decoded integers' products, and a_sum that of the activations.
  [[nodiscard]] Simd::Vec add_group(Simd::Vec sum, Simd::Vec scale, float a_sum, bool is_first,
                                    Simd::Vec before) const {
    if (has_zeros_) sum = Simd::fma(Simd::set(-a_sum), offset_, sum);
    if (has_minimums_) sum = Simd::fma(Simd::set(a_sum), Simd::set(middle_), sum);
    const Simd::Vec total = is_first ? Simd::mul(sum, scale) : Simd::fma(sum, scale, before);
    return has_minimums_ ? Simd::fma(Simd::set(-a_sum), offset_, total) : total;
  }

 private:
  bool has_zeros_ = false;
  bool has_minimums_ = false;
  float middle_ = 0.0F;
  Simd::Vec offset_ = Simd::zero();
};

/// Adds one group to the output, for some rows: multiplies its sums by the scale, and subtracts the share of
/// the zero point or the minimum. Rows of sums are sums_stride apart.
inline void finish_group(const QuantizedGemm& gemm, const GroupView& group, std::int64_t index,
                         std::int64_t first_row, std::int64_t rows, const float* sums,
                         std::int64_t sums_stride) {
  const std::int64_t groups = group_count(gemm.quantization, gemm.call.k);
  for (std::int64_t column = 0; column < gemm.call.width; column += Simd::kLanes) {
    const std::int64_t lanes = std::min<std::int64_t>(Simd::kLanes, gemm.call.width - column);
    const Simd::Vec scale = load_scales(gemm.quantization, group.scales, column, lanes);
    const GroupOffset offset(gemm.quantization, group, column, lanes);
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t row = first_row + r;
      float* to = gemm.call.out + row * gemm.call.out_stride + column;
      const Simd::Vec before = index == 0 ? Simd::zero() : Simd::load(to, lanes);
      const Simd::Vec sum = Simd::load(sums + r * sums_stride + column, lanes);
      const float a_sum = offset.is_needed() ? gemm.a_sums[row * groups + index] : 0.0F;
      Simd::store(to, offset.add_group(sum, scale, a_sum, index == 0, before), lanes);
    }
  }
}

/// The same for kGroups groups from number `first` on, and for columns that are whole vectors. The sums of
/// consecutive groups are group_stride apart.
template <int kGroups>
void finish_groups(const QuantizedGemm& gemm, const QuantizedPanel& panel, std::int64_t first, GroupRows rows,
                   const float* sums, std::int64_t sums_stride, std::int64_t group_stride,
                   InputRange columns) {
  const std::int64_t groups = group_count(gemm.quantization, gemm.call.k);
  for (std::int64_t column = columns.begin; column < columns.end;
       column += Simd::kLanes, sums += Simd::kLanes) {
    Simd::Vec scales[kGroups];
    GroupOffset offsets[kGroups];
    ADAPTRT_UNROLL
    for (int i = 0; i < kGroups; ++i) {
      const GroupView group = group_of(gemm, panel, first + i);
      scales[i] = load_scales(gemm.quantization, group.scales, column, Simd::kLanes);
      offsets[i] = GroupOffset(gemm.quantization, group, column, Simd::kLanes);
    }
    for (std::int64_t r = 0; r < rows.count; ++r) {
      const std::int64_t row = rows.first + r;
      float* out = gemm.call.out + row * gemm.call.out_stride + column;
      Simd::Vec value = first == 0 ? Simd::zero() : Simd::load(out);
      ADAPTRT_UNROLL
      for (int i = 0; i < kGroups; ++i) {
        const Simd::Vec sum = Simd::load(sums + i * group_stride + r * sums_stride);
        const float a_sum = offsets[i].is_needed() ? gemm.a_sums[row * groups + first + i] : 0.0F;
        value = offsets[i].add_group(sum, scales[i], a_sum, first + i == 0, value);
      }
      Simd::store(out, value);
    }
  }
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
    finish_group(gemm, group_of(gemm, panel, 0), 0, 0, gemm.call.rows, gemm.call.out, gemm.call.out_stride);
  }
}

/// Product with a panel of several groups of inputs, whose scales differ. A step has inputs of only one
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
                          gemm_.a_steps != nullptr && size_ % kStepInputs == 0 && steps_ <= kPairStretch;
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
        finish_group(gemm_, group, index, rows.first, rows.count, sums_, kPanelColumns);
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
    const InputRange columns{column, column + kPairColumns};
    const auto finish = [&]<int kGroups>(std::integral_constant<int, kGroups>) {
      const float* sums = sums_;
      for (; first + kGroups <= end; first += kGroups, sums += kGroups * kPairSums) {
        finish_groups<kGroups>(gemm_, panel_, first, rows, sums, kPairColumns, kPairSums, columns);
      }
    };
    if (end - first == kGroupsTogether) return finish(std::integral_constant<int, kGroupsTogether>());
    if (end - first == 2) return finish(std::integral_constant<int, 2>());
    finish(std::integral_constant<int, 1>());
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
      finish_group(gemm_, group, index, rows.first, rows.count, sums_, kPanelColumns);
    }
  }

  void multiply(GroupRows rows, std::int64_t begin, std::int64_t end, const std::byte* weights,
                bool continues) {
    const StepActivations all = activations_of(gemm_);
    const StepActivations a{all.rows + rows.first * all.stride, all.stride,
                            all.steps == nullptr ? nullptr : all.steps + rows.first * kTileLine,
                            all.step_bytes};
    // If steps of groups are not steps of the packed rows, multiply_inputs packs the rows again.
    const bool fits = size_ % kStepInputs == 0;
    StepPrefetch nothing;
    multiply_inputs({a.rows, a.stride, fits ? a.steps : nullptr, a.step_bytes}, begin, end,
                    {weights, kStepLine, kStepBytes}, {sums_, kPanelColumns, continues}, rows.count,
                    gemm_.call.width, &nothing);
  }

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
    finish_group(gemm, group_of(gemm, panel, 0), 0, 0, gemm.call.rows, gemm.call.out, gemm.call.out_stride);
    return;
  }
  alignas(kCacheLine) float sums[kTileHeight * kPanelColumns];
  for (std::int64_t index = inputs.begin / group_size_of(gemm), first = inputs.begin; first < inputs.end;
       ++index) {
    const GroupView group = group_of(gemm, panel, index);
    multiply(InputRange{group.first, group.end}, TileSums{sums, kPanelColumns, false});
    finish_group(gemm, group, index, 0, gemm.call.rows, sums, kPanelColumns);
    first = group.end;
  }
}

}  // namespace
}  // namespace adaptrt
