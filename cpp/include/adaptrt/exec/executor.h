#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "adaptrt/draft_engine/draft_engine.h"
#include "adaptrt/engine/engine.h"
#include "adaptrt/exec/config.h"
#include "adaptrt/exec/request.h"
#include "adaptrt/exec/response.h"
#include "adaptrt/exec/stats.h"
#include "adaptrt/guide/grammar.h"
#include "adaptrt/kv/kv_cache_events.h"
#include "adaptrt/lora/lora_cache.h"
#include "adaptrt/sched/scheduler.h"

namespace adaptrt {

/// Callback for tests: runs on the executor's thread with each new plan, and with nullptr after the step. An
/// exception from it ends the executor. `lora_cache` is nullptr for an engine without LoRA, `draft_engine`
/// without a draft engine.
using StepObserver = std::function<void(const StepPlan* plan, const Scheduler& scheduler,
                                        const LoraCache* lora_cache, const DraftEngine* draft_engine)>;

/// Behaviour of await_responses() for several requests if only some have responses at the timeout.
enum class AtTimeout : std::uint8_t { kTakeWhatIsThere, kTakeNothing };

/// Checks a configuration before its engines are made: throws the ConfigError with which Executor's
/// constructor would refuse engines of these facts. They compute on the host, with `available_memory` bytes.
/// `draft_engine`: nullptr without one.
void check_config(const ExecutorConfig& config, const EngineInfo& engine, const EngineInfo* draft_engine,
                  std::size_t available_memory);

/// Runs requests in in-flight batches on one engine, in a thread of its own. All methods are thread-safe.
/// After the executor was shut down or has died, all methods except shutdown(), is_alive(), is_shut_down()
/// and can_enqueue_requests() throw ExecutorClosedError with the reason. A forked child process has no
/// executor thread; there the executor counts as shut down.
class Executor {
 public:
  /// Time to wait; nullopt waits indefinitely.
  using Timeout = std::optional<std::chrono::nanoseconds>;

  /// `available_memory` limits the KV and LoRA caches, in bytes. `draft_engine` is the engine of
  /// config.draft_target_decoding_config; nullptr if that is not set. Throws ConfigError that lists all
  /// problems of the configuration with these engines and this memory.
  Executor(std::shared_ptr<Engine> engine, const ExecutorConfig& config, std::size_t available_memory,
           StepObserver observer = {}, std::shared_ptr<Engine> draft_engine = nullptr);
  /// Calls shutdown().
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  /// Checks the requests, compiles their guides, admits their adapters and queues them: all requests or none.
  /// Throws RequestError with all problems, QueueFullError, and the errors of LoraCache::admit. On an error,
  /// adapters that only these requests stored leave the cache again.
  std::vector<RequestId> enqueue_requests(const std::vector<Request>& requests);
  RequestId enqueue_request(const Request& request);

  /// Sets the compiler of request guides. Call it once, before the first request with a guide; a second call
  /// throws ConfigError.
  void set_grammar_compiler(std::shared_ptr<GrammarCompiler> compiler);
  /// Compiles a guide, so that later requests with the same guide are queued without delay. Throws
  /// RequestError with the reason if it cannot be compiled. A request with such a guide is still queued, and
  /// gets the error as its response.
  void check_guide(const GuidedDecodingParams& params);
  /// True if a request with the guide is queued without compiling it. The guide is then the most recently
  /// used one, so that it is kept longest.
  [[nodiscard]] bool has_compiled_guide(const GuidedDecodingParams& params);

  /// Waits for a response of any request, then returns all responses that are ready. Returns none at the
  /// timeout, or if the executor is shut down meanwhile.
  [[nodiscard]] std::vector<Response> await_responses(Timeout timeout);
  /// The same for one request. If its last response was already taken, returns a response with TensorRT-LLM's
  /// error "ReqId N has already been processed and was terminated." Throws RequestError if there was no such
  /// request.
  [[nodiscard]] std::vector<Response> await_responses(RequestId id, Timeout timeout);
  /// The same for several requests: waits until each has a response, and returns one list per id, in the
  /// order of `ids`. At the timeout, requests without a response get an empty list. Returns nullopt if the
  /// time is over and `at_timeout` is kTakeNothing. Takes no response if it throws.
  [[nodiscard]] std::optional<std::vector<std::vector<Response>>> await_responses(
      const std::vector<RequestId>& ids, Timeout timeout, AtTimeout at_timeout = AtTimeout::kTakeWhatIsThere);
  /// Returns 0 for a request whose last response was taken.
  [[nodiscard]] std::size_t get_num_responses_ready(std::optional<RequestId> id) const;

  /// Ends a request with the tokens that it has; its last response says kCancelled. No effect on a request
  /// that has ended. Throws RequestError for an unknown id.
  void cancel_request(RequestId id);

  /// Forgets the KV blocks, state snapshots and encoder inputs that later requests could reuse, before the
  /// next step. Requests that start after this call reuse only blocks that are computed after it, and blocks
  /// of the second level, which keeps its own. Running requests keep their blocks, and so their tokens.
  void reset_prefix_cache();

  /// Returns the statistics of the steps since the last call, at most the newest iter_stats_max_iterations.
  [[nodiscard]] std::vector<IterationStats> get_latest_iteration_stats();
  [[nodiscard]] std::vector<RequestStatsPerIteration> get_latest_request_stats();

  /// Returns the manager of events about reusable KV blocks (stored, removed, ...); nullptr without
  /// KvCacheConfig::event_buffer_max_size. The events of a step are available before its responses. The
  /// manager may outlive the executor.
  [[nodiscard]] std::shared_ptr<KVCacheEventManager> get_kv_cache_event_manager() const;

  /// False if the queue is full, or if the executor was shut down or has died.
  [[nodiscard]] bool can_enqueue_requests() const;
  [[nodiscard]] bool is_alive() const;
  /// True from the start of shutdown() on.
  [[nodiscard]] bool is_shut_down() const;
  void throw_if_closed() const;
  /// Waits for the running step. Unfinished requests get an error response, and the engine's threads end.
  /// Further calls have no effect.
  void shutdown();

  /// Content and control of the LoRA cache; see LoraCache. They throw AdapterError for an engine without
  /// LoRA.
  [[nodiscard]] std::vector<LoraCacheEntry> list_adapters() const;
  /// Stores an adapter in the host level before the first request asks for it.
  void put_adapter(const LoraConfig& config);
  void pin_adapter(std::uint64_t task_id);
  void unpin_adapter(std::uint64_t task_id);
  void unload_adapter(std::uint64_t task_id);
  void set_adapter_outdated(std::uint64_t task_id, bool outdated);
  [[nodiscard]] LoraCacheStats lora_cache_stats() const;
  /// The same for the LoRA cache of the draft engine. They throw AdapterError if there is none.
  void put_draft_adapter(const LoraConfig& config);
  void unload_draft_adapter(std::uint64_t task_id);

  [[nodiscard]] const EngineInfo& engine_info() const;
  /// Number of KV cache blocks, each with tokens_per_block tokens. A request that needs more is refused.
  [[nodiscard]] std::int32_t num_kv_blocks() const;

 private:
  class Impl;
  [[nodiscard]] Impl& impl() const;
  std::unique_ptr<Impl> impl_;
};

}  // namespace adaptrt
