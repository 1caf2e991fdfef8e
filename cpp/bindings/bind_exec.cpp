#include "bind_exec.h"

#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/exec/executor.h"
#include "bindings.h"
#include "engine_handle.h"
#include "exec_casters.h"
#include "gil_safe_object.h"
#include "waiting.h"

namespace py = pybind11;

namespace adaptrt::bindings {
namespace {

/// A method that runs with the GIL released.
template <class Return, class... Arguments>
auto releasing_gil(Return (Executor::*method)(Arguments...)) {
  return [method](Executor& self, Arguments... arguments) {
    if constexpr (std::is_void_v<Return>) {
      without_gil([&] { return ((self.*method)(arguments...), true); });
    } else {
      return without_gil([&] { return (self.*method)(arguments...); });
    }
  };
}
template <class Return, class... Arguments>
auto releasing_gil(Return (Executor::*method)(Arguments...) const) {
  return [method](const Executor& self, Arguments... arguments) {
    return without_gil([&] { return (self.*method)(arguments...); });
  };
}

std::vector<Response> await_one(Executor& self, RequestIdArgument id, const TimeoutArgument& timeout) {
  return await_interruptibly(timeout.value, [&](auto piece, bool is_last) {
    std::optional responses = self.await_responses(id.value, piece);
    if (responses->empty() && !is_last) responses.reset();
    return responses;
  });
}

std::vector<std::vector<Response>> await_each(Executor& self, const std::vector<RequestIdArgument>& ids,
                                              const TimeoutArgument& timeout) {
  std::vector<RequestId> values;
  for (const RequestIdArgument id : ids) values.push_back(id.value);
  return await_interruptibly(timeout.value, [&](auto piece, bool is_last) {
    return self.await_responses(values, piece,
                                is_last ? AtTimeout::kTakeWhatIsThere : AtTimeout::kTakeNothing);
  });
}

std::vector<Response> await_any(Executor& self, const TimeoutArgument& timeout) {
  bool has_waited = false;
  return await_interruptibly(timeout.value, [&](auto piece, bool is_last) {
    std::optional<std::vector<Response>> responses;
    try {
      responses = self.await_responses(piece);
    } catch (const ExecutorClosedError&) {
      // Between two pieces, a shutdown ends the wait as it does during one.
      if (!has_waited || !self.is_shut_down()) throw;
      responses.emplace();
    }
    has_waited = true;
    if (responses->empty() && !is_last && !self.is_shut_down()) responses.reset();
    return responses;
  });
}

/// Shuts down without the GIL, whoever drops the last reference.
struct ShutDownWithoutGil {
  void operator()(Executor* executor) const {
    const py::gil_scoped_release release;
    std::default_delete<Executor>{}(executor);
  }
};
using ExecutorHolder = std::unique_ptr<Executor, ShutDownWithoutGil>;
using ExecutorClass = py::class_<Executor, ExecutorHolder>;

/// Calls `listener` once, with the first plan that holds requests back because their adapters get no room.
StepObserver first_adapter_wait(const py::object& listener) {
  if (listener.is_none()) return {};
  return [kept = std::make_shared<GilSafeObject>(listener)](
             const StepPlan* plan, const Scheduler& /*scheduler*/, const LoraCache* /*lora_cache*/,
             const DraftEngine* /*draft_engine*/) mutable {
    if (!kept || plan == nullptr || !plan->awaits_adapter_room) return;
    const py::gil_scoped_acquire gil;
    try {
      kept->object();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("listener for adapters that wait");
    }
    kept.reset();
  };
}

ExecutorHolder make_executor(EngineHandle& engine, const ExecutorConfig& executor_config,
                             std::size_t available_memory, std::optional<EngineHandle*> draft_engine,
                             const py::object& on_adapter_wait) {
  StepObserver observer = first_adapter_wait(on_adapter_wait);
  // A copy, because another thread may change the configuration while the GIL is released.
  return without_gil([&, config = executor_config] {
    EngineHandle::Claim claim(engine);
    std::optional<EngineHandle::Claim> draft_claim;
    if (draft_engine) draft_claim.emplace(**draft_engine);
    auto executor = std::make_unique<Executor>(engine.engine(), config, available_memory, std::move(observer),
                                               draft_engine ? (*draft_engine)->engine() : nullptr);
    claim.keep();
    if (draft_claim) draft_claim->keep();
    return ExecutorHolder(executor.release());
  });
}

void def_requests(ExecutorClass& cls) {
  cls.def(
         "enqueue_request",
         // A copy, because another thread may change the request while the GIL is released.
         [](Executor& self, const Request& given) {
           return without_gil([&self, request = given] { return self.enqueue_request(request); });
         },
         py::arg("request"),
         "Queues a request and returns its id. Raises RequestError with everything that is wrong with it, "
         "QueueFullError or AdapterError; then nothing is queued.")
      .def("enqueue_requests", releasing_gil(&Executor::enqueue_requests), py::arg("requests"),
           "Queues all requests, or none if one is refused. A request may use an adapter that an earlier "
           "request of the list brings.")
      .def("await_responses", &await_one, py::arg("id"), py::arg("timeout") = TimeoutArgument{},
           "Waits until the request has a response, and returns all it has; [] after the timeout (timedelta "
           "or seconds). If the request's last response was already taken, returns one response whose "
           "error_msg is 'ReqId N has already been processed and was terminated.' Raises RequestError for an "
           "unknown id.")
      .def("await_responses", &await_each, py::arg("ids"), py::arg("timeout") = TimeoutArgument{},
           "Waits until each of the requests has a response, and returns a list for each; after the timeout, "
           "[] for those without one. If it raises, no response is lost.")
      .def("await_responses", &await_any, py::arg("timeout") = TimeoutArgument{},
           "Waits until any request has a response, and returns the responses of all requests; [] after the "
           "timeout, or if the executor is shut down meanwhile.")
      .def(
          "get_num_responses_ready",
          [](const Executor& self, std::optional<RequestIdArgument> id) {
            return self.get_num_responses_ready(id ? std::optional(id->value) : std::nullopt);
          },
          py::arg("id") = py::none(),
          "Number of responses that can be taken without waiting, for one request or for all; 0 for a "
          "request that has ended.")
      .def(
          "cancel_request", [](Executor& self, RequestIdArgument id) { self.cancel_request(id.value); },
          py::arg("id"),
          "Ends a request with the tokens that it has (FinishReason.CANCELLED). No effect if it has ended.")
      .def("set_grammar_compiler", releasing_gil(&Executor::set_grammar_compiler), py::arg("compiler"),
           "Sets the compiler for the requests' guides. Call it once, before the first request with a guide. "
           "Raises ConfigError.")
      .def("check_guide", releasing_gil(&Executor::check_guide), py::arg("guided_decoding_params"),
           "Compiles a guide, so that requests with the same guide are queued without delay. Raises "
           "RequestError with the reason if it cannot be compiled.")
      .def("has_compiled_guide", releasing_gil(&Executor::has_compiled_guide),
           py::arg("guided_decoding_params"),
           "True if the guide is already compiled. The guide then counts as just used, and is kept longest.")
      .def("can_enqueue_requests", &Executor::can_enqueue_requests,
           "False if the queue is full, and after shutdown.");
}

void def_adapters(ExecutorClass& cls) {
  cls.def("list_adapters", releasing_gil(&Executor::list_adapters),
          "Returns a LoraCacheEntry for each adapter in the cache.")
      .def("put_adapter", releasing_gil(&Executor::put_adapter), py::arg("lora_config"),
           "Stores an adapter on the host level before the first request for it.")
      .def("pin_adapter", releasing_gil(&Executor::pin_adapter), py::arg("task_id"),
           "Loads an adapter to the device level and keeps it there.")
      .def("unpin_adapter", releasing_gil(&Executor::unpin_adapter), py::arg("task_id"),
           "Undoes pin_adapter.")
      .def("unload_adapter", releasing_gil(&Executor::unload_adapter), py::arg("task_id"),
           "Removes an adapter from the cache. Requests that use it continue.")
      .def("set_adapter_outdated", releasing_gil(&Executor::set_adapter_outdated), py::arg("task_id"),
           py::arg("outdated"),
           "Marks an adapter that was replaced by another one, or undoes that. Outdated adapters leave the "
           "cache before others. No effect if the adapter is not cached.")
      .def("put_draft_adapter", releasing_gil(&Executor::put_draft_adapter), py::arg("lora_config"),
           "Stores an adapter of the draft engine on the host level before the first request for it.")
      .def("unload_draft_adapter", releasing_gil(&Executor::unload_draft_adapter), py::arg("task_id"),
           "Removes an adapter of the draft engine from its cache. Requests that use it continue.")
      .def("lora_cache_stats", releasing_gil(&Executor::lora_cache_stats),
           "The LoRA cache's counters and sizes.");
}

}  // namespace

void bind_executor(py::module_& module) {
  ExecutorClass cls(
      module, "Executor",
      "Runs requests on one engine with in-flight batching, in its own thread. All methods may be called "
      "from any thread. After shutdown, or after a fatal error, they raise ExecutorClosedError with the "
      "reason. Responses are kept until they are awaited. A forked process does not have the executor's "
      "thread; there the executor counts as shut down.");
  cls.def(
      py::init(&make_executor), py::arg("engine"), py::arg("executor_config"), py::arg("available_memory"),
      py::arg("draft_engine") = py::none(), py::arg("on_adapter_wait") = py::none(),
      "available_memory: bytes from which the sizes of the KV and LoRA caches follow. draft_engine: the "
      "engine of executor_config.draft_target_decoding_config. on_adapter_wait: called once, when requests "
      "wait for room for their adapters for the first time. Raises ConfigError.");
  def_requests(cls);
  def_adapters(cls);
  cls.def(
      "reset_prefix_cache", &Executor::reset_prefix_cache,
      "Forgets the KV blocks, state snapshots and encoder inputs that later requests could reuse. Requests "
      "that start after this call reuse only blocks computed after it, and blocks of the second level. "
      "Running requests continue unchanged.");
  cls.def("get_latest_iteration_stats", &Executor::get_latest_iteration_stats,
          "Returns the IterationStats of the steps since the last call.")
      .def("get_latest_request_stats", &Executor::get_latest_request_stats,
           "Returns the RequestStatsPerIteration of the steps since the last call.")
      .def(
          "get_kv_cache_event_manager",
          [](const Executor& self) {
            std::optional manager = self.get_kv_cache_event_manager();
            if (!*manager) manager.reset();
            return manager;
          },
          "Returns the manager of events that say which KV blocks can be reused; None without "
          "KvCacheConfig.event_buffer_max_size.")
      .def(
          "get_latest_debug_tensors",
          [](const Executor& self) {
            self.throw_if_closed();
            return py::list();
          },
          "Always []: tensors inside the engine are not kept, and ExecutorConfig.debug_config is refused.")
      .def_property_readonly(
          "engine_info", [](const Executor& self) { return self.engine_info(); },
          "The EngineInfo of the executor's engine.")
      .def_property_readonly("num_kv_blocks", &Executor::num_kv_blocks,
                             "Number of KV cache blocks, each for engine_info.tokens_per_block tokens. A "
                             "request that needs more is refused.")
      .def_property_readonly("is_alive", &Executor::is_alive, "False after shutdown or after a fatal error.")
      .def("shutdown", releasing_gil(&Executor::shutdown),
           "Waits for the running step and ends the executor. Requests that have not ended get an error "
           "response. May be called again.")
      .def("__enter__", [](const py::object& self) { return self; })
      .def(
          "__exit__",
          [](Executor& self, const py::args& /*exception*/) { releasing_gil (&Executor::shutdown)(self); },
          "Calls shutdown().");
}

void bind_exec(py::module_& module) {
  bind_guide(module);
  bind_exec_config(module);
  bind_exec_types(module);
  bind_kv_cache_events(module);
  bind_executor(module);
  module.def(
      "check_executor_config",
      [](const ExecutorConfig& config, const EngineInfo& engine, std::size_t available_memory,
         std::optional<const EngineInfo*> draft_engine) {
        check_config(config, engine, draft_engine.value_or(nullptr), available_memory);
      },
      py::arg("executor_config"), py::arg("engine"), py::arg("available_memory"),
      py::arg("draft_engine") = py::none(),
      "Raises the ConfigError with which Executor would refuse the configuration with engines of these "
      "facts, "
      "which "
      "need not exist yet. They run on the CPU, with `available_memory` bytes for the caches.");
}

}  // namespace adaptrt::bindings
