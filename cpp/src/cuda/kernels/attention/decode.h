#pragma once

#include <cstddef>
#include <cstdint>

#include "adaptrt/core/dtype.h"
#include "cuda/kernels/attention/splits.h"
#include "cuda/kernels/attention/step.h"

namespace adaptrt::cuda {

/// Decides how a step's decodes are distributed over blocks, from the sizes only. The results do not depend
/// on it.
[[nodiscard]] Splits plan_splits(const AttentionStep& step);

/// Maximum size of the parts' sums and totals, for steps with at most this many sequences.
[[nodiscard]] std::size_t split_bytes(std::int32_t num_heads, std::int32_t head_dim,
                                      std::int32_t max_sequences);

/// Number of Splits::counters of a step.
[[nodiscard]] std::int64_t split_counters(std::int32_t num_heads, std::int32_t num_kv_heads,
                                          std::int32_t sequences);

/// True if every sequence has one token and launch_decode can do the work of launch_rotate_and_write.
[[nodiscard]] bool decode_can_rotate(const AttentionStep& step);

/// Attention for the sequences with one token; skips other sequences. The head_dim must be one of
/// with_head_dim.
void launch_decode(const AttentionStep& step, const Splits& splits, bool rotates, DType dtype, void* stream);

}  // namespace adaptrt::cuda
