#pragma once

#include <optional>

#include "linear_work.h"

namespace adaptrt {

/// Where the input of a layer is not zero in all rows, if a few rows read so little of its weights that
/// leaving out the rest is worth it; in LinearScratch.
[[nodiscard]] std::optional<LiveInputs> find_live_inputs(const LinearWork& work, const Step& step);

/// Whether a gated layer's second part is made where its gates are open alone, and its gates, where they have
/// rows, where scores leave them alone.
[[nodiscard]] bool reads_open_gates_alone(const LinearWork& work, const Step& step);

/// The layer, of such a one: its gates, adapters included, for all outputs that scores do not close in all
/// rows, then the second part where a gate of some row is open. The bits are run_linear's. Returns whether
/// anything was left out.
bool run_gated_by_relu(const LinearWork& work, const Step& step);

}  // namespace adaptrt
