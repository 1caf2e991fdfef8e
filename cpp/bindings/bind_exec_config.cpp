#include <pybind11/native_enum.h>

#include "adaptrt/exec/config.h"
#include "adaptrt/sample/sampling_config.h"
#include "bind_exec.h"
#include "bind_struct.h"
#include "constructors.h"
#include "decoding_casters.h"
#include "exec_casters.h"

namespace py = pybind11;

namespace adaptrt::bindings {
namespace {

constexpr const char* kValidateDoc =
    "Returns every problem of the fields, without the engine's limits; [] if there is none.";

template <class Struct>
void def_validate(py::class_<Struct> cls) {
  cls.def("validate", [](const Struct& self) { return self.validate().list(); }, kValidateDoc);
}

void bind_config_enums(py::module_& module) {
  py::native_enum<ModelType>(module, "ModelType", "enum.Enum", "Kind of a model.")
      .value("DECODER_ONLY", ModelType::kDecoderOnly)
      .value("ENCODER_ONLY", ModelType::kEncoderOnly)
      .value("ENCODER_DECODER", ModelType::kEncoderDecoder)
      .finalize();
  py::native_enum<BatchingType>(module, "BatchingType", "enum.Enum", "Policy by which requests share steps.")
      .value("STATIC", BatchingType::kStatic)
      .value("INFLIGHT", BatchingType::kInflight)
      .finalize();
  py::native_enum<CapacitySchedulerPolicy>(module, "CapacitySchedulerPolicy", "enum.Enum",
                                           "Policy for the start of waiting requests.")
      .value("MAX_UTILIZATION", CapacitySchedulerPolicy::kMaxUtilization)
      .value("GUARANTEED_NO_EVICT", CapacitySchedulerPolicy::kGuaranteedNoEvict)
      .value("STATIC_BATCH", CapacitySchedulerPolicy::kStaticBatch)
      .finalize();
  py::native_enum<ContextChunkingPolicy>(module, "ContextChunkingPolicy", "enum.Enum",
                                         "Policy by which prompts share the tokens of a step.")
      .value("FIRST_COME_FIRST_SERVED", ContextChunkingPolicy::kFirstComeFirstServed)
      .value("EQUAL_PROGRESS", ContextChunkingPolicy::kEqualProgress)
      .finalize();
}

void bind_kv_cache_config(py::module_& module) {
  using C = KvCacheConfig;
  def_validate(bind_struct<C>(
      module, "KvCacheConfig", "Size of the KV cache, and reuse of its blocks.",
      Field{"enable_block_reuse", &C::enable_block_reuse,
            "Share full blocks among requests with the same adapter that start with the same tokens, and an "
            "encoder's keys and values among requests with the same encoder input."},
      Field{"max_tokens", &C::max_tokens, "Number of tokens in the cache; None: as many as memory allows."},
      Field{"max_attention_window", &C::max_attention_window,
            "No effect if each window is the model's own, or at least the engine's max_seq_len. Other "
            "windows are refused, because they would change results."},
      Field{"sink_token_length", &C::sink_token_length, "Refused unless None or 0."},
      Field{"free_gpu_memory_fraction", &C::free_gpu_memory_fraction,
            "Fraction of the memory that is free when the executor starts; None: 0.9."},
      Field{"host_cache_size", &C::host_cache_size,
            "Bytes of the second level, a file in host_cache_dir; None or 0: no second level."},
      Field{"onboard_blocks", &C::onboard_blocks, "Refused unless True."},
      Field{"cross_kv_cache_fraction", &C::cross_kv_cache_fraction, "Refused unless None or 0."},
      Field{"secondary_offload_min_priority", &C::secondary_offload_min_priority,
            "Blocks of a lower retention priority are not written to the second level; None: all are."},
      Field{"event_buffer_max_size", &C::event_buffer_max_size,
            "Number of KV cache events kept for get_kv_cache_event_manager(); 0: none are made."},
      Field{"enable_partial_reuse", &C::enable_partial_reuse,
            "Reuse the first tokens of a block if a request begins like it and then differs."},
      Field{"copy_on_partial_reuse", &C::copy_on_partial_reuse,
            "Copy such a block. False: use the block itself, if no request uses it and no later block of its "
            "sequence is cached."},
      Field{"use_uvm", &C::use_uvm, "Refused if True: the engine allocates the KV cache itself."},
      Field{"host_cache_dir", &C::host_cache_dir,
            "Directory of the second level's file, which stays after the executor ends. Each executor needs "
            "its own. Not in TensorRT-LLM."},
      Field{"max_state_snapshots", &C::max_state_snapshots,
            "Largest number of snapshots of states, for models that keep states: later requests reuse blocks "
            "only together with one. None: two for each sequence of a batch, but at most a quarter of the "
            "cache's memory. Not in TensorRT-LLM."}));
}

void bind_scheduler_config(py::module_& module) {
  using Dynamic = DynamicBatchConfig;
  auto dynamic = bind_struct<Dynamic>(
      module, "DynamicBatchConfig", "No effect: steps take what fits into max_batch_size and max_num_tokens.",
      Field{"enable_batch_size_tuning", &Dynamic::enable_batch_size_tuning, "No effect."},
      Field{"enable_max_num_tokens_tuning", &Dynamic::enable_max_num_tokens_tuning, "No effect."},
      Field{"dynamic_batch_moving_average_window", &Dynamic::dynamic_batch_moving_average_window,
            "No effect."});
  // Before enable_max_num_tokens_tuning came, the window was the second parameter.
  accept_second_as(dynamic, "dynamic_batch_moving_average_window");
  using C = SchedulerConfig;
  bind_struct<C>(module, "SchedulerConfig", "Policy that decides which requests run, and when.",
                 Field{"capacity_scheduler_policy", &C::capacity_scheduler_policy,
                       "Policy for the start of waiting requests."},
                 Field{"context_chunking_policy", &C::context_chunking_policy,
                       "Policy by which prompts share the tokens of a step; None: FIRST_COME_FIRST_SERVED. "
                       "EQUAL_PROGRESS needs enable_chunked_context."},
                 Field{"dynamic_batch_config", &C::dynamic_batch_config, "No effect."},
                 Field{"adapter_fairness", &C::adapter_fairness,
                       "Among requests of one priority, start the one whose adapter has had the fewest "
                       "tokens. False: start the oldest. Not in TensorRT-LLM."})
      .def(
          "validate",
          [](const C& self, bool enable_chunked_context) {
            return self.validate(enable_chunked_context).list();
          },
          py::arg("enable_chunked_context"),
          "Returns every problem of the fields. Some values need ExecutorConfig.enable_chunked_context.");
}

void bind_sampling_config(py::module_& module) {
  using C = SamplingConfig;
  auto cls = bind_struct<C, 0, 1>(
      module, "SamplingConfig",
      "Choice of the next token: the most probable one, unless top_k, top_p or min_p is given.",
      Field{"beam_width", &C::beam_width,
            "Number of beams, at most ExecutorConfig.max_beam_width; 1: no beam search."},
      Field{"top_k", &C::top_k,
            "Choose among this many most probable tokens; 0: no limit, 1: the most probable token."},
      Field{"top_p", &C::top_p,
            "Choose among the most probable tokens whose probabilities add up to this, in (0, 1]."},
      Field{"top_p_min", &C::top_p_min, "Lower limit of a decaying top_p, in (0, 1]; None: 1e-6."},
      Field{"top_p_reset_ids", &C::top_p_reset_ids, "Token that resets a decaying top_p; None or -1: none."},
      Field{"top_p_decay", &C::top_p_decay,
            "Factor of top_p after each token except top_p_reset_ids, in (0, 1]; needs top_p. None: 1."},
      Field{"seed", &C::seed, "Seed of the random numbers; None: 0."},
      Field{"temperature", &C::temperature, "Divides the logits; 0: the most probable token. None: 1."},
      Field{"min_tokens", &C::min_tokens,
            "end_id and stop words of one token are forbidden until this many tokens were generated."},
      Field{"beam_search_diversity_rate", &C::beam_search_diversity_rate,
            "Beam search: this value times the beam's number is added to a candidate's score when candidates "
            "are compared. None: 0."},
      Field{"repetition_penalty", &C::repetition_penalty,
            "Penalty for tokens of the prompt and the output; 1: none."},
      Field{"presence_penalty", &C::presence_penalty,
            "Penalty for tokens of the output, applied once; 0: none."},
      Field{"frequency_penalty", &C::frequency_penalty,
            "Penalty for tokens of the output, applied for each occurrence; 0: none."},
      Field{"length_penalty", &C::length_penalty,
            "Beam search: finished beams are ordered by score / length ** length_penalty. None: 0."},
      Field{"early_stopping", &C::early_stopping,
            "Beam search: 1 stops when beam_width beams have finished. 0 stops when the best running beam, "
            "with its present score, would not be among them. Any other number stops when no running beam "
            "can still get among them. None: 1."},
      Field{"no_repeat_ngram_size", &C::no_repeat_ngram_size,
            "Size of token sequences that may not occur twice."},
      Field{"num_return_sequences", &C::num_return_sequences,
            "The same as Request.num_return_sequences; None: the request's value."},
      Field{"min_p", &C::min_p,
            "Choose among tokens whose probability is at least this fraction of the most probable token's."},
      Field{"beam_width_array", &C::beam_width_array, "Refused unless None."});
  accept_old_names(cls, {{"random_seed", "seed"}, {"min_length", "min_tokens"}});
  def_validate(cls);
}

}  // namespace

void bind_exec_config(py::module_& module) {
  bind_config_enums(module);
  bind_kv_cache_config(module);
  bind_scheduler_config(module);
  bind_sampling_config(module);
  bind_struct<LogitsPostProcessorConfig>(module, "LogitsPostProcessorConfig",
                                         "Functions that change logits before tokens are chosen from them.")
      .def(
          "validate", [](const LogitsPostProcessorConfig& self) { return self.validate().list(); },
          kValidateDoc);
  bind_struct<ExtendedRuntimePerfKnobConfig>(module, "ExtendedRuntimePerfKnobConfig",
                                             "Options that tune GPUs in TensorRT-LLM; no effect.");
  using Draft = DraftTargetDecodingConfig;
  def_validate(
      bind_struct<Draft>(module, "DraftTargetDecodingConfig", "A second, small engine that drafts tokens."));
  bind_struct<ExecutorConfig>(module, "ExecutorConfig", "Options of an executor.")
      .def("validate", [](const ExecutorConfig& self) { return self.validate().list(); }, kValidateDoc);
}

}  // namespace adaptrt::bindings
