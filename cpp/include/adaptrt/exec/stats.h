#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "adaptrt/core/fields.h"
#include "adaptrt/draft_engine/draft_engine.h"
#include "adaptrt/exec/request.h"
#include "adaptrt/kv/block_pool.h"
#include "adaptrt/kv/second_level.h"
#include "adaptrt/lora/lora_cache.h"

namespace adaptrt {

constexpr auto fields_of(const SecondLevelStats* /*type*/) {
  using C = SecondLevelStats;
  return FieldList{
      Field{"max_num_blocks", &C::max_num_blocks, "Maximum number of blocks in the file."},
      Field{"used_num_blocks", &C::used_num_blocks, "Number of blocks in the file."},
      Field{"written_blocks", &C::written_blocks, "Blocks written to the file so far."},
      Field{"read_blocks", &C::read_blocks, "Blocks read back so far instead of being computed."},
      Field{"dropped_blocks", &C::dropped_blocks,
            "Blocks not written so far, because too many were waiting."},
      Field{"failed_blocks", &C::failed_blocks, "Blocks lost so far to errors of the disk or to damage."},
      Field{"error", &C::error, "Reason why the second level was switched off; empty if it is in use."}};
}

constexpr auto fields_of(const KvCacheStats* /*type*/) {
  using C = KvCacheStats;
  return FieldList{
      Field{"max_num_blocks", &C::max_num_blocks, "Blocks of the pool."},
      Field{"free_num_blocks", &C::free_num_blocks, "Blocks that no running request holds."},
      Field{"used_num_blocks", &C::used_num_blocks, "Blocks of running requests."},
      Field{"tokens_per_block", &C::tokens_per_block, "Tokens in a block."},
      Field{"alloc_total_blocks", &C::alloc_total_blocks, "Blocks that requests got so far, new and reused."},
      Field{"alloc_new_blocks", &C::alloc_new_blocks, "New blocks that requests got so far."},
      Field{"reused_blocks", &C::reused_blocks, "Blocks that requests reused so far."},
      Field{"missed_blocks", &C::missed_blocks,
            "Full blocks that requests looked for and did not find so far."},
      Field{"cache_hit_rate", &C::cache_hit_rate, "reused / (reused + missed)."},
      Field{"partially_reused_blocks", &C::partially_reused_blocks,
            "New blocks so far that begin with copied KV of another block."},
      Field{"reused_tokens", &C::reused_tokens, "Tokens so far in both kinds of reused blocks."},
      Field{"second_level", &C::second_level, "The second level, a file; None without host_cache_size."}};
}

constexpr auto fields_of(const StatePoolStats* /*type*/) {
  using C = StatePoolStats;
  return FieldList{
      Field{"slot_bytes", &C::slot_bytes, "Bytes of the states of a sequence."},
      Field{"num_slots", &C::num_slots, "Largest number of sequences that keep states."},
      Field{"used_slots", &C::used_slots, "Running sequences."},
      Field{"max_snapshots", &C::max_snapshots, "Largest number of snapshots."},
      Field{"num_snapshots", &C::num_snapshots, "Snapshots that later requests can start from."},
      Field{"taken_snapshots", &C::taken_snapshots, "Snapshots taken so far."},
      Field{"reused_snapshots", &C::reused_snapshots, "Starts of sequences from a snapshot so far."},
      Field{"second_level", &C::second_level,
            "The file of snapshots, whose blocks are snapshots; None without host_cache_size."}};
}

constexpr auto fields_of(const LoraCacheStats* /*type*/) {
  using C = LoraCacheStats;
  return FieldList{
      Field{"host_hits", &C::host_hits, "Requests whose adapter was in the host level."},
      Field{"host_misses", &C::host_misses, "Adapters stored, or not found."},
      Field{"host_evictions", &C::host_evictions, "Adapters evicted from the host level."},
      Field{"device_hits", &C::device_hits,
            "Starts of requests whose adapter was already on the device level."},
      Field{"device_misses", &C::device_misses, "Adapters that had to be loaded to the device level."},
      Field{"device_evictions", &C::device_evictions, "Device copies evicted to make room."},
      Field{"host_adapters", &C::host_adapters, "Adapters on the host level now."},
      Field{"device_adapters", &C::device_adapters, "Adapters on the device level now."},
      Field{"host_bytes_used", &C::host_bytes_used, "Bytes in use on the host level."},
      Field{"host_bytes_total", &C::host_bytes_total, "Size of the host level in bytes."},
      Field{"page_bytes", &C::page_bytes, "Bytes of a device page."},
      Field{"device_pages_used", &C::device_pages_used, "Device pages in use."},
      Field{"device_pages_total", &C::device_pages_total, "Number of device pages."},
      Field{"loads_in_flight", &C::loads_in_flight,
            "Adapters that are being loaded to the device level now."},
      Field{"failed_loads", &C::failed_loads, "Loads that failed so far."},
      Field{"load_seconds", &C::load_seconds,
            "Seconds spent so far on copying adapters to the device level. 0 on a CPU, where nothing is "
            "copied."},
      Field{"steps_waiting_for_adapters", &C::steps_waiting_for_adapters,
            "Steps so far whose batch had room for more requests, but whose device level had none for their "
            "adapters."},
      Field{"memory_bytes", &C::memory_bytes,
            "Bytes of the host level's adapters and of the device level, if that has memory of its own."},
      Field{"saved_bytes", &C::saved_bytes,
            "Bytes that the host level's adapters would need in addition if equal matrices were kept for "
            "each, rows whose B is zero were kept, and no matrix was compressed."},
      Field{"saved_products", &C::saved_products,
            "Products of a token with A or B that the host level's adapters need not make, because B is zero "
            "or modules with one input have the same A."},
      Field{"pinned_bytes", &C::pinned_bytes,
            "Bytes of pinned memory for the host level's adapters, in use or not. 0 on a CPU."},
      Field{
          "staged_loads", &C::staged_loads,
          "Loads so far of adapters that are not in pinned memory, and so were first copied to some. 0 on a "
          "CPU."}};
}

/// TensorRT-LLM's InflightBatchingStats.
struct InflightBatchingStats {
  std::int32_t num_scheduled_requests = 0;
  std::int32_t num_context_requests = 0;
  std::int32_t num_gen_requests = 0;
  std::int32_t num_paused_requests = 0;
  std::int32_t num_ctx_tokens = 0;
  std::int32_t micro_batch_id = 0;
  double avg_num_decoded_tokens_per_iter = 0.0;

  bool operator==(const InflightBatchingStats&) const = default;
};

constexpr auto fields_of(const InflightBatchingStats* /*type*/) {
  using C = InflightBatchingStats;
  return FieldList{
      Field{"num_scheduled_requests", &C::num_scheduled_requests, "Requests of the step."},
      Field{"num_context_requests", &C::num_context_requests,
            "Requests of the step that compute their prompt."},
      Field{"num_gen_requests", &C::num_gen_requests, "Requests of the step that generate."},
      Field{"num_paused_requests", &C::num_paused_requests, "Preempted requests, which wait to run again."},
      Field{"num_ctx_tokens", &C::num_ctx_tokens, "Prompt tokens of the step."},
      Field{"micro_batch_id", &C::micro_batch_id,
            "Always 0: micro-batches of a pipeline are counted together."},
      Field{"avg_num_decoded_tokens_per_iter", &C::avg_num_decoded_tokens_per_iter,
            "Tokens per generating request; 1 when each has one sequence and no draft was right."}};
}

/// TensorRT-LLM's StaticBatchingStats. Never present: batches are in flight here.
struct StaticBatchingStats {
  std::int32_t num_scheduled_requests = 0;
  std::int32_t num_context_requests = 0;
  std::int32_t num_ctx_tokens = 0;
  std::int32_t num_gen_tokens = 0;
  std::int32_t empty_gen_slots = 0;

  bool operator==(const StaticBatchingStats&) const = default;
};

constexpr auto fields_of(const StaticBatchingStats* /*type*/) {
  using C = StaticBatchingStats;
  return FieldList{Field{"num_scheduled_requests", &C::num_scheduled_requests, "Requests of the step."},
                   Field{"num_context_requests", &C::num_context_requests,
                         "Requests of the step that compute their prompt."},
                   Field{"num_ctx_tokens", &C::num_ctx_tokens, "Prompt tokens of the step."},
                   Field{"num_gen_tokens", &C::num_gen_tokens, "Generated tokens of the step."},
                   Field{"empty_gen_slots", &C::empty_gen_slots, "Unused places of the batch."}};
}

/// TensorRT-LLM's DisServingRequestStats. Never present: each prompt is computed in the same executor as its
/// generated tokens.
struct DisServingRequestStats {
  double kv_cache_transfer_ms = 0.0;
  std::size_t kv_cache_size = 0;

  bool operator==(const DisServingRequestStats&) const = default;
};

constexpr auto fields_of(const DisServingRequestStats* /*type*/) {
  using C = DisServingRequestStats;
  return FieldList{Field{"kv_cache_transfer_ms", &C::kv_cache_transfer_ms, "Time to move the request's KV."},
                   Field{"kv_cache_size", &C::kv_cache_size, "Bytes of KV that were moved."}};
}

/// TensorRT-LLM's SpecDecodingStats.
struct SpecDecodingStats {
  std::int64_t num_draft_tokens = 0;
  std::int64_t num_accepted_tokens = 0;
  std::int64_t num_requests_with_draft_tokens = 0;
  double acceptance_length = 0.0;
  double iter_latency_ms = 0.0;
  double draft_overhead = 0.0;

  bool operator==(const SpecDecodingStats&) const = default;
};

constexpr auto fields_of(const SpecDecodingStats* /*type*/) {
  using C = SpecDecodingStats;
  return FieldList{
      Field{"num_draft_tokens", &C::num_draft_tokens, "Drafts that the step computed."},
      Field{"num_accepted_tokens", &C::num_accepted_tokens, "Tokens that the step gained from drafts."},
      Field{"num_requests_with_draft_tokens", &C::num_requests_with_draft_tokens,
            "Sequences that had drafts in the step."},
      Field{"acceptance_length", &C::acceptance_length,
            "Average number of tokens that each of these sequences got."},
      Field{"iter_latency_ms", &C::iter_latency_ms,
            "Time for making drafts: the draft engine's for this step, and drafts from texts for the next "
            "step."},
      Field{"draft_overhead", &C::draft_overhead, "Fraction of the step's iter_latency_ms spent on drafts."}};
}

constexpr auto fields_of(const DraftEngineStats* /*type*/) {
  using C = DraftEngineStats;
  return FieldList{
      Field{"mem_usage", &C::mem_usage, "Bytes of its KV pool and its LoRA cache."},
      Field{"max_num_blocks", &C::max_num_blocks, "Blocks of its KV pool."},
      Field{"used_num_blocks", &C::used_num_blocks, "Blocks of sequences that it has computed."},
      Field{"num_sequences", &C::num_sequences, "Sequences that it has computed."},
      Field{"num_steps", &C::num_steps, "Steps that it has run so far."},
      Field{"num_tokens", &C::num_tokens, "Tokens that it has computed so far, drafts included."},
      Field{"seconds", &C::seconds, "Seconds spent on drafts so far."},
      Field{"error", &C::error, "Reason why the draft engine was switched off; empty if it is in use."}};
}

/// Totals of all drafts so far, from every source.
struct SpeculationStats {
  std::int64_t draft_tokens = 0;
  std::int64_t accepted_tokens = 0;
  std::optional<DraftEngineStats> draft_engine;

  bool operator==(const SpeculationStats&) const = default;
};

constexpr auto fields_of(const SpeculationStats* /*type*/) {
  using C = SpeculationStats;
  return FieldList{
      Field{"draft_tokens", &C::draft_tokens, "Number of drafts computed so far."},
      Field{"accepted_tokens", &C::accepted_tokens, "Tokens gained from drafts so far."},
      Field{"draft_engine", &C::draft_engine, "None without ExecutorConfig.draft_target_decoding_config."}};
}

/// TensorRT-LLM's IterationStats with the engine's part of the latency, totals of all drafts, the LoRA cache,
/// the bytes of weights that were read, and whether the step was begun ahead.
struct IterationStats {
  std::string timestamp;
  std::int64_t iter = 0;
  double iter_latency_ms = 0.0;
  double engine_latency_ms = 0.0;
  double new_active_requests_queue_latency_ms = 0.0;
  std::int32_t num_new_active_requests = 0;
  std::int32_t num_active_requests = 0;
  std::int32_t num_queued_requests = 0;
  std::int32_t num_completed_requests = 0;
  std::int32_t max_num_active_requests = 0;
  std::size_t gpu_mem_usage = 0;
  std::size_t cpu_mem_usage = 0;
  std::size_t pinned_mem_usage = 0;
  std::optional<KvCacheStats> kv_cache_stats;
  std::optional<KvCacheStats> cross_kv_cache_stats;
  std::optional<StatePoolStats> state_stats;
  std::optional<StaticBatchingStats> static_batching_stats;
  std::optional<InflightBatchingStats> inflight_batching_stats;
  std::optional<SpecDecodingStats> spec_decoding_stats;
  std::optional<LoraCacheStats> lora_cache_stats;
  SpeculationStats speculation_stats;
  std::uint64_t weight_bytes_read = 0;
  bool begun_ahead = false;

  bool operator==(const IterationStats&) const = default;
};

constexpr auto fields_of(const IterationStats* /*type*/) {
  using C = IterationStats;
  return FieldList{
      Field{"timestamp", &C::timestamp, "Time of the step's end in UTC: MM-DD-YYYY HH:MM:SS.microseconds."},
      Field{"iter", &C::iter, "Number of the step."},
      Field{"iter_latency_ms", &C::iter_latency_ms,
            "Time for planning, the engine's step, sampling and responses."},
      Field{"engine_latency_ms", &C::engine_latency_ms,
            "Part of iter_latency_ms spent in the engine's step."},
      Field{"new_active_requests_queue_latency_ms", &C::new_active_requests_queue_latency_ms,
            "Total time that the requests started by this step had waited in the queue."},
      Field{"num_new_active_requests", &C::num_new_active_requests, "Requests that started with this step."},
      Field{"num_active_requests", &C::num_active_requests, "Requests that ran in this step."},
      Field{"num_queued_requests", &C::num_queued_requests, "Requests that wait for their start."},
      Field{"num_completed_requests", &C::num_completed_requests, "Requests that ended with this step."},
      Field{"max_num_active_requests", &C::max_num_active_requests, "Maximum batch size."},
      Field{
          "gpu_mem_usage", &C::gpu_mem_usage,
          "Bytes of the KV pool, the states and the LoRA cache's device level if the engine has a device; 0 "
          "on a CPU."},
      Field{
          "cpu_mem_usage", &C::cpu_mem_usage,
          "Bytes of the LoRA cache's host level, of blocks that wait to be written to the second level, and "
          "on a CPU of the KV pool, the states, the device level and the draft engine's caches."},
      Field{"pinned_mem_usage", &C::pinned_mem_usage, "Bytes of pinned memory; 0 on a CPU."},
      Field{"kv_cache_stats", &C::kv_cache_stats, "The KV cache after the step."},
      Field{"cross_kv_cache_stats", &C::cross_kv_cache_stats,
            "Cross-attention KV of encoder inputs after the step; None without an encoder."},
      Field{"state_stats", &C::state_stats,
            "States of sequences after the step; None for an engine without states."},
      Field{"static_batching_stats", &C::static_batching_stats, "Always None: batches are in flight."},
      Field{"inflight_batching_stats", &C::inflight_batching_stats, "The step's batch."},
      Field{"spec_decoding_stats", &C::spec_decoding_stats, "The step's drafts; None if it computed none."},
      Field{"lora_cache_stats", &C::lora_cache_stats, "The LoRA cache after the step; None without one."},
      Field{"speculation_stats", &C::speculation_stats, "All drafts so far."},
      Field{"weight_bytes_read", &C::weight_bytes_read,
            "Bytes of weights read from the engine file since the end of the previous step; 0 without "
            "ExecutorConfig.weight_memory."},
      Field{"begun_ahead", &C::begun_ahead,
            "True if the device began the step before the host had the tokens of the step before."}};
}

/// TensorRT-LLM's RequestStage.
enum class RequestStage : std::uint8_t {
  kQueued = 0,
  kContextInProgress = 1,
  kGenerationInProgress = 2,
  kGenerationComplete = 3,
  kEncoderInProgress = 4,
};

/// "QUEUED", "CONTEXT_IN_PROGRESS", ...
[[nodiscard]] std::string_view name_of(RequestStage stage);

/// TensorRT-LLM's RequestStats.
struct RequestStats {
  RequestId id = 0;
  RequestStage stage = RequestStage::kQueued;
  std::int32_t context_prefill_position = 0;
  std::int32_t num_generated_tokens = 0;
  double avg_num_decoded_tokens_per_iter = 0.0;
  bool scheduled = false;
  bool paused = false;
  std::int64_t alloc_total_blocks_per_request = 0;
  std::int64_t alloc_new_blocks_per_request = 0;
  std::int64_t reused_blocks_per_request = 0;
  std::int64_t missed_blocks_per_request = 0;
  double kv_cache_hit_rate_per_request = 0.0;
  std::optional<DisServingRequestStats> dis_serving_stats;

  bool operator==(const RequestStats&) const = default;
};

constexpr auto fields_of(const RequestStats* /*type*/) {
  using C = RequestStats;
  return FieldList{
      Field{"id", &C::id, "The request's id."},
      Field{"stage", &C::stage, "Stage of the request."},
      Field{"context_prefill_position", &C::context_prefill_position,
            "Number of prompt tokens with computed KV."},
      Field{"num_generated_tokens", &C::num_generated_tokens, "Generated tokens of all sequences so far."},
      Field{"avg_num_decoded_tokens_per_iter", &C::avg_num_decoded_tokens_per_iter,
            "Generated tokens divided by the steps that gave tokens: 1 after the first token, more with "
            "several sequences or accepted drafts."},
      Field{"scheduled", &C::scheduled, "True if the request was in this step."},
      Field{"paused", &C::paused, "True if a sequence of the request is preempted and waits."},
      Field{"alloc_total_blocks_per_request", &C::alloc_total_blocks_per_request,
            "Blocks that the request got so far, new and reused, including those of its encoder input."},
      Field{"alloc_new_blocks_per_request", &C::alloc_new_blocks_per_request, "New blocks so far."},
      Field{"reused_blocks_per_request", &C::reused_blocks_per_request, "Reused blocks so far."},
      Field{"missed_blocks_per_request", &C::missed_blocks_per_request,
            "Full blocks so far that the request looked for and did not find."},
      Field{"kv_cache_hit_rate_per_request", &C::kv_cache_hit_rate_per_request,
            "reused / (reused + missed)."},
      Field{"dis_serving_stats", &C::dis_serving_stats,
            "Always None: prompts are computed in this executor."}};
}

/// All requests that a step knew, including those that it ended.
struct RequestStatsPerIteration {
  std::int64_t iter = 0;
  std::vector<RequestStats> request_stats;

  bool operator==(const RequestStatsPerIteration&) const = default;
};

constexpr auto fields_of(const RequestStatsPerIteration* /*type*/) {
  using C = RequestStatsPerIteration;
  return FieldList{
      Field{"iter", &C::iter, "Number of the step."},
      Field{"request_stats", &C::request_stats, "RequestStats of each request, in the order of their ids."}};
}

/// One line of JSON with TensorRT-LLM's keys (iterLatencyMS for iter_latency_ms).
[[nodiscard]] std::string to_json_str(const IterationStats& stats);
[[nodiscard]] std::string to_json_str(const RequestStats& stats);
[[nodiscard]] std::string to_json_str(const RequestStatsPerIteration& stats);

}  // namespace adaptrt
