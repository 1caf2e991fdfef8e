#include <pybind11/native_enum.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "adaptrt/core/error.h"
#include "adaptrt/exec/request.h"
#include "adaptrt/exec/response.h"
#include "adaptrt/exec/stats.h"
#include "bind_exec.h"
#include "bind_struct.h"
#include "constructors.h"
#include "decoding_casters.h"
#include "exec_casters.h"

namespace py = pybind11;

namespace adaptrt::bindings {
namespace {

void bind_result_enums(py::module_& module) {
  py::native_enum<FinishReason>(module, "FinishReason", "enum.Enum",
                                "Why a request generates no more tokens.")
      .value("NOT_FINISHED", FinishReason::kNotFinished)
      .value("END_ID", FinishReason::kEndId)
      .value("STOP_WORDS", FinishReason::kStopWords)
      .value("LENGTH", FinishReason::kLength)
      .value("TIMED_OUT", FinishReason::kTimedOut)
      .value("CANCELLED", FinishReason::kCancelled)
      .finalize();
  py::native_enum<RequestType>(module, "RequestType", "enum.Enum",
                               "Which phases of a request an executor runs.")
      .value("REQUEST_TYPE_CONTEXT_AND_GENERATION", RequestType::kContextAndGeneration)
      .value("REQUEST_TYPE_CONTEXT_ONLY", RequestType::kContextOnly)
      .value("REQUEST_TYPE_GENERATION_ONLY", RequestType::kGenerationOnly)
      .finalize();
  py::native_enum<RequestStage>(module, "RequestStage", "enum.Enum", "How far a request is.")
      .value("QUEUED", RequestStage::kQueued)
      .value("CONTEXT_IN_PROGRESS", RequestStage::kContextInProgress)
      .value("GENERATION_IN_PROGRESS", RequestStage::kGenerationInProgress)
      .value("GENERATION_COMPLETE", RequestStage::kGenerationComplete)
      .value("ENCODER_IN_PROGRESS", RequestStage::kEncoderInProgress)
      .finalize();
}

void bind_pooling(py::module_& module) {
  py::native_enum<PoolingType>(module, "PoolingType", "enum.Enum",
                               "Which hidden states of a prompt are returned, or what is made of them.")
      .value("LAST", PoolingType::kLast)
      .value("CLS", PoolingType::kCls)
      .value("MEAN", PoolingType::kMean)
      .value("ALL", PoolingType::kAll)
      .finalize();
  py::native_enum<PoolingActivation>(module, "PoolingActivation", "enum.Enum",
                                     "What is done to each output of a PoolingLayer.")
      .value("NONE", PoolingActivation::kNone)
      .value("TANH", PoolingActivation::kTanh)
      .value("RELU", PoolingActivation::kRelu)
      .value("SILU", PoolingActivation::kSilu)
      .value("GELU", PoolingActivation::kGelu)
      .value("GELU_TANH", PoolingActivation::kGeluTanh)
      .finalize();
  bind_struct<PoolingLayer, 1>(
      module, "PoolingLayer",
      "One layer of what is done to pooled hidden states: activation(x weight^T + bias), and a norm.");
  bind_struct<PoolingParams>(module, "PoolingParams",
                             "How a request is answered that ends in rows instead of tokens.");
}

Response make_failed_response(RequestId request_id, std::string error_msg,
                              std::optional<std::uint64_t> client_id) {
  if (error_msg.empty()) throw py::value_error("Response.error_msg is empty; accepted: a text, or a Result");
  return {request_id, client_id, std::move(error_msg), {}};
}

void bind_response(py::module_& module) {
  bind_struct<Result>(module, "Result", "What a request has generated.");
  py::class_<Response>(module, "Response", "A result, or the reason why there is none.")
      .def(py::init(&make_failed_response), py::arg("request_id"), py::arg("error_msg"),
           py::arg("client_id") = py::none(), "With the reason why there is no result.")
      .def(py::init([](RequestId request_id, Result result, std::optional<std::uint64_t> client_id) {
             return Response{request_id, client_id, "", std::move(result)};
           }),
           py::arg("request_id"), py::arg("result"), py::arg("client_id") = py::none())
      .def_readonly("request_id", &Response::request_id, "What enqueue_request returned.")
      .def_readonly("client_id", &Response::client_id, "The request's client_id.")
      .def("has_error", &Response::has_error, "Whether there is a reason instead of a result.")
      .def_property_readonly(
          "error_msg", [](const Response& self) { return self.error_msg; },
          "The reason; empty without an error.")
      .def_property_readonly(
          "result",
          [](const Response& self) -> const Result& {
            if (self.has_error()) {
              throw RequestError("request " + std::to_string(self.request_id) +
                                 " has no result: " + self.error_msg);
            }
            return self.result;
          },
          py::return_value_policy::reference_internal, "Raises RequestError when has_error().")
      .def("__repr__",
           [](const py::object& self) {
             const auto& response = self.cast<const Response&>();
             return "Response(request_id=" + std::to_string(response.request_id) +
                    (response.has_error()
                         ? ", error_msg=" + std::string(py::repr(py::str(response.error_msg)))
                         : ", result=" + std::string(py::repr(self.attr("result")))) +
                    ")";
           })
      .def(py::pickle(
          [](const Response& self) {
            return py::make_tuple(self.request_id, self.client_id, self.error_msg, self.result);
          },
          [](const py::tuple& state) {
            return Response{state[0].cast<RequestId>(), state[1].cast<std::optional<std::uint64_t>>(),
                            state[2].cast<std::string>(), state[3].cast<Result>()};
          }));
}

void bind_kv_cache_retention(py::module_& module) {
  bind_struct<TokenRangeRetentionConfig, 3>(
      module, "TokenRangeRetentionConfig",
      "How long the KV blocks of a range of a prompt's tokens should stay cached when nobody uses them.");
  auto config = bind_struct<KvCacheRetentionConfig>(
      module, "KvCacheRetentionConfig",
      "How long a request's KV blocks should stay cached when nobody uses them. A block takes the priority "
      "of "
      "the range that has its first token; where none has, it keeps what it has, 35 at first.");
  config.def(
      "validate", [](const KvCacheRetentionConfig& self) { return self.validate().list(); },
      "Everything that is wrong with the fields; empty when nothing is. The constructor raises ConfigError "
      "for "
      "it.");
  validate_when_made(config);
  // TensorRT-LLM's newest name, and those before it.
  config.attr("TokenRangeRetentionConfig") = module.attr("TokenRangeRetentionConfig");
  config.attr("TokenRangeRetentionPriority") = module.attr("TokenRangeRetentionConfig");
  config.def_property_readonly(
      "token_range_retention_priorities",
      [](const KvCacheRetentionConfig& self) { return self.token_range_retention_configs; },
      "The older name of token_range_retention_configs.");
}

template <class Stats>
void bind_stats(py::module_& module, const char* name, const char* doc) {
  bind_struct<Stats>(module, name, doc)
      .def(
          "to_json_str", [](const Stats& self) { return to_json_str(self); },
          "One line of JSON, with TensorRT-LLM's keys.");
}

}  // namespace

void bind_exec_types(py::module_& module) {
  bind_result_enums(module);
  bind_kv_cache_retention(module);
  bind_pooling(module);
  bind_struct<OutputConfig>(module, "OutputConfig", "What a Result has besides the tokens.");
  bind_struct<PromptTuningConfig, 1>(
      module, "PromptTuningConfig",
      "Virtual tokens of a prompt: ids of Request.input_token_ids that follow the vocabulary are rows of the "
      "table. One object for many requests spares them the work of telling its rows apart.")
      .def_static(
          "from_peft",
          [](const py::object& directory, const py::object& engine) {
            const py::object read =
                py::module_::import("adaptrt.runtime.prompt_tuning").attr("table_from_peft");
            return PromptTuningConfig{.embedding_table = read(directory, engine).cast<EmbeddingTable>(),
                                      .input_token_extra_ids = std::nullopt};
          },
          py::arg("directory"), py::arg("engine"),
          "The virtual tokens of an adapter of PEFT (PROMPT_TUNING, P_TUNING) for an engine, a LoadedEngine "
          "or "
          "a directory. A prompt has them in front as the ids vocab_size, vocab_size + 1, ... Raises "
          "AdapterError.");
  auto request = bind_struct<Request, 2, 2>(module, "Request", "A prompt, and what is wanted of it.");
  accept_old_names(request, {{"max_new_tokens", "max_tokens"}});
  request.attr("BATCHED_POST_PROCESSOR_NAME") = kBatchedPostProcessorName;
  bind_response(module);
  bind_struct<SecondLevelStats>(module, "SecondLevelStats", "The file behind the KV cache's pool.");
  bind_struct<KvCacheStats>(module, "KvCacheStats", "The KV cache.");
  bind_struct<StaticBatchingStats>(module, "StaticBatchingStats", "A step of a static batch: there is none.");
  bind_struct<DisServingRequestStats>(module, "DisServingRequestStats",
                                      "A request whose prompt another executor computed: there is none.");
  bind_struct<InflightBatchingStats>(module, "InflightBatchingStats", "The batch of a step.");
  bind_struct<SpecDecodingStats>(module, "SpecDecodingStats", "The drafts of a step.");
  bind_struct<DraftEngineStats>(module, "DraftEngineStats", "What the draft engine did, and has.");
  bind_struct<SpeculationStats>(module, "SpeculationStats", "Drafts of all steps.");
  bind_stats<IterationStats>(module, "IterationStats", "A step.");
  bind_stats<RequestStats>(module, "RequestStats", "A request after a step.");
  bind_stats<RequestStatsPerIteration>(module, "RequestStatsPerIteration", "All requests after a step.");
}

}  // namespace adaptrt::bindings
