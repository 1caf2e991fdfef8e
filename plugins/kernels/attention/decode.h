#pragma once

#include <cstddef>
#include <cstdint>

#include "adaptrt/core/dtype.h"
#include "plugins/kernels/attention/splits.h"
#include "plugins/kernels/attention/step.h"

namespace adaptrt::cuda {

/// How a step's decodes are split. The sizes alone decide: enough splits to fill a GPU when the sequences are
/// few, none when they are many.
[[nodiscard]] Splits plan_splits(const AttentionStep& step);

/// Bytes of the splits' sums and totals that a step of at most so many sequences may need.
[[nodiscard]] std::size_t split_bytes(std::int32_t num_heads, std::int32_t num_kv_heads,
                                      std::int32_t head_dim, std::int32_t max_sequences);

/// Attends from the tokens of the sequences that have one token; leaves the others alone. The head_dim is one
/// of with_head_dim.
void launch_decode(const AttentionStep& step, const Splits& splits, DType dtype, void* stream);

}  // namespace adaptrt::cuda
