#pragma once

#include <cstdint>
#include <vector>

#include "adaptrt/engine/engine.h"
#include "adaptrt/lora/layout.h"

namespace adaptrt {

/// Consecutive queries of a sequence and consecutive key-value heads, computed by one thread.
struct AttentionTask {
  std::int32_t sequence = 0;
  std::int32_t first_token = 0;  ///< of the step
  std::int32_t tokens = 0;
  std::int32_t first_head = 0;
  std::int32_t heads = 0;
};

/// The most rows of a task: query positions times the query heads of its key-value heads.
[[nodiscard]] std::int64_t rows_per_task(const ModelShape& shape);

/// Cuts a step's queries into tasks for `num_threads` threads, the long ones first so that they do not end
/// last.
void plan_attention(const StepInput& input, const ModelShape& shape, int num_threads,
                    std::vector<AttentionTask>* tasks);

}  // namespace adaptrt
