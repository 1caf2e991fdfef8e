#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "active_request.h"
#include "adaptrt/engine/engine.h"
#include "adaptrt/exec/executor.h"
#include "adaptrt/kv/block_pool.h"
#include "adaptrt/kv/kv_cache_events.h"
#include "adaptrt/kv_file/kv_file_level.h"
#include "adaptrt/lora/lora_cache.h"
#include "adaptrt/sched/scheduler.h"
#include "draft_target.h"
#include "request_queue.h"
#include "response_board.h"
#include "statistics.h"
#include "step_builder.h"
#include "token_step.h"

namespace adaptrt {

/// What the executor's thread does: takes requests from the queue, plans and runs steps, posts responses.
/// Everything here but why_never_fits() belongs to that thread.
class StepLoop {
 public:
  /// What is referred to outlives the loop; `num_cross_kv_blocks` is 0 for an engine without an encoder,
  /// `lora_cache` is nullptr for an engine without LoRA, `draft_target` without a draft engine.
  StepLoop(Engine& engine, const ExecutorConfig& config, std::int32_t num_kv_blocks,
           std::int32_t num_cross_kv_blocks, LoraCache* lora_cache, DraftTarget* draft_target,
           RequestQueue& queue, ResponseBoard& board, Statistics& statistics, StepObserver observer);

  /// Until the queue says stop, or until something is wrong that no request is to blame for: then every
  /// request gets an error response, and queue and board are closed with the reason.
  void run();

  /// See Scheduler::why_never_fits; for any thread, the answer depends on the configuration alone.
  [[nodiscard]] std::optional<std::string> why_never_fits(std::int64_t prompt_length, std::int64_t max_tokens,
                                                          std::int32_t num_sequences, bool are_beams,
                                                          std::int64_t encoder_length) const {
    return scheduler_.why_never_fits(prompt_length, max_tokens, num_sequences, are_beams, encoder_length);
  }
  /// nullptr without KvCacheConfig::event_buffer_max_size.
  [[nodiscard]] const std::shared_ptr<KVCacheEventManager>& events() const { return events_; }
  [[nodiscard]] std::int32_t num_kv_blocks() const { return block_pool_.num_blocks(); }
  /// 0 for an engine without an encoder.
  [[nodiscard]] std::int32_t num_cross_kv_blocks() const { return num_cross_kv_blocks_; }
  [[nodiscard]] bool has_second_level() const { return block_pool_.has_second_level(); }

 private:
  /// False when it is time to stop.
  bool take_work();
  void cancel(const std::vector<RequestId>& ids);
  void end_overdue();
  void step();
  /// Returns false when the step failed, and its requests with it.
  bool run_engine();
  void deliver();
  /// With the draft engine, for the step to come.
  void draft_with_engine();
  /// What the draft engine has of a sequence that does not run any more.
  void release_drafts_of(Sequence& sequence);
  /// Of the step's sequences, for the next one; and counts what became of those that it computed.
  void make_drafts();
  /// Of the requests whose prompts this step has ended: their other sequences begin to run.
  void fork_sequences();
  /// Of the requests whose beams are all computed: beams are given up, forked, and get their next tokens.
  void advance_searches();
  void go_on_with(const ActiveBeams& beams, ActiveRequest& request);
  void count_completed(const ActiveRequest& request);
  /// Requests that wait and cannot run: no pages for their adapters, or loads that failed.
  void refuse_waiting();
  void fail_plan(const std::string& reason);
  void observe(const StepPlan* plan) const;
  /// Hands over the step's KV cache events.
  void flush_events();
  void describe_step();
  void record(Clock::time_point begin);
  [[nodiscard]] IterationStats take_iteration_stats(Clock::time_point begin);
  [[nodiscard]] std::int32_t num_paused_requests() const;

  void post(ActiveSequence& sequence, FinishReason reason);
  void send_responses();
  /// The last responses of a request whose sequences have not all ended.
  void end(ActiveRequest& request, FinishReason reason);
  /// Without effect on a request that has ended.
  void fail(ActiveRequest& request, const std::string& reason);
  /// Gives up the requests that have ended.
  void remove_ended();
  void close(const std::string& reason, ExecutorEnd end);
  /// Writes what the KV pool has to its second level.
  void keep_blocks();

  Engine& engine_;
  const bool has_device_memory_;
  const std::int32_t num_cross_kv_blocks_;
  LoraCache* lora_cache_;
  DraftTarget* draft_target_;
  RequestQueue& queue_;
  ResponseBoard& board_;
  Statistics& statistics_;
  StepObserver observer_;

  std::shared_ptr<KVCacheEventManager> events_;
  std::unique_ptr<KvFileLevel> second_level_;  // nullptr: there is none
  BlockPool block_pool_;
  std::unique_ptr<CrossBlockPool> cross_pool_;  // nullptr: the engine has no encoder
  Scheduler scheduler_;
  StepBuilder step_builder_;
  TokenStep token_step_;
  StepPlan plan_;
  std::map<RequestId, std::unique_ptr<ActiveRequest>> requests_;
  std::set<std::pair<Clock::time_point, RequestId>> deadlines_;
  /// Had their last response; given up when nothing of the step refers to them any more.
  std::vector<ActiveRequest*> ended_;
  std::int64_t iteration_ = 0;
  /// Engine::weight_placement().bytes_read after the last step that was recorded.
  std::uint64_t weight_bytes_read_ = 0;
  std::int32_t num_started_ = 0;
  /// Of the requests that the newest step started, summed.
  Clock::duration queue_latency_{};
  /// Nothing can run until a load of an adapter has ended.
  bool awaits_loads_ = false;
  /// Of the newest step, without sampling.
  Clock::duration engine_latency_{};
  /// Of making the drafts of the step after it, and with the draft engine its own.
  Clock::duration draft_latency_{};
  Clock::duration draft_engine_latency_{};
  SpeculationStats speculation_stats_;
  IterationStats iteration_stats_;
  RequestStatsPerIteration request_stats_;
  /// Sent when all that the step did is done: who has a last response finds the request's adapter given up
  /// and its step in the statistics.
  std::vector<Response> outbox_;
};

}  // namespace adaptrt
