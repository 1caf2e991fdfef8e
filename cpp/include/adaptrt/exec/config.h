#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "adaptrt/core/error.h"
#include "adaptrt/core/fields.h"
#include "adaptrt/engine/engine.h"
#include "adaptrt/exec/decoding_config.h"
#include "adaptrt/exec/logits_post_processor.h"
#include "adaptrt/exec/unsupported.h"
#include "adaptrt/guide/guided_decoding.h"
#include "adaptrt/kv/kv_cache_config.h"
#include "adaptrt/lora/peft_cache_config.h"
#include "adaptrt/sched/scheduler_config.h"

namespace adaptrt {

/// TensorRT-LLM's ModelType.
enum class ModelType : std::uint8_t { kDecoderOnly = 0, kEncoderOnly = 1, kEncoderDecoder = 2 };

/// TensorRT-LLM's BatchingType; kStatic is refused (SchedulerConfig has a policy for it).
enum class BatchingType : std::uint8_t { kStatic = 0, kInflight = 1 };

/// TensorRT-LLM's ExtendedRuntimePerfKnobConfig; nothing in it has an effect here.
struct ExtendedRuntimePerfKnobConfig {
  bool multi_block_mode = true;
  bool enable_context_fmha_fp32_acc = false;
  bool cuda_graph_mode = false;
  std::int32_t cuda_graph_cache_size = 0;

  bool operator==(const ExtendedRuntimePerfKnobConfig&) const = default;
};

constexpr auto fields_of(const ExtendedRuntimePerfKnobConfig* /*type*/) {
  using C = ExtendedRuntimePerfKnobConfig;
  return FieldList{Field{"multi_block_mode", &C::multi_block_mode, "No effect."},
                   Field{"enable_context_fmha_fp32_acc", &C::enable_context_fmha_fp32_acc,
                         "No effect: attention is summed in float32."},
                   Field{"cuda_graph_mode", &C::cuda_graph_mode, "No effect."},
                   Field{"cuda_graph_cache_size", &C::cuda_graph_cache_size, "No effect."}};
}

/// TensorRT-LLM's ExecutorConfig with three more fields: num_threads, kernels and weight_memory.
struct ExecutorConfig {
  std::int32_t max_beam_width = 1;
  SchedulerConfig scheduler_config;
  KvCacheConfig kv_cache_config;
  bool enable_chunked_context = false;
  bool normalize_log_probs = true;
  std::int32_t iter_stats_max_iterations = 1000;
  std::int32_t request_stats_max_iterations = 0;
  BatchingType batching_type = BatchingType::kInflight;
  std::optional<std::int32_t> max_batch_size;
  std::optional<std::int32_t> max_num_tokens;
  Unsupported parallel_config;
  std::optional<PeftCacheConfig> peft_cache_config = PeftCacheConfig{};
  std::optional<LogitsPostProcessorConfig> logits_post_processor_config;
  std::optional<DecodingConfig> decoding_config;
  bool use_gpu_direct_storage = false;
  double gpu_weights_percent = 1.0;
  std::optional<std::int32_t> max_queue_size;
  ExtendedRuntimePerfKnobConfig extended_runtime_perf_knob_config;
  Unsupported debug_config;
  std::int32_t recv_poll_period_ms = 0;
  std::uint64_t max_seq_idle_microseconds = 180000000;
  Unsupported spec_dec_config;
  std::optional<GuidedDecodingConfig> guided_decoding_config;
  Unsupported additional_model_outputs;
  Unsupported cache_transceiver_config;
  bool gather_generation_logits = false;
  bool mm_embedding_offloading = false;
  bool enable_trt_overlap = false;
  Unsupported backend;
  std::optional<std::int32_t> num_threads;
  std::string kernels;
  std::optional<DraftTargetDecodingConfig> draft_target_decoding_config;
  std::optional<std::size_t> weight_memory;

  bool operator==(const ExecutorConfig&) const = default;

  /// Lists all problems of the fields themselves, including nested structs.
  [[nodiscard]] Problems validate() const;
  /// Lists the problems from validate() and those with this engine.
  [[nodiscard]] Problems validate(const EngineInfo& engine) const;
};

constexpr auto fields_of(const ExecutorConfig* /*type*/) {
  using C = ExecutorConfig;
  return FieldList{
      Field{"max_beam_width", &C::max_beam_width,
            "The largest SamplingConfig.beam_width of a request; at most the engine's."},
      Field{"scheduler_config", &C::scheduler_config, "Policy that decides which requests run, and when."},
      Field{"kv_cache_config", &C::kv_cache_config, "Size of the KV cache and reuse of prefixes."},
      Field{"enable_chunked_context", &C::enable_chunked_context,
            "Compute a prompt over several steps where one has no room for all of it."},
      Field{"normalize_log_probs", &C::normalize_log_probs,
            "Refused if False: log probabilities are always those of the whole vocabulary's softmax."},
      Field{"iter_stats_max_iterations", &C::iter_stats_max_iterations,
            "IterationStats kept for get_latest_iteration_stats(); 0: none are made."},
      Field{"request_stats_max_iterations", &C::request_stats_max_iterations,
            "RequestStatsPerIteration kept for get_latest_request_stats(); 0: none are made."},
      Field{"batching_type", &C::batching_type, "Refused unless INFLIGHT."},
      Field{"max_batch_size", &C::max_batch_size, "At most the engine's; None: the engine's."},
      Field{"max_num_tokens", &C::max_num_tokens,
            "Tokens of one step; at most the engine's; None: the engine's."},
      Field{"parallel_config", &C::parallel_config,
            "ParallelConfig for MPI, in leader or orchestrator mode; None: leader mode if MPI started the "
            "process."},
      Field{"peft_cache_config", &C::peft_cache_config,
            "Sizes of the LoRA cache; None means PeftCacheConfig()."},
      Field{"logits_post_processor_config", &C::logits_post_processor_config,
            "Functions that requests may ask for by name."},
      Field{"decoding_config", &C::decoding_config,
            "With a LookaheadDecodingConfig, tokens are drafted from the sequence's own text, and several "
            "are computed in one step. Results do not change. Modes other than Lookahead are refused."},
      Field{"use_gpu_direct_storage", &C::use_gpu_direct_storage, "No effect: weights are mapped."},
      Field{"gpu_weights_percent", &C::gpu_weights_percent,
            "Refused unless 1.0: weights are mapped as a whole."},
      Field{"max_queue_size", &C::max_queue_size,
            "Requests that may wait for their start; one more raises QueueFullError. None: no limit."},
      Field{"extended_runtime_perf_knob_config", &C::extended_runtime_perf_knob_config, "No effect."},
      Field{"debug_config", &C::debug_config, "Refused unless None."},
      Field{"recv_poll_period_ms", &C::recv_poll_period_ms,
            "No effect: the executor's thread does not poll."},
      Field{"max_seq_idle_microseconds", &C::max_seq_idle_microseconds,
            "No effect: a preempted request waits for its turn without a limit (Request.allotted_time_ms "
            "limits a request's time)."},
      Field{"spec_dec_config", &C::spec_dec_config, "Refused unless None."},
      Field{"guided_decoding_config", &C::guided_decoding_config,
            "Backend and tokenizer for guided outputs. None: LLGUIDANCE with the engine directory's "
            "tokenizer and eos_token_id, loaded for the first request with a guide."},
      Field{"additional_model_outputs", &C::additional_model_outputs, "Refused unless None."},
      Field{"cache_transceiver_config", &C::cache_transceiver_config, "Refused unless None."},
      Field{"gather_generation_logits", &C::gather_generation_logits,
            "No effect: generation logits are returned to every request that asks for them."},
      Field{"mm_embedding_offloading", &C::mm_embedding_offloading, "Refused if True: engines read text."},
      Field{"enable_trt_overlap", &C::enable_trt_overlap,
            "No effect: no step waits for the output of another step."},
      Field{"backend", &C::backend, "Refused unless None: the engine's directory says what runs it."},
      Field{"num_threads", &C::num_threads,
            "Threads of the engine; None: one for each core this process may use."},
      Field{"kernels", &C::kernels,
            "One of cpu_kernels(), so that machines with different CPUs give the same bits; empty: the best "
            "one for this CPU."},
      Field{"draft_target_decoding_config", &C::draft_target_decoding_config,
            "A small engine that drafts tokens for speculative decoding. Results do not change."},
      Field{"weight_memory", &C::weight_memory,
            "Maximum bytes of weights in memory; other weights are read from the engine file on use. Results "
            "do not change. 0: all weights are mapped. None: the value chosen when the engine was built."}};
}

}  // namespace adaptrt
