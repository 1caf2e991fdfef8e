#pragma once

#include <cstdint>

#include "ops/linear_work.h"

namespace adaptrt {

/// Steps of few rows for which a gated layer is read whole without asking, after one in which most of its
/// gates were open.
inline constexpr std::int32_t kWholeSteps = 15;

/// How many outputs of a gated layer may be open for the others to be left out.
[[nodiscard]] std::int64_t most_gathered_outputs(std::int64_t width);

/// How many rows of a program's layers are few.
[[nodiscard]] std::int64_t most_sparse_rows(const KernelTable& kernels, DType weights);

/// Whether a gated layer's second part is made where its gates are open alone, and its gates, or a ReLU's
/// outputs without a second part, where they have rows, where scores leave them alone.
[[nodiscard]] bool reads_open_gates_alone(const LinearWork& work, const Step& step);

/// The layer, of such a one: its gates, adapters included, for all outputs that scores do not close in all
/// rows, then the second part, if there is one, where a gate of some row is open. The bits are run_linear's.
/// Returns whether anything was left out.
bool run_gated_by_relu(const LinearWork& work, const Step& step);

}  // namespace adaptrt
