#include "step_loop.h"

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <utility>

#include "adaptrt/core/error.h"
#include "second_level.h"

namespace adaptrt {
namespace {

/// Limit during shutdown. Blocks that are not written by then must be computed again later.
constexpr std::chrono::seconds kMostTimeToKeepBlocks{5};

SchedulerLimits limits_of(const ExecutorConfig& config, const EngineInfo& engine) {
  SchedulerLimits limits;
  limits.max_batch_size = config.max_batch_size.value_or(engine.max_batch_size);
  limits.max_num_tokens = config.max_num_tokens.value_or(engine.max_num_tokens);
  limits.enable_chunked_context = config.enable_chunked_context;
  limits.max_reusable_prompt_len = engine.max_reusable_prompt_len;
  return limits;
}

std::shared_ptr<KVCacheEventManager> make_events(const KvCacheConfig& config, const EngineInfo& engine) {
  if (config.event_buffer_max_size == 0) return nullptr;
  return std::make_shared<KVCacheEventManager>(config.event_buffer_max_size, engine.max_seq_len);
}

PartialReuse partial_reuse_of(const KvCacheConfig& config) {
  if (!config.enable_partial_reuse) return PartialReuse::kNone;
  return config.copy_on_partial_reuse ? PartialReuse::kCopy : PartialReuse::kTakeOver;
}

}  // namespace

StepLoop::StepLoop(Engine& engine, const ExecutorConfig& config, std::int32_t num_kv_blocks,
                   std::int32_t num_cross_kv_blocks, StateSlots state_slots, LoraCache* lora_cache,
                   DraftTarget* draft_target, RequestQueue& queue, ResponseBoard& board,
                   Statistics& statistics, StepObserver observer)
    : engine_(engine),
      has_device_memory_(engine.free_device_memory().has_value()),
      lora_cache_(lora_cache),
      draft_target_(draft_target),
      queue_(queue),
      board_(board),
      statistics_(statistics),
      observer_(std::move(observer)),
      events_(make_events(config.kv_cache_config, engine.info())),
      second_level_(make_second_level(config.kv_cache_config, engine, num_kv_blocks)),
      second_level_of_states_(
          make_second_level_of_states(config.kv_cache_config, engine, state_slots.num_snapshots)),
      memory_(
          {.num_blocks = num_kv_blocks,
           .tokens_per_block = engine.info().tokens_per_block,
           .num_cross_blocks = num_cross_kv_blocks,
           .enable_block_reuse = config.kv_cache_config.enable_block_reuse,
           .partial_reuse = partial_reuse_of(config.kv_cache_config),
           .events = events_.get(),
           .second_level = {.level = second_level_.get(),
                            .min_priority = config.kv_cache_config.secondary_offload_min_priority.value_or(0),
                            .states = second_level_of_states_.get()},
           .num_state_slots = state_slots.num_sequences,
           .num_state_snapshots = state_slots.num_snapshots}),
      scheduler_(config.scheduler_config, limits_of(config, engine.info()), memory_, lora_cache),
      step_builder_(scheduler_.limits().max_rows_with_drafts, engine.info()),
      look_ahead_(engine, scheduler_, step_builder_),
      token_step_(engine.info()),
      weight_bytes_read_(engine.weight_placement().value_or(WeightPlacement{}).bytes_read) {}

void StepLoop::run() {
  try {
    flush_events();
    while (take_work()) {
      if (!scheduler_.empty()) step();
    }
    look_ahead_.discard();
    close("executor was shut down", ExecutorEnd::kShutdown);
    keep_blocks();
  } catch (const std::exception& error) {
    close(std::string("executor died: ") + error.what(), ExecutorEnd::kDeath);
  }
  if (second_level_) second_level_->close();
  if (second_level_of_states_) second_level_of_states_->close();
}

bool StepLoop::take_work() {
  look_ahead_.discard_if_unused();
  std::optional<Clock::time_point> until;
  if (!deadlines_.empty()) until = deadlines_.begin()->first;
  RequestQueue::Work work = queue_.take(scheduler_.empty() || awaits_loads_, until);
  for (auto& arrival : work.arrivals) {
    ActiveRequest& request = *arrival;
    requests_.emplace(request.id(), std::move(arrival));
    if (request.deadline()) deadlines_.emplace(*request.deadline(), request.id());
    if (!work.stop) scheduler_.add(request.first());
  }
  if (work.stop) return false;
  if (work.resets_prefix_cache) reset_prefix_cache();
  cancel(work.cancelled);
  end_overdue();
  send_responses();
  return true;
}

void StepLoop::reset_prefix_cache() {
  memory_.reset_reuse();
  if (draft_target_ != nullptr) draft_target_->engine().reset_reuse();
  flush_events();
}

void StepLoop::cancel(const std::vector<RequestId>& ids) {
  for (const RequestId id : ids) {
    const auto found = requests_.find(id);
    if (found == requests_.end()) continue;  // it has ended meanwhile
    end(*found->second, FinishReason::kCancelled);
    remove_ended();
  }
}

void StepLoop::end_overdue() {
  if (deadlines_.empty()) return;
  const auto now = Clock::now();
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    end(*requests_.at(deadlines_.begin()->second), FinishReason::kTimedOut);
    remove_ended();
  }
}

void StepLoop::step() {
  const auto begin = Clock::now();
  memory_.set_time(begin);
  const bool is_begun = look_ahead_.take(plan_, step_builder_);
  if (!is_begun) {
    draft_with_engine();
    scheduler_.plan(plan_);
  }
  for (Sequence* sequence : plan_.preempted) release_drafts_of(*sequence);
  observe(&plan_);
  num_started_ = 0;
  queue_latency_ = {};
  engine_latency_ = {};
  for (Sequence* sequence : plan_.started) {
    ActiveRequest& request = static_cast<ActiveSequence*>(sequence)->request();
    if (!request.start(begin)) continue;
    ++num_started_;
    queue_latency_ += begin - request.arrival;
  }
  queue_.release(static_cast<std::size_t>(num_started_));

  awaits_loads_ = plan_.empty() && plan_.awaits_loads;
  if (plan_.empty()) {
    const bool has_changed = !plan_.unservable.empty() || !plan_.failed.empty() || !plan_.preempted.empty();
    if (!has_changed && !awaits_loads_ && !scheduler_.empty()) {
      throw std::logic_error("no request can run although " + std::to_string(scheduler_.waiting().size()) +
                             " wait");
    }
    refuse_waiting();
    remove_ended();
    observe(nullptr);
    flush_events();
    send_responses();
    return;
  }
  describe_step();
  iteration_stats_.begun_ahead = is_begun;
  if (run_engine(is_begun)) {
    scheduler_.commit(plan_);
    make_drafts();
    deliver();
  }
  refuse_waiting();
  remove_ended();
  ++iteration_;
  observe(nullptr);
  record(begin);
  flush_events();
  send_responses();
}

bool StepLoop::run_engine(bool is_begun) {
  const StepInput input = is_begun ? StepInput{} : step_builder_.build(plan_);
  token_step_.begin(step_builder_);
  const auto begin = Clock::now();
  Clock::duration sampling{};
  try {
    const auto timed = [&](auto take) {
      return [&sampling, take](std::int64_t first_row, std::int64_t num_rows, const float* values) {
        const auto arrived = Clock::now();
        take(first_row, num_rows, values);
        sampling += Clock::now() - arrived;
      };
    };
    if (!is_begun) engine_.begin_step(input);
    look_ahead_.begin(plan_, step_builder_);
    engine_.await_step(timed([this](auto... rows) { token_step_.take(rows...); }),
                       timed([this](auto... rows) { token_step_.take_hidden(rows...); }));
    scheduler_.release_kept_leases();
    engine_latency_ = Clock::now() - begin - sampling;
    token_step_.take_found(step_builder_);
    for (Sequence* sequence : plan_.encoded) {
      static_cast<ActiveSequence*>(sequence)->request().has_encoder_output();
    }
    token_step_.finish();
    return true;
  } catch (const EngineError&) {
    throw;  // the engine is unusable
  } catch (const std::exception& error) {
    fail_plan(error.what());
    return false;
  }
}

void StepLoop::note_tokens() {
  const auto now = Clock::now();
  const std::int64_t step = iteration_ + 1;  // as in IterationStats
  for (const auto& outcome : token_step_.outcomes()) {
    if (outcome.error.empty() && outcome.sequence->num_generated() > 0) {
      outcome.sequence->request().note_tokens(now, step);
    }
  }
  for (ActiveRequest* request : token_step_.searches()) request->note_tokens(now, step);
}

void StepLoop::deliver() {
  note_tokens();
  fork_sequences();
  for (const auto& outcome : token_step_.outcomes()) {
    ActiveSequence& sequence = *outcome.sequence;
    ActiveRequest& request = sequence.request();
    if (request.has_ended) continue;  // another of its sequences has failed
    if (!outcome.error.empty()) {
      fail(request, outcome.error);
    } else if (outcome.reason != FinishReason::kNotFinished) {
      post(sequence, outcome.reason);
      if (!request.has_ended) {
        scheduler_.remove(sequence);
        release_drafts_of(sequence);
      }
    } else if (request.is_streaming()) {
      post(sequence, outcome.reason);
    }
    if (request.has_ended) count_completed(request);
  }
  advance_searches();
}

void StepLoop::count_completed(const ActiveRequest& request) {
  ++iteration_stats_.num_completed_requests;
  if (statistics_.wants_requests()) {
    request_stats_.request_stats.push_back(describe(request, iteration_, true));
  }
}

void StepLoop::advance_searches() {
  for (ActiveRequest* request : token_step_.searches()) {
    ActiveBeams& beams = *request->beams();
    beams.advance();
    if (beams.has_failed()) {
      fail(*request, "every token is forbidden");
    } else if (beams.is_over()) {
      post(request->first(), FinishReason::kNotFinished);
    } else {
      go_on_with(beams, *request);
      if (request->is_streaming()) post(request->first(), FinishReason::kNotFinished);
    }
    if (request->has_ended) count_completed(*request);
  }
}

void StepLoop::go_on_with(const ActiveBeams& beams, ActiveRequest& request) {
  if (request.first().num_forks == 0) {
    scheduler_.move_beams(beams.moves());
    return;
  }
  for (const auto& sequence : request.sequences().subspan(1)) scheduler_.fork(request.first(), *sequence);
}

void StepLoop::fork_sequences() {
  for (const auto& outcome : token_step_.outcomes()) {
    ActiveSequence& parent = *outcome.sequence;
    if (parent.num_forks == 0 || parent.num_generated() == 0) continue;
    for (const auto& sequence : parent.request().sequences().subspan(1)) {
      // It has no token if sampling failed.
      if (sequence->num_generated() == 0 || sequence->is_complete()) continue;
      scheduler_.fork(parent, *sequence);
      if (sequence->has_drafter()) sequence->make_drafts(0, 0, 0);
    }
    Scheduler::end_forks(parent);
  }
}

void StepLoop::refuse_waiting() {
  for (const FailedStart& failed : plan_.failed) {
    ActiveRequest& request = static_cast<ActiveSequence*>(failed.sequence)->request();
    fail(request, "adapter " + std::to_string(request.adapter()->task_id()) +
                      " could not be loaded: " + failed.reason);
  }
  for (Sequence* sequence : plan_.unservable) {
    ActiveRequest& request = static_cast<ActiveSequence*>(sequence)->request();
    fail(request, "adapter " + std::to_string(request.adapter()->task_id()) + " needs " +
                      std::to_string(lora_cache_->pages_needed(*request.adapter())) +
                      " device pages of the LoRA cache; available: " +
                      std::to_string(lora_cache_->obtainable_pages()) + " next to the pinned adapters");
  }
}

void StepLoop::fail_plan(const std::string& reason) {
  scheduler_.fail(plan_);
  const auto fail_request_of = [&](const Sequence* sequence) {
    fail(static_cast<const ActiveSequence*>(sequence)->request(), reason);
  };
  for (const auto& entry : plan_.entries) fail_request_of(entry.sequence);
  for (const auto& copy : plan_.copies) fail_request_of(copy.sequence);
  for (const auto& copy : plan_.state_copies) {
    if (copy.sequence != nullptr) fail_request_of(copy.sequence);
  }
}

void StepLoop::flush_events() {
  if (events_) events_->flush();
}

void StepLoop::observe(const StepPlan* plan) const {
  if (!observer_) return;
  observer_(plan, scheduler_, lora_cache_, draft_target_ != nullptr ? &draft_target_->engine() : nullptr);
}

void StepLoop::post(ActiveSequence& sequence, FinishReason reason) {
  ActiveRequest& request = sequence.request();
  outbox_.push_back(request.make_response(sequence, reason));
  if (request.has_ended) ended_.push_back(&request);
}

void StepLoop::send_responses() {
  for (Response& response : outbox_) board_.post(std::move(response));
  outbox_.clear();
}

void StepLoop::end(ActiveRequest& request, FinishReason reason) {
  if (request.beams() != nullptr) {
    post(request.first(), reason);
    return;
  }
  for (const auto& sequence : request.sequences()) {
    if (!sequence->has_ended()) post(*sequence, reason);
  }
}

void StepLoop::fail(ActiveRequest& request, const std::string& reason) {
  if (std::exchange(request.has_ended, true)) return;
  outbox_.push_back(request.make_error(reason));
  ended_.push_back(&request);
}

void StepLoop::remove_ended() {
  for (ActiveRequest* request : ended_) {
    for (const auto& sequence : request->sequences()) scheduler_.remove(*sequence);
    if (!request->has_started) queue_.release(1);
    if (request->deadline()) deadlines_.erase({*request->deadline(), request->id()});
    requests_.erase(request->id());
  }
  ended_.clear();
}

void StepLoop::keep_blocks() {
  try {
    memory_.offload_all(Clock::now() + kMostTimeToKeepBlocks);
  } catch (const std::exception&) {  // the second level is only a cache
  }
}

void StepLoop::close(const std::string& reason, ExecutorEnd end) {
  send_responses();
  queue_.close(reason);
  // No more requests can arrive; requests that came since the last take() get an answer too.
  for (auto& arrival : queue_.take(false).arrivals) requests_.emplace(arrival->id(), std::move(arrival));
  for (const auto& [id, request] : requests_) {
    if (!request->has_ended) board_.post(request->make_error(reason));
  }
  board_.close(reason, end);
  if (events_) events_->close();
}

}  // namespace adaptrt
