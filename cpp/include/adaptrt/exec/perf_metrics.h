#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "adaptrt/core/fields.h"

namespace adaptrt {

/// A moment of the steady clock. Its zero stands for a moment that has not come.
using SteadyTime = std::chrono::steady_clock::time_point;

/// TensorRT-LLM's RequestPerfMetrics::TimingMetrics.
struct TimingMetrics {
  SteadyTime arrival_time;
  SteadyTime first_scheduled_time;
  SteadyTime first_token_time;
  SteadyTime last_token_time;
  SteadyTime kv_cache_transfer_start;
  SteadyTime kv_cache_transfer_end;
  std::size_t kv_cache_size = 0;

  bool operator==(const TimingMetrics&) const = default;
};

constexpr auto fields_of(const TimingMetrics* /*type*/) {
  using C = TimingMetrics;
  return FieldList{
      Field{"arrival_time", &C::arrival_time, "Time at which the executor got the request."},
      Field{"first_scheduled_time", &C::first_scheduled_time,
            "Begin of the step that started the request; 0 if none did."},
      Field{"first_token_time", &C::first_token_time,
            "Time at which the first token of a sequence was chosen; 0 before. The first token may be the "
            "end_id, which the result leaves out."},
      Field{"last_token_time", &C::last_token_time,
            "The same for the newest token. In the last response it is the time of the last token."},
      Field{"kv_cache_transfer_start", &C::kv_cache_transfer_start,
            "Always 0: prompts are computed where their tokens are generated."},
      Field{"kv_cache_transfer_end", &C::kv_cache_transfer_end, "Always 0, for the same reason."},
      Field{"kv_cache_size", &C::kv_cache_size, "Always 0, for the same reason."}};
}

/// TensorRT-LLM's RequestPerfMetrics::KvCacheMetrics.
struct KvCacheMetrics {
  std::int32_t num_total_allocated_blocks = 0;
  std::int32_t num_new_allocated_blocks = 0;
  std::int32_t num_reused_blocks = 0;
  std::int32_t num_missed_blocks = 0;
  float kv_cache_hit_rate = 0.0F;

  bool operator==(const KvCacheMetrics&) const = default;
};

constexpr auto fields_of(const KvCacheMetrics* /*type*/) {
  using C = KvCacheMetrics;
  return FieldList{
      Field{
          "num_total_allocated_blocks", &C::num_total_allocated_blocks,
          "Blocks that the request got so far, new and reused, of all its sequences and its encoder input. A "
          "preempted sequence gets blocks again, which count again."},
      Field{"num_new_allocated_blocks", &C::num_new_allocated_blocks, "New blocks so far."},
      Field{"num_reused_blocks", &C::num_reused_blocks, "Reused full blocks so far."},
      Field{"num_missed_blocks", &C::num_missed_blocks,
            "Full blocks so far that the request looked for and did not find."},
      Field{"kv_cache_hit_rate", &C::kv_cache_hit_rate, "reused / (reused + missed); 0 without any."}};
}

/// TensorRT-LLM's RequestPerfMetrics::SpeculativeDecodingMetrics.
struct SpeculativeDecodingMetrics {
  float acceptance_rate = 0.0F;
  std::int32_t total_accepted_draft_tokens = 0;
  std::int32_t total_draft_tokens = 0;

  bool operator==(const SpeculativeDecodingMetrics&) const = default;
};

constexpr auto fields_of(const SpeculativeDecodingMetrics* /*type*/) {
  using C = SpeculativeDecodingMetrics;
  return FieldList{
      Field{"acceptance_rate", &C::acceptance_rate, "accepted / computed drafts; 0 without any."},
      Field{"total_accepted_draft_tokens", &C::total_accepted_draft_tokens,
            "Tokens so far that right drafts added to those of steps without drafts."},
      Field{"total_draft_tokens", &C::total_draft_tokens,
            "Drafts of the request that steps computed so far."}};
}

/// TensorRT-LLM's RequestPerfMetrics: the times, memory and drafts of one request.
struct RequestPerfMetrics {
  TimingMetrics timing_metrics;
  KvCacheMetrics kv_cache_metrics;
  SpeculativeDecodingMetrics speculative_decoding;
  std::optional<std::uint64_t> first_iter;
  std::optional<std::uint64_t> last_iter;
  std::optional<std::uint64_t> iter;

  bool operator==(const RequestPerfMetrics&) const = default;
};

constexpr auto fields_of(const RequestPerfMetrics* /*type*/) {
  using C = RequestPerfMetrics;
  return FieldList{
      Field{"timing_metrics", &C::timing_metrics, "Times of the steady clock, as time.monotonic() gives it."},
      Field{"kv_cache_metrics", &C::kv_cache_metrics, "KV cache blocks of the request."},
      Field{"speculative_decoding", &C::speculative_decoding, "Drafts of the request."},
      Field{"first_iter", &C::first_iter,
            "Number of the step (IterationStats.iter) that gave the request its first token; None before."},
      Field{"last_iter", &C::last_iter,
            "Number of the step of the last token; None before the request's last response."},
      Field{"iter", &C::iter, "Number of the step of the newest token; None before the first one."}};
}

}  // namespace adaptrt
