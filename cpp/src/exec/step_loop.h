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
#include "adaptrt/kv/kv_cache_config.h"
#include "adaptrt/kv/kv_cache_events.h"
#include "adaptrt/kv/sequence_memory.h"
#include "adaptrt/kv_file/kv_file_level.h"
#include "adaptrt/lora/lora_cache.h"
#include "adaptrt/sched/scheduler.h"
#include "draft_target.h"
#include "look_ahead.h"
#include "request_queue.h"
#include "response_board.h"
#include "statistics.h"
#include "step_builder.h"
#include "token_step.h"

namespace adaptrt {

/// The loop of the executor's thread: takes requests from the queue, plans and runs steps, posts responses.
/// Everything except check_capacity() belongs to that thread.
class StepLoop {
 public:
  /// All arguments outlive the loop. `num_cross_kv_blocks` is 0 for an engine without an encoder,
  /// `state_slots` are zeros for an engine without states, `lora_cache` is nullptr for an engine without
  /// LoRA, and `draft_target` is nullptr without a draft engine.
  StepLoop(Engine& engine, const ExecutorConfig& config, std::int32_t num_kv_blocks,
           std::int32_t num_cross_kv_blocks, StateSlots state_slots, LoraCache* lora_cache,
           DraftTarget* draft_target, RequestQueue& queue, ResponseBoard& board, Statistics& statistics,
           StepObserver observer);

  /// Runs until the queue says stop, or until an error that no single request caused. After an error every
  /// request gets an error response, and the queue and the board are closed with the reason.
  void run();

  /// See Scheduler::check_capacity. Thread-safe: the answer depends only on the configuration.
  [[nodiscard]] std::optional<std::string> check_capacity(std::int64_t prompt_length, std::int64_t max_tokens,
                                                          std::int32_t num_sequences, bool are_beams,
                                                          std::int64_t encoder_length) const {
    return scheduler_.check_capacity(prompt_length, max_tokens, num_sequences, are_beams, encoder_length);
  }
  /// Maximum number of tokens in a step.
  [[nodiscard]] std::int32_t max_num_tokens() const { return scheduler_.limits().max_num_tokens; }
  /// nullptr without KvCacheConfig::event_buffer_max_size.
  [[nodiscard]] const std::shared_ptr<KVCacheEventManager>& events() const { return events_; }
  [[nodiscard]] std::int32_t num_kv_blocks() const { return memory_.num_blocks(); }
  /// 0 for an engine without an encoder.
  [[nodiscard]] std::int32_t num_cross_kv_blocks() const {
    return memory_.has_encoder() ? memory_.cross_pool()->num_blocks() : 0;
  }
  /// Number of slots for states, including those of snapshots; 0 for an engine without states.
  [[nodiscard]] std::int32_t num_state_slots() const {
    return memory_.has_states()
               ? memory_.state_pool()->num_sequences() + memory_.state_pool()->num_snapshots()
               : 0;
  }
  [[nodiscard]] bool has_second_level() const { return memory_.has_second_level(); }

 private:
  /// Returns false when it is time to stop.
  bool take_work();
  void reset_prefix_cache();
  void cancel(const std::vector<RequestId>& ids);
  void end_overdue();
  void step();
  /// Runs the step of plan_, which the engine may have begun ahead. Returns false if the step, and so its
  /// requests, failed.
  bool run_engine(bool is_begun);
  /// Records the time of the step's tokens in their requests.
  void note_tokens();
  void deliver();
  /// Makes the draft engine's drafts for the next step.
  void draft_with_engine();
  /// Releases the draft engine's blocks of a sequence that no longer runs.
  void release_drafts_of(Sequence& sequence);
  /// Makes the next drafts of the step's sequences, and counts the outcome of the computed ones.
  void make_drafts();
  /// Starts the other sequences of requests whose prompts ended in this step.
  void fork_sequences();
  /// Advances the searches whose beams are all computed: beams are dropped, forked, and get their next
  /// tokens.
  void advance_searches();
  void go_on_with(const ActiveBeams& beams, ActiveRequest& request);
  void count_completed(const ActiveRequest& request);
  /// Refuses waiting requests that cannot run: there are no pages for their adapters, or the loads failed.
  void refuse_waiting();
  void fail_plan(const std::string& reason);
  void observe(const StepPlan* plan) const;
  /// Publishes the step's KV cache events.
  void flush_events();
  void describe_step();
  void record(Clock::time_point begin);
  [[nodiscard]] IterationStats take_iteration_stats(Clock::time_point begin);
  [[nodiscard]] std::int32_t num_paused_requests() const;

  void post(ActiveSequence& sequence, FinishReason reason);
  void send_responses();
  /// Sends the last responses of a request with sequences that have not ended.
  void end(ActiveRequest& request, FinishReason reason);
  /// No effect on a request that has ended.
  void fail(ActiveRequest& request, const std::string& reason);
  /// Removes the requests that have ended.
  void remove_ended();
  void close(const std::string& reason, ExecutorEnd end);
  /// Writes the KV pool's blocks to its second level.
  void keep_blocks();

  Engine& engine_;
  const bool has_device_memory_;
  LoraCache* lora_cache_;
  DraftTarget* draft_target_;
  RequestQueue& queue_;
  ResponseBoard& board_;
  Statistics& statistics_;
  StepObserver observer_;

  std::shared_ptr<KVCacheEventManager> events_;
  std::unique_ptr<KvFileLevel> second_level_;            // nullptr if there is none
  std::unique_ptr<KvFileLevel> second_level_of_states_;  // the same
  SequenceMemoryPool memory_;
  Scheduler scheduler_;
  StepBuilder step_builder_;
  LookAhead look_ahead_;
  TokenStep token_step_;
  StepPlan plan_;
  std::map<RequestId, std::unique_ptr<ActiveRequest>> requests_;
  std::set<std::pair<Clock::time_point, RequestId>> deadlines_;
  /// Requests with a last response, removed when nothing in the step refers to them any more.
  std::vector<ActiveRequest*> ended_;
  std::int64_t iteration_ = 0;
  /// Engine::weight_placement().bytes_read after the last recorded step.
  std::uint64_t weight_bytes_read_ = 0;
  std::int32_t num_started_ = 0;
  /// Sum over the requests that the newest step started.
  Clock::duration queue_latency_{};
  /// True if nothing can run until an adapter load has ended.
  bool awaits_loads_ = false;
  /// Duration of the newest step, without sampling.
  Clock::duration engine_latency_{};
  /// Time spent making the drafts of the next step, and the draft engine's part of it.
  Clock::duration draft_latency_{};
  Clock::duration draft_engine_latency_{};
  SpeculationStats speculation_stats_;
  IterationStats iteration_stats_;
  RequestStatsPerIteration request_stats_;
  /// Sent after everything else of the step is done. A client with its last response then finds the request's
  /// adapter released and its step in the statistics.
  std::vector<Response> outbox_;
};

}  // namespace adaptrt
