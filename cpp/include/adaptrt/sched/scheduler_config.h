#pragma once

#include <cstdint>
#include <optional>

#include "adaptrt/core/error.h"

namespace adaptrt {

/// When a waiting request may start. The names are TensorRT-LLM's.
enum class CapacitySchedulerPolicy : std::uint8_t {
  /// Starts when there is room for its prompt. When KV blocks run out, the newest running request is
  /// preempted.
  /// It starts again later and recomputes its tokens.
  kMaxUtilization = 0,
  /// When there are enough KV blocks for all tokens of this and all running requests. No request is ever
  /// preempted.
  kGuaranteedNoEvict = 1,
  /// Like kGuaranteedNoEvict, but only after the whole previous batch has ended.
  kStaticBatch = 2,
};

/// How a step's tokens are shared among prompts that are computed over several steps.
enum class ContextChunkingPolicy : std::uint8_t {
  /// The first prompt takes the tokens that it needs, the next one takes from the rest.
  kFirstComeFirstServed = 0,
  /// Every prompt takes one KV block of tokens, then each in turn takes another until none are left. More
  /// prompts start at the same time, and each takes longer.
  kEqualProgress = 1,
};

/// TensorRT-LLM's DynamicBatchConfig; it has no effect here.
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
  /// If true, the next request of a priority is the one whose adapter has the fewest computed tokens. If
  /// false, it is the oldest request. Not in TensorRT-LLM.
  bool adapter_fairness = true;

  /// Lists the problems of the fields; some settings require chunked context.
  [[nodiscard]] Problems validate(bool enable_chunked_context) const;
  bool operator==(const SchedulerConfig&) const = default;
};

}  // namespace adaptrt
