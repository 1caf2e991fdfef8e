#pragma once

#include <cstdint>
#include <vector>

#include "adaptrt/engine/engine.h"
#include "adaptrt/lora/layout.h"

namespace adaptrt {

/// Consecutive queries of a sequence that share a key-value head, computed by one thread.
struct AttentionTask {
  std::int32_t sequence = 0;
  std::int32_t first_token = 0;  ///< of the step
  std::int32_t tokens = 0;
  std::int32_t kv_head = 0;
};

/// The most query positions of a task.
[[nodiscard]] std::int64_t positions_per_task(const ModelShape& shape);

/// Cuts a step's queries into tasks, the long ones first so that they do not end last.
void plan_attention(const StepInput& input, const ModelShape& shape, std::vector<AttentionTask>* tasks);

}  // namespace adaptrt
