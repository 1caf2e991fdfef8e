#pragma once

#include <cstdint>
#include <optional>

#include "adaptrt/core/error.h"

namespace adaptrt {

/// When a waiting request may start. TensorRT-LLM's names.
enum class CapacitySchedulerPolicy : std::uint8_t {
  /// As soon as there is room for its prompt. When KV blocks run out, the newest running request is paused;
  /// it starts
  /// again later and computes its tokens anew.
  kMaxUtilization = 0,
  /// When the KV blocks that it and all running requests may come to need are there: nothing is ever paused.
  kGuaranteedNoEvict = 1,
  /// Like kGuaranteedNoEvict, but only when the batch before has ended altogether.
  kStaticBatch = 2,
};

/// How the tokens of a step are shared out among prompts.
enum class ContextChunkingPolicy : std::uint8_t { kFirstComeFirstServed = 0, kEqualProgress = 1 };

/// TensorRT-LLM's DynamicBatchConfig; without effect here.
struct DynamicBatchConfig {
  bool enable_batch_size_tuning = false;
  bool enable_max_num_tokens_tuning = false;
  std::int32_t dynamic_batch_moving_average_window = 128;

  bool operator==(const DynamicBatchConfig&) const = default;
};

/// TensorRT-LLM's SchedulerConfig.
struct SchedulerConfig {
  CapacitySchedulerPolicy capacity_scheduler_policy = CapacitySchedulerPolicy::kGuaranteedNoEvict;
  /// nullopt: kFirstComeFirstServed, the only one there is.
  std::optional<ContextChunkingPolicy> context_chunking_policy = std::nullopt;
  std::optional<DynamicBatchConfig> dynamic_batch_config = std::nullopt;

  [[nodiscard]] Problems validate() const;
  bool operator==(const SchedulerConfig&) const = default;
};

}  // namespace adaptrt
