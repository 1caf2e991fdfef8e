#include "adaptrt/exec/config.h"

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "adaptrt/cpu/kernel_choice.h"

namespace adaptrt {
namespace {

/// No machine has more cores. Without a bound, starting the threads could use all memory.
constexpr std::int32_t kMostThreads = 1024;

void require_at_least(Problems& problems, std::string_view name, std::int64_t value, std::int64_t least) {
  if (value >= least) return;
  problems.add(std::string(name) + " is " + std::to_string(value) + "; accepted: " + std::to_string(least) +
               " or more");
}

template <class Value>
void require_at_least(Problems& problems, std::string_view name, const std::optional<Value>& value,
                      std::int64_t least) {
  if (value) require_at_least(problems, name, std::int64_t{*value}, least);
}

void require_none(Problems& problems, std::string_view name, const Unsupported& field,
                  std::string_view reason) {
  if (!field.is_set()) return;
  problems.add(std::string(name) + " is given (" + field.value->type_name() + "); accepted: None, because " +
               std::string(reason));
}

void require_at_most(Problems& problems, std::string_view name, const std::optional<std::int32_t>& value,
                     std::int32_t engine_value) {
  if (!value || *value <= engine_value) return;
  problems.add(std::string(name) + " is " + std::to_string(*value) + "; the engine was built for " +
               std::to_string(engine_value) + " at most");
}

/// The list of windows is repeated over the layers, as in TensorRT-LLM.
void check_attention_windows(Problems& problems, const KvCacheConfig& config, const EngineInfo& engine) {
  const std::vector<std::int64_t> windows = config.max_attention_window.value_or(std::vector<std::int64_t>{});
  const std::vector<std::int32_t>& own = engine.attention_windows;
  for (std::size_t i = 0; i < windows.size(); ++i) {
    bool is_own = windows[i] > 0 && i < own.size();
    for (std::size_t layer = i; layer < own.size(); layer += windows.size()) {
      is_own = is_own && own[layer] == windows[i];
    }
    if (is_own || windows[i] >= engine.max_seq_len) continue;
    problems.add("kv_cache_config.max_attention_window has " + std::to_string(windows[i]) +
                 "; accepted: None, the windows that the model has, and those of the engine's max_seq_len " +
                 std::to_string(engine.max_seq_len) + " or more, because others would change results");
    return;
  }
}

/// Refuses options for stored keys and values if the engine has no KV cache.
void check_without_kv_cache(Problems& problems, const ExecutorConfig& config) {
  const KvCacheConfig& kv = config.kv_cache_config;
  const auto refuse = [&](bool is_given, const char* name, const char* accepted) {
    if (!is_given) return;
    problems.add(std::string(name) + " is given; accepted: " + accepted +
                 ", because the engine keeps no keys and values");
  };
  refuse(kv.max_tokens.has_value(), "kv_cache_config.max_tokens", "None");
  refuse(kv.max_attention_window.has_value(), "kv_cache_config.max_attention_window", "None");
  refuse(kv.free_gpu_memory_fraction.has_value(), "kv_cache_config.free_gpu_memory_fraction", "None");
  refuse(kv.has_second_level(), "kv_cache_config.host_cache_size", "None and 0");
  refuse(kv.event_buffer_max_size > 0, "kv_cache_config.event_buffer_max_size", "0");
  refuse(config.draft_target_decoding_config.has_value(), "draft_target_decoding_config", "None");
}

/// Refuses options that an engine with states cannot serve.
void check_with_states(Problems& problems, const ExecutorConfig& config) {
  const KvCacheConfig& kv = config.kv_cache_config;
  if (kv.has_second_level() && kv.max_state_snapshots == 0) {
    problems.add(
        "kv_cache_config.host_cache_size is given and max_state_snapshots is 0; accepted: None, and 1 or "
        "more, because blocks are read back only together with a snapshot");
  }
  const bool drafts = config.draft_target_decoding_config ||
                      (config.decoding_config && config.decoding_config->lookahead_decoding_config &&
                       config.decoding_config->lookahead_decoding_config->drafts());
  if (drafts && (kv.max_state_snapshots == 0 || !kv.enable_block_reuse)) {
    problems.add(std::string(kv.enable_block_reuse
                                 ? "kv_cache_config.max_state_snapshots is 0; accepted: None, and 1 "
                                   "or more"
                                 : "kv_cache_config.enable_block_reuse is False; accepted: True") +
                 ", because drafts are configured, and states are saved in a snapshot's slot before them");
  }
}

}  // namespace

Problems LogitsPostProcessorConfig::validate() const {
  Problems problems;
  if (processor_map && processor_map->contains(kBatchedPostProcessorName)) {
    problems.add(std::string("processor_map has '") + kBatchedPostProcessorName +
                 "', which asks for processor_batched; accepted: other names");
  }
  return problems;
}

Problems ExecutorConfig::validate() const {
  Problems problems;
  require_at_least(problems, "max_beam_width", max_beam_width, 1);
  problems.add_all("scheduler_config.", scheduler_config.validate(enable_chunked_context));
  problems.add_all("kv_cache_config.", kv_cache_config.validate());
  if (peft_cache_config) problems.add_all("peft_cache_config.", peft_cache_config->validate());
  if (logits_post_processor_config) {
    problems.add_all("logits_post_processor_config.", logits_post_processor_config->validate());
  }
  if (guided_decoding_config) {
    problems.add_all("guided_decoding_config.", guided_decoding_config->validate());
  }
  if (decoding_config) problems.add_all("decoding_config.", decoding_config->validate());
  if (draft_target_decoding_config) {
    problems.add_all("draft_target_decoding_config.", draft_target_decoding_config->validate());
  }
  if (!normalize_log_probs) {
    problems.add(
        "normalize_log_probs is False; accepted: True, log probabilities are those of the whole softmax");
  }
  require_at_least(problems, "iter_stats_max_iterations", iter_stats_max_iterations, 0);
  require_at_least(problems, "request_stats_max_iterations", request_stats_max_iterations, 0);
  if (batching_type != BatchingType::kInflight) {
    problems.add(
        "batching_type is STATIC; accepted: INFLIGHT (SchedulerConfig(CapacitySchedulerPolicy.STATIC_BATCH) "
        "starts no "
        "request before the batch before has ended)");
  }
  require_at_least(problems, "max_batch_size", max_batch_size, 1);
  require_at_least(problems, "max_num_tokens", max_num_tokens, 1);
  require_at_least(problems, "max_queue_size", max_queue_size, 1);
  if (num_threads && (*num_threads < 1 || *num_threads > kMostThreads)) {
    problems.add("num_threads is " + std::to_string(*num_threads) + "; accepted: 1 to " +
                 std::to_string(kMostThreads));
  }
  if (auto problem = kernels_problem(kernels); !problem.empty()) problems.add(std::move(problem));
  require_none(problems, "parallel_config", parallel_config,
               "only Executor takes one, of MPI in leader mode");
  require_none(problems, "spec_dec_config", spec_dec_config, "logits of drafts are not used");
  require_none(problems, "debug_config", debug_config, "tensors inside the engine are not kept");
  require_none(problems, "backend", backend, "the engine's directory says what runs it");
  if (mm_embedding_offloading) {
    problems.add("mm_embedding_offloading is True; accepted: False, engines read text");
  }
  require_none(problems, "additional_model_outputs", additional_model_outputs,
               "the engine has no outputs but the logits");
  require_none(problems, "cache_transceiver_config", cache_transceiver_config,
               "prompts are computed where their tokens are generated");
  require_at_least(problems, "recv_poll_period_ms", recv_poll_period_ms, 0);
  if (gpu_weights_percent != 1.0) {
    problems.add("gpu_weights_percent is " + std::to_string(gpu_weights_percent) +
                 "; accepted: 1.0, weights are mapped as a whole");
  }
  return problems;
}

Problems ExecutorConfig::validate(const EngineInfo& engine) const {
  Problems problems = validate();
  require_at_most(problems, "max_beam_width", max_beam_width, engine.max_beam_width);
  require_at_most(problems, "max_batch_size", max_batch_size, engine.max_batch_size);
  require_at_most(problems, "max_num_tokens", max_num_tokens, engine.max_num_tokens);
  if (engine.has_kv_cache) {
    check_attention_windows(problems, kv_cache_config, engine);
  } else {
    check_without_kv_cache(problems, *this);
  }
  if (engine.has_states()) {
    check_with_states(problems, *this);
  } else if (kv_cache_config.max_state_snapshots.value_or(0) > 0) {
    problems.add("kv_cache_config.max_state_snapshots is " +
                 std::to_string(*kv_cache_config.max_state_snapshots) +
                 "; accepted: None and 0, the engine keeps no states");
  }
  const std::optional<double>& cross = kv_cache_config.cross_kv_cache_fraction;
  if (cross && engine.has_encoder() != (*cross > 0.0)) {
    problems.add("kv_cache_config.cross_kv_cache_fraction is " + std::to_string(*cross) +
                 (engine.has_encoder() ? "; accepted: None, and above 0, the engine has cross attention"
                                       : "; accepted: None and 0, the engine has no cross attention"));
  }
  if (engine.has_encoder() && kv_cache_config.has_second_level()) {
    problems.add(
        "kv_cache_config.host_cache_size is given; accepted: None and 0, a decoder's KV depends on its "
        "encoder "
        "input and is not shared");
  }
  if (engine.has_encoder() && draft_target_decoding_config) {
    problems.add(
        "draft_target_decoding_config is given; accepted: None, a draft engine knows nothing of encoder "
        "inputs");
  }
  if (engine.has_kv_cache && kv_cache_config.has_second_level() && engine.kv_identity.empty()) {
    problems.add(
        "kv_cache_config.host_cache_size is " + std::to_string(*kv_cache_config.host_cache_size) +
        "; accepted: None and 0, the engine's KV blocks are on a device or not known by their weights");
  }
  if (!kernels.empty() && kernels != engine.kernels) {
    problems.add("kernels is '" + kernels + "'; the engine " +
                 (engine.kernels.empty() ? "runs on a device and takes none" : "runs " + engine.kernels));
  }
  return problems;
}

}  // namespace adaptrt
