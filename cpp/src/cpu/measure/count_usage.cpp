#include "measure/count_usage.h"

#include <algorithm>
#include <cstdint>
#include <variant>
#include <vector>

namespace adaptrt {
namespace {

std::vector<std::uint32_t>& counts_of(std::size_t index, std::int64_t choices, WeightUsage* usage) {
  std::vector<std::uint32_t>& counts = usage->of_ops[index];
  counts.resize(static_cast<std::size_t>(choices));
  return counts;
}

/// The output of a closed gate is zero.
template <class Bits>
void count_open(const Rows& made, std::int64_t rows, Bits without_sign, std::uint32_t* counts) {
  for (std::int64_t row = 0; row < rows; ++row) {
    const auto* values = reinterpret_cast<const Bits*>(made.row(row));
    for (std::int64_t i = 0; i < made.width; ++i) counts[i] += (values[i] & without_sign) != 0 ? 1U : 0U;
  }
}

}  // namespace

void count_usage(std::size_t index, const Op& op, const CpuContext& context, std::int64_t rows,
                 WeightUsage* usage) {
  if (const auto* linear = std::get_if<LinearOp>(&op)) {
    if (!is_relu_gated(linear->epilogue)) return;
    const Rows made = context.rows_of(linear->output);
    std::uint32_t* counts = counts_of(index, made.width, usage).data();
    if (made.dtype == DType::kBFloat16) {
      count_open<std::uint16_t>(made, rows, 0x7fff, counts);
    } else {
      count_open<std::uint32_t>(made, rows, 0x7fffffff, counts);
    }
  } else if (const auto* experts = std::get_if<ExpertsOp>(&op)) {
    std::vector<std::uint32_t>& counts = counts_of(index, experts->num_experts_here(), usage);
    const std::vector<std::int64_t>& taken = context.memory.experts.taken.rows;
    std::ranges::transform(counts, taken, counts.begin(), [](std::uint32_t before, std::int64_t more) {
      return before + static_cast<std::uint32_t>(more);
    });
  }
}

}  // namespace adaptrt
