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
    "Everything that is wrong with the fields on their own; empty when nothing is.";

template <class Struct>
void def_validate(py::class_<Struct> cls) {
  cls.def("validate", [](const Struct& self) { return self.validate().list(); }, kValidateDoc);
}

void bind_config_enums(py::module_& module) {
  py::native_enum<ModelType>(module, "ModelType", "enum.Enum", "What kind of model an engine is.")
      .value("DECODER_ONLY", ModelType::kDecoderOnly)
      .value("ENCODER_ONLY", ModelType::kEncoderOnly)
      .value("ENCODER_DECODER", ModelType::kEncoderDecoder)
      .finalize();
  py::native_enum<BatchingType>(module, "BatchingType", "enum.Enum", "How requests share steps.")
      .value("STATIC", BatchingType::kStatic)
      .value("INFLIGHT", BatchingType::kInflight)
      .finalize();
  py::native_enum<CapacitySchedulerPolicy>(module, "CapacitySchedulerPolicy", "enum.Enum",
                                           "When a waiting request may start.")
      .value("MAX_UTILIZATION", CapacitySchedulerPolicy::kMaxUtilization)
      .value("GUARANTEED_NO_EVICT", CapacitySchedulerPolicy::kGuaranteedNoEvict)
      .value("STATIC_BATCH", CapacitySchedulerPolicy::kStaticBatch)
      .finalize();
  py::native_enum<ContextChunkingPolicy>(module, "ContextChunkingPolicy", "enum.Enum",
                                         "How the tokens of a step are shared out among prompts.")
      .value("FIRST_COME_FIRST_SERVED", ContextChunkingPolicy::kFirstComeFirstServed)
      .value("EQUAL_PROGRESS", ContextChunkingPolicy::kEqualProgress)
      .finalize();
}

void bind_kv_cache_config(py::module_& module) {
  using C = KvCacheConfig;
  def_validate(bind_struct<C>(
      module, "KvCacheConfig", "Size of the KV cache, and reuse of what is in it.",
      Field{"enable_block_reuse", &C::enable_block_reuse,
            "Share full blocks among requests that start with the same tokens and have the same adapter, and "
            "what decoders see of encoder inputs among those with the same input."},
      Field{"max_tokens", &C::max_tokens, "Tokens that the cache holds; None: as memory allows."},
      Field{"max_attention_window", &C::max_attention_window,
            "Without effect where each window is the model's own, or the engine's max_seq_len or more; "
            "others are "
            "refused, because they would change results."},
      Field{"sink_token_length", &C::sink_token_length, "Refused unless None or 0."},
      Field{"free_gpu_memory_fraction", &C::free_gpu_memory_fraction,
            "Of the memory that is free when the executor starts; None: 0.9."},
      Field{"host_cache_size", &C::host_cache_size,
            "Bytes of the second level, a file in host_cache_dir; None or 0: there is none."},
      Field{"onboard_blocks", &C::onboard_blocks, "Refused unless True."},
      Field{"cross_kv_cache_fraction", &C::cross_kv_cache_fraction,
            "Refused unless None or 0: engines are decoders."},
      Field{"secondary_offload_min_priority", &C::secondary_offload_min_priority,
            "Blocks of a lower retention priority do not go to the second level; None: all do."},
      Field{"event_buffer_max_size", &C::event_buffer_max_size,
            "KV cache events that are kept for get_kv_cache_event_manager(); 0: there are none."},
      Field{"enable_partial_reuse", &C::enable_partial_reuse,
            "Of a block that a request begins like and goes on differently, take what they have in common."},
      Field{"copy_on_partial_reuse", &C::copy_on_partial_reuse,
            "Copy it; False: take the block over, only where no request uses it and no block behind it is "
            "cached."},
      Field{"use_uvm", &C::use_uvm, "Refused when True: the engine allocates the KV cache itself."},
      Field{
          "host_cache_dir", &C::host_cache_dir,
          "Directory of the second level's file, which outlives the executor; one for each executor. Not in "
          "TensorRT-LLM."}));
}

void bind_scheduler_config(py::module_& module) {
  using Dynamic = DynamicBatchConfig;
  auto dynamic = bind_struct<Dynamic>(
      module, "DynamicBatchConfig",
      "Without effect here: steps take what fits into max_batch_size and max_num_tokens.",
      Field{"enable_batch_size_tuning", &Dynamic::enable_batch_size_tuning, "Without effect."},
      Field{"enable_max_num_tokens_tuning", &Dynamic::enable_max_num_tokens_tuning, "Without effect."},
      Field{"dynamic_batch_moving_average_window", &Dynamic::dynamic_batch_moving_average_window,
            "Without effect."});
  // Before enable_max_num_tokens_tuning came, the window was the second parameter.
  accept_second_as(dynamic, "dynamic_batch_moving_average_window");
  using C = SchedulerConfig;
  bind_struct<C>(
      module, "SchedulerConfig", "Which requests run, and when.",
      Field{"capacity_scheduler_policy", &C::capacity_scheduler_policy, "When a waiting request may start."},
      Field{"context_chunking_policy", &C::context_chunking_policy,
            "How prompts share the tokens of a step; None: FIRST_COME_FIRST_SERVED. EQUAL_PROGRESS needs "
            "enable_chunked_context."},
      Field{"dynamic_batch_config", &C::dynamic_batch_config, "Without effect here."},
      Field{"adapter_fairness", &C::adapter_fairness,
            "Among requests of one priority, that one starts next for whose adapter the fewest tokens were "
            "computed; False: the one that came first. Not in TensorRT-LLM."})
      .def(
          "validate",
          [](const C& self, bool enable_chunked_context) {
            return self.validate(enable_chunked_context).list();
          },
          py::arg("enable_chunked_context"),
          "Everything that is wrong with the fields, of which some need an ExecutorConfig with "
          "enable_chunked_context.");
}

void bind_sampling_config(py::module_& module) {
  using C = SamplingConfig;
  auto cls = bind_struct<C, 0, 1>(
      module, "SamplingConfig",
      "How the next token is chosen: the most probable one, unless top_k, top_p or min_p is given.",
      Field{"beam_width", &C::beam_width,
            "Sequences that a search goes on with; at most ExecutorConfig.max_beam_width. 1: there is no "
            "search."},
      Field{"top_k", &C::top_k, "Choose among so many; 0: no limit, 1: the most probable."},
      Field{"top_p", &C::top_p, "Choose among the most probable that make up this share, in (0, 1]."},
      Field{"top_p_min", &C::top_p_min, "What top_p does not decay below, in (0, 1]; None: 1e-6."},
      Field{"top_p_reset_ids", &C::top_p_reset_ids,
            "The token after which top_p is what it was at first; None and -1: none."},
      Field{"top_p_decay", &C::top_p_decay,
            "Multiplies top_p after each token but top_p_reset_ids, in (0, 1], with top_p; None: 1."},
      Field{"seed", &C::seed, "Of the draws; None: 0."},
      Field{"temperature", &C::temperature, "Divides the logits; 0: the most probable. None: 1."},
      Field{"min_tokens", &C::min_tokens,
            "end_id, and stop words of one token, are forbidden before so many were generated."},
      Field{"beam_search_diversity_rate", &C::beam_search_diversity_rate,
            "Of beams: times the number of the beam, added to a candidate's score where candidates are "
            "compared. "
            "None: 0."},
      Field{"repetition_penalty", &C::repetition_penalty, "Of tokens in prompt and output; 1: none."},
      Field{"presence_penalty", &C::presence_penalty, "Of tokens in the output, once; 0: none."},
      Field{"frequency_penalty", &C::frequency_penalty, "Of tokens in the output, each time; 0: none."},
      Field{"length_penalty", &C::length_penalty,
            "Of beams: those that have ended are ordered by score / length ** length_penalty. None: 0."},
      Field{"early_stopping", &C::early_stopping,
            "Of beams: 1 ends the search when beam_width of them have ended, 0 when the best that goes on "
            "would not "
            "be among them if it ended as it is, any other number when it cannot come to be. None: 1."},
      Field{"no_repeat_ngram_size", &C::no_repeat_ngram_size,
            "No token sequence of this length occurs twice."},
      Field{"num_return_sequences", &C::num_return_sequences, "As in Request; None: what the request says."},
      Field{"min_p", &C::min_p,
            "Choose among tokens at least so probable as a share of the most probable one."},
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
                                             "What only tunes GPUs in TensorRT-LLM; without effect here.");
  using Draft = DraftTargetDecodingConfig;
  def_validate(bind_struct<Draft>(module, "DraftTargetDecodingConfig",
                                  "A second, small engine that guesses what comes next."));
  bind_struct<ExecutorConfig>(module, "ExecutorConfig", "How an executor works.")
      .def("validate", [](const ExecutorConfig& self) { return self.validate().list(); }, kValidateDoc);
}

}  // namespace adaptrt::bindings
