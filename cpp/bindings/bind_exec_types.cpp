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
                                "Reason why a request stopped generating tokens.")
      .value("NOT_FINISHED", FinishReason::kNotFinished)
      .value("END_ID", FinishReason::kEndId)
      .value("STOP_WORDS", FinishReason::kStopWords)
      .value("LENGTH", FinishReason::kLength)
      .value("TIMED_OUT", FinishReason::kTimedOut)
      .value("CANCELLED", FinishReason::kCancelled)
      .finalize();
  py::native_enum<RequestType>(module, "RequestType", "enum.Enum",
                               "Phases of a request that an executor runs.")
      .value("REQUEST_TYPE_CONTEXT_AND_GENERATION", RequestType::kContextAndGeneration)
      .value("REQUEST_TYPE_CONTEXT_ONLY", RequestType::kContextOnly)
      .value("REQUEST_TYPE_GENERATION_ONLY", RequestType::kGenerationOnly)
      .finalize();
  py::native_enum<RequestStage>(module, "RequestStage", "enum.Enum", "Progress of a request.")
      .value("QUEUED", RequestStage::kQueued)
      .value("CONTEXT_IN_PROGRESS", RequestStage::kContextInProgress)
      .value("GENERATION_IN_PROGRESS", RequestStage::kGenerationInProgress)
      .value("GENERATION_COMPLETE", RequestStage::kGenerationComplete)
      .value("ENCODER_IN_PROGRESS", RequestStage::kEncoderInProgress)
      .finalize();
}

void bind_pooling(py::module_& module) {
  py::native_enum<PoolingType>(module, "PoolingType", "enum.Enum",
                               "Hidden states of a prompt that are returned, or their reduction to one row.")
      .value("LAST", PoolingType::kLast)
      .value("CLS", PoolingType::kCls)
      .value("MEAN", PoolingType::kMean)
      .value("ALL", PoolingType::kAll)
      .finalize();
  py::native_enum<PoolingActivation>(module, "PoolingActivation", "enum.Enum",
                                     "Activation of a PoolingLayer.")
      .value("NONE", PoolingActivation::kNone)
      .value("TANH", PoolingActivation::kTanh)
      .value("RELU", PoolingActivation::kRelu)
      .value("SILU", PoolingActivation::kSilu)
      .value("GELU", PoolingActivation::kGelu)
      .value("GELU_TANH", PoolingActivation::kGeluTanh)
      .finalize();
  bind_struct<PoolingLayer, 1>(
      module, "PoolingLayer",
      "A layer applied to pooled hidden states: activation(x weight^T + bias), and a norm.");
  bind_struct<PoolingParams>(module, "PoolingParams",
                             "Options of a request whose result is rows of numbers instead of tokens.");
}

Response make_failed_response(RequestId request_id, std::string error_msg,
                              std::optional<std::uint64_t> client_id) {
  if (error_msg.empty()) throw py::value_error("Response.error_msg is empty; accepted: a text, or a Result");
  return {request_id, client_id, std::move(error_msg), {}};
}

void bind_response(py::module_& module) {
  bind_struct<TimingMetrics>(module, "TimingMetrics", "Times of a request. 0: the moment has not come.");
  bind_struct<KvCacheMetrics>(module, "KvCacheMetrics", "KV cache blocks of a request.");
  bind_struct<SpeculativeDecodingMetrics>(module, "SpeculativeDecodingMetrics", "Drafts of a request.");
  bind_struct<RequestPerfMetrics>(module, "RequestPerfMetrics", "Times, memory and drafts of a request.");
  bind_struct<Result>(module, "Result", "Output of a request.");
  py::class_<Response>(module, "Response", "A result or an error.")
      .def(py::init(&make_failed_response), py::arg("request_id"), py::arg("error_msg"),
           py::arg("client_id") = py::none(), "Makes a response with an error instead of a result.")
      .def(py::init([](RequestId request_id, Result result, std::optional<std::uint64_t> client_id) {
             return Response{request_id, client_id, "", std::move(result)};
           }),
           py::arg("request_id"), py::arg("result"), py::arg("client_id") = py::none())
      .def_readonly("request_id", &Response::request_id, "The id that enqueue_request returned.")
      .def_readonly("client_id", &Response::client_id, "The request's client_id.")
      .def("has_error", &Response::has_error, "True if the response has an error instead of a result.")
      .def_property_readonly(
          "error_msg", [](const Response& self) { return self.error_msg; }, "The error; empty without one.")
      .def_property_readonly(
          "result",
          [](const Response& self) -> const Result& {
            if (self.has_error()) {
              throw RequestError("request " + std::to_string(self.request_id) +
                                 " has no result: " + self.error_msg);
            }
            return self.result;
          },
          py::return_value_policy::reference_internal, "The result. Raises RequestError if has_error().")
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
      "Retention of the unused KV blocks of a range of a prompt's tokens.");
  auto config = bind_struct<KvCacheRetentionConfig>(
      module, "KvCacheRetentionConfig",
      "Retention of a request's unused KV blocks. A block gets the priority of the range that contains its "
      "first token. Without such a range it keeps its priority, which is 35 at first.");
  config.def(
      "validate", [](const KvCacheRetentionConfig& self) { return self.validate().list(); },
      "Returns every problem of the fields; [] if there is none. The constructor raises ConfigError for "
      "them.");
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
          "Returns one line of JSON with TensorRT-LLM's keys.");
}

}  // namespace

void bind_exec_types(py::module_& module) {
  bind_result_enums(module);
  bind_kv_cache_retention(module);
  bind_pooling(module);
  bind_struct<OutputConfig>(module, "OutputConfig", "Outputs in addition to the tokens.");
  bind_struct<PromptTuningConfig, 1>(
      module, "PromptTuningConfig",
      "Virtual tokens of a prompt: ids of Request.input_token_ids beyond the vocabulary are rows of the "
      "table. Use one object for many requests: its rows are compared only once.")
      .def_static(
          "from_peft",
          [](const py::object& directory, const py::object& engine) {
            const py::object read =
                py::module_::import("adaptrt.runtime.prompt_tuning").attr("table_from_peft");
            return PromptTuningConfig{.embedding_table = read(directory, engine).cast<EmbeddingTable>(),
                                      .input_token_extra_ids = std::nullopt};
          },
          py::arg("directory"), py::arg("engine"),
          "Reads the virtual tokens of a PEFT adapter (PROMPT_TUNING, P_TUNING) for an engine: a "
          "LoadedEngine or a directory. A prompt starts with them, as the ids vocab_size, vocab_size + 1, "
          "... Raises AdapterError.");
  auto request = bind_struct<Request, 2, 2>(module, "Request", "A prompt and the wanted output.");
  accept_old_names(request, {{"max_new_tokens", "max_tokens"}});
  request.attr("BATCHED_POST_PROCESSOR_NAME") = kBatchedPostProcessorName;
  bind_response(module);
  bind_struct<SecondLevelStats>(module, "SecondLevelStats", "Second level of the KV cache: a file.");
  bind_struct<KvCacheStats>(module, "KvCacheStats", "The KV cache.");
  bind_struct<StatePoolStats>(module, "StatePoolStats",
                              "States that sequences keep, of recurrent layers for example, and snapshots of "
                              "them.");
  bind_struct<StaticBatchingStats>(module, "StaticBatchingStats", "Steps of a static batch. Always absent.");
  bind_struct<DisServingRequestStats>(module, "DisServingRequestStats",
                                      "A request whose prompt another executor computed. Always absent.");
  bind_struct<InflightBatchingStats>(module, "InflightBatchingStats", "The batch of a step.");
  bind_struct<SpecDecodingStats>(module, "SpecDecodingStats", "The drafts of a step.");
  bind_struct<DraftEngineStats>(module, "DraftEngineStats", "Counters and sizes of the draft engine.");
  bind_struct<SpeculationStats>(module, "SpeculationStats", "Drafts of all steps.");
  bind_stats<IterationStats>(module, "IterationStats", "A step.");
  bind_stats<RequestStats>(module, "RequestStats", "A request after a step.");
  bind_stats<RequestStatsPerIteration>(module, "RequestStatsPerIteration", "All requests after a step.");
}

}  // namespace adaptrt::bindings
