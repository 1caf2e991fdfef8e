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

/// How the tokens of a step are shared out among prompts that are computed over several steps.
enum class ContextChunkingPolicy : std::uint8_t {
  /// The first prompt takes what it needs, the next one what that leaves.
  kFirstComeFirstServed = 0,
  /// Every prompt takes a KV block's worth of tokens, then each in turn another, until none are left. More
  /// prompts start at once, and each of them takes longer.
  kEqualProgress = 1,
};

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
  /// nullopt: kFirstComeFirstServed.
  std::optional<ContextChunkingPolicy> context_chunking_policy = std::nullopt;
  std::optional<DynamicBatchConfig> dynamic_batch_config = std::nullopt;
  /// Among requests of one priority, that one starts next for whose adapter the fewest tokens were computed;
  /// else the one that came first. Not in TensorRT-LLM.
  bool adapter_fairness = true;

  /// What is wrong with the fields; some need prompts that are computed over several steps.
  [[nodiscard]] Problems validate(bool enable_chunked_context) const;
  bool operator==(const SchedulerConfig&) const = default;
};

}  // namespace adaptrt
