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
#include "adaptrt/kv/block_pool.h"
#include "adaptrt/kv/kv_cache_events.h"
#include "adaptrt/lora/lora_cache.h"
#include "adaptrt/sched/scheduler.h"

namespace adaptrt {

/// For tests: called on the executor's thread with a plan that was just made, and with nullptr when the step
/// is over. What it throws, the executor dies of. `lora_cache` is nullptr for an engine without LoRA,
/// `draft_engine` without one.
using StepObserver =
    std::function<void(const StepPlan* plan, const Scheduler& scheduler, const BlockPool& block_pool,
                       const LoraCache* lora_cache, const DraftEngine* draft_engine)>;

/// What await_responses() does with several requests of which only some have responses when the time is over.
enum class AtTimeout : std::uint8_t { kTakeWhatIsThere, kTakeNothing };

/// Runs requests in in-flight batches over one engine, in a thread of its own. Every method may be called
/// from any thread; all but shutdown(), is_alive(), is_shut_down() and can_enqueue_requests() throw
/// ExecutorClosedError once the executor was shut down, or died, with the reason. A process that is forked
/// has no executor's thread: there it counts as shut down.
class Executor {
 public:
  /// How long to wait; nullopt: for ever.
  using Timeout = std::optional<std::chrono::nanoseconds>;

  /// `available_memory` is what the KV and LoRA caches may be sized by, in bytes. `draft_engine` is the one
  /// of config.draft_target_decoding_config, nullptr without. Throws ConfigError with all that is wrong with
  /// the configuration, for these engines and this memory.
  Executor(std::shared_ptr<Engine> engine, const ExecutorConfig& config, std::size_t available_memory,
           StepObserver observer = {}, std::shared_ptr<Engine> draft_engine = nullptr);
  /// As shutdown().
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  /// Checks the requests, compiles their guides, admits their adapters and queues them; all or none. Throws
  /// RequestError with all that is wrong, QueueFullError, and what LoraCache::admit throws; adapters of
  /// requests before the one that is at fault stay cached.
  std::vector<RequestId> enqueue_requests(const std::vector<Request>& requests);
  RequestId enqueue_request(const Request& request);

  /// What compiles the guides of requests; before the first request with one, and once: throws ConfigError
  /// the second time.
  void set_grammar_compiler(std::shared_ptr<GrammarCompiler> compiler);
  /// Compiles a guide, so that requests with the same one are queued without delay. Throws RequestError with
  /// the reason when it cannot be compiled; such a request is queued all the same, and that is its response.
  void check_guide(const GuidedDecodingParams& params);
  /// True if a request with the guide is queued without compiling it. The guide is then the most recently
  /// used one, so that it is kept longest.
  [[nodiscard]] bool has_compiled_guide(const GuidedDecodingParams& params);

  /// All responses that are there, of any request, as soon as there is one; empty when the time is over, or
  /// when the executor is shut down meanwhile.
  [[nodiscard]] std::vector<Response> await_responses(Timeout timeout);
  /// The same of one request. For one whose last response was taken, a response with TensorRT-LLM's error
  /// "ReqId N has already been processed and was terminated." Throws RequestError when there was no such
  /// request.
  [[nodiscard]] std::vector<Response> await_responses(RequestId id, Timeout timeout);
  /// The same of several requests, for each id in its place, as soon as there is one of each; empty for those
  /// that have none when the time is over. nullopt: the time is over and `at_timeout` left everything where
  /// it was. Nothing is taken when it throws.
  [[nodiscard]] std::optional<std::vector<std::vector<Response>>> await_responses(
      const std::vector<RequestId>& ids, Timeout timeout, AtTimeout at_timeout = AtTimeout::kTakeWhatIsThere);
  /// 0 for a request whose last response was taken.
  [[nodiscard]] std::size_t get_num_responses_ready(std::optional<RequestId> id) const;

  /// Ends a request with what it has; its last response says kCancelled. Without effect on one that has
  /// ended. Throws RequestError for an id that was never given.
  void cancel_request(RequestId id);

  /// Statistics of the steps since the last call, the newest iter_stats_max_iterations of them.
  [[nodiscard]] std::vector<IterationStats> get_latest_iteration_stats();
  [[nodiscard]] std::vector<RequestStatsPerIteration> get_latest_request_stats();

  /// What can be reused of the KV cache, and what not any more; nullptr without
  /// KvCacheConfig::event_buffer_max_size. The events of a step are there before its responses are. It may
  /// outlive the executor.
  [[nodiscard]] std::shared_ptr<KVCacheEventManager> get_kv_cache_event_manager() const;

  /// False when the queue is full, and when the executor was shut down or died.
  [[nodiscard]] bool can_enqueue_requests() const;
  [[nodiscard]] bool is_alive() const;
  /// True from the beginning of shutdown() on.
  [[nodiscard]] bool is_shut_down() const;
  void throw_if_closed() const;
  /// Waits for the step that is running; requests that have not ended get an error response. The engine's
  /// threads end. May be called again.
  void shutdown();

  /// The LoRA cache's content and control; see LoraCache. Throw AdapterError for an engine without LoRA.
  [[nodiscard]] std::vector<LoraCacheEntry> list_adapters() const;
  /// Stores an adapter on the host level before the first request asks for it.
  void put_adapter(const LoraConfig& config);
  void pin_adapter(std::uint64_t task_id);
  void unpin_adapter(std::uint64_t task_id);
  void unload_adapter(std::uint64_t task_id);
  [[nodiscard]] LoraCacheStats lora_cache_stats() const;

  [[nodiscard]] const EngineInfo& engine_info() const;
  /// Of the KV cache, each with tokens_per_block tokens; a request that needs more is refused.
  [[nodiscard]] std::int32_t num_kv_blocks() const;

 private:
  class Impl;
  [[nodiscard]] Impl& impl() const;
  std::unique_ptr<Impl> impl_;
};

}  // namespace adaptrt
