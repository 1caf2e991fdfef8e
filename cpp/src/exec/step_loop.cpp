#include "step_loop.h"

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <utility>

#include "adaptrt/core/error.h"

namespace adaptrt {
namespace {

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
                   LoraCache* lora_cache, RequestQueue& queue, ResponseBoard& board, Statistics& statistics,
                   StepObserver observer)
    : engine_(engine),
      has_device_memory_(engine.free_device_memory().has_value()),
      lora_cache_(lora_cache),
      queue_(queue),
      board_(board),
      statistics_(statistics),
      observer_(std::move(observer)),
      events_(make_events(config.kv_cache_config, engine.info())),
      block_pool_(num_kv_blocks, engine.info().tokens_per_block, config.kv_cache_config.enable_block_reuse,
                  events_.get(), partial_reuse_of(config.kv_cache_config)),
      scheduler_(config.scheduler_config, limits_of(config, engine.info()), block_pool_, lora_cache),
      token_step_(engine.info().vocab_size) {}

void StepLoop::run() {
  flush_events();
  try {
    while (take_work()) {
      if (!scheduler_.empty()) step();
    }
    close("executor was shut down", ExecutorEnd::kShutdown);
  } catch (const std::exception& error) {
    close(std::string("executor died: ") + error.what(), ExecutorEnd::kDeath);
  }
}

bool StepLoop::take_work() {
  std::optional<Clock::time_point> until;
  if (!deadlines_.empty()) until = deadlines_.begin()->first;
  RequestQueue::Work work = queue_.take(scheduler_.empty() || awaits_loads_, until);
  for (auto& arrival : work.arrivals) {
    ActiveRequest& request = *arrival;
    requests_.emplace(request.id, std::move(arrival));
    if (request.deadline()) deadlines_.emplace(*request.deadline(), request.id);
    if (!work.stop) scheduler_.add(request);
  }
  if (work.stop) return false;
  cancel(work.cancelled);
  end_overdue();
  send_responses();
  return true;
}

void StepLoop::cancel(const std::vector<RequestId>& ids) {
  for (const RequestId id : ids) {
    const auto found = requests_.find(id);
    if (found == requests_.end()) continue;  // it has ended meanwhile
    post(*found->second, FinishReason::kCancelled);
    remove(*found->second);
  }
}

void StepLoop::end_overdue() {
  if (deadlines_.empty()) return;
  const auto now = Clock::now();
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    ActiveRequest& request = *requests_.at(deadlines_.begin()->second);
    post(request, FinishReason::kTimedOut);
    remove(request);
  }
}

void StepLoop::step() {
  const auto begin = Clock::now();
  block_pool_.set_time(begin);
  scheduler_.plan(plan_);
  observe(&plan_);
  num_started_ = 0;
  queue_latency_ = {};
  engine_latency_ = {};
  for (Sequence* sequence : plan_.started) {
    auto& request = *static_cast<ActiveRequest*>(sequence);
    if (std::exchange(request.has_started, true)) continue;
    ++num_started_;
    queue_latency_ += begin - request.arrival;
  }
  queue_.release(static_cast<std::size_t>(num_started_));

  awaits_loads_ = plan_.empty() && plan_.awaits_loads;
  if (plan_.empty()) {
    const bool has_changed = !plan_.unservable.empty() || !plan_.failed.empty() || !plan_.paused.empty();
    if (!has_changed && !awaits_loads_ && !scheduler_.empty()) {
      throw std::logic_error("no request can run although " + std::to_string(scheduler_.waiting().size()) +
                             " wait");
    }
    refuse_waiting();
    observe(nullptr);
    flush_events();
    send_responses();
    return;
  }
  const std::size_t num_active = scheduler_.running().size();
  std::vector<RequestId> completed;
  request_stats_.request_stats.clear();
  if (run_engine()) {
    scheduler_.commit(plan_);
    deliver(completed);
  }
  refuse_waiting();
  ++iteration_;
  observe(nullptr);
  record(begin, num_active, completed);
  flush_events();
  send_responses();
}

bool StepLoop::run_engine() {
  const StepInput input = step_builder_.build(plan_);
  token_step_.begin(step_builder_.logit_rows());
  const auto begin = Clock::now();
  Clock::duration sampling{};
  try {
    engine_.step(input, [&](std::int64_t first_row, std::int64_t num_rows, const float* logits) {
      const auto arrived = Clock::now();
      token_step_.take(first_row, num_rows, logits);
      sampling += Clock::now() - arrived;
    });
    engine_latency_ = Clock::now() - begin - sampling;
    token_step_.finish();
    return true;
  } catch (const EngineError&) {
    throw;  // the engine itself is unusable
  } catch (const std::exception& error) {
    fail_plan(error.what());
    return false;
  }
}

void StepLoop::deliver(std::vector<RequestId>& completed) {
  for (const auto& outcome : token_step_.outcomes()) {
    ActiveRequest& request = *outcome.request;
    const bool has_failed = !outcome.error.empty();
    if (!has_failed && outcome.reason == FinishReason::kNotFinished) {
      if (request.is_streaming()) post(request, outcome.reason);
      continue;
    }
    completed.push_back(request.id);
    if (statistics_.wants_requests()) request_stats_.request_stats.push_back(describe(request, true, true));
    if (has_failed) {
      outbox_.push_back(request.make_error(outcome.error));
    } else {
      post(request, outcome.reason);
    }
    remove(request);
  }
}

void StepLoop::refuse_waiting() {
  for (const FailedStart& failed : plan_.failed) {
    auto& request = *static_cast<ActiveRequest*>(failed.sequence);
    outbox_.push_back(request.make_error("adapter " + std::to_string(request.adapter->task_id()) +
                                         " could not be loaded: " + failed.reason));
    remove(request);
  }
  for (Sequence* sequence : plan_.unservable) {
    auto& request = *static_cast<ActiveRequest*>(sequence);
    outbox_.push_back(request.make_error("adapter " + std::to_string(request.adapter->task_id()) + " needs " +
                                         std::to_string(lora_cache_->pages_needed(*request.adapter)) +
                                         " device pages of the LoRA cache; there are " +
                                         std::to_string(lora_cache_->obtainable_pages()) +
                                         " beside the pinned adapters"));
    remove(request);
  }
}

void StepLoop::fail_plan(const std::string& reason) {
  scheduler_.fail(plan_);
  for (const auto& entry : plan_.entries) {
    auto& request = *static_cast<ActiveRequest*>(entry.sequence);
    outbox_.push_back(request.make_error(reason));
    forget(request);
  }
}

void StepLoop::flush_events() {
  if (events_) events_->flush();
}

void StepLoop::observe(const StepPlan* plan) const {
  if (observer_) observer_(plan, scheduler_, block_pool_, lora_cache_);
}

void StepLoop::record(Clock::time_point begin, std::size_t num_active,
                      const std::vector<RequestId>& completed) {
  if (statistics_.wants_iterations()) {
    IterationStats stats;
    stats.iter = iteration_;
    stats.iter_latency_ms = std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
    stats.engine_latency_ms = std::chrono::duration<double, std::milli>(engine_latency_).count();
    stats.new_active_requests_queue_latency_ms =
        std::chrono::duration<double, std::milli>(queue_latency_).count();
    stats.num_new_active_requests = num_started_;
    stats.num_active_requests = static_cast<std::int32_t>(num_active);
    stats.num_queued_requests = static_cast<std::int32_t>(queue_.num_queued());
    stats.num_completed_requests = static_cast<std::int32_t>(completed.size());
    stats.max_num_active_requests = scheduler_.limits().max_batch_size;
    stats.kv_cache_stats = block_pool_.stats();
    stats.inflight_batching_stats = describe(plan_, scheduler_.num_paused());
    std::size_t device_bytes =
        static_cast<std::size_t>(block_pool_.num_blocks()) * engine_.info().kv_block_bytes;
    if (lora_cache_ != nullptr) {
      const LoraCacheStats lora = lora_cache_->stats();
      stats.cpu_mem_usage += lora.host_bytes_used;
      device_bytes += static_cast<std::size_t>(lora.device_pages_total) * lora.page_bytes;
      stats.lora_cache_stats = lora;
    }
    (has_device_memory_ ? stats.gpu_mem_usage : stats.cpu_mem_usage) += device_bytes;
    statistics_.record(std::move(stats));
  }
  if (statistics_.wants_requests()) {
    std::unordered_set<const Sequence*> scheduled;
    for (const auto& entry : plan_.entries) scheduled.insert(entry.sequence);
    for (const auto& [id, request] : requests_) {
      request_stats_.request_stats.push_back(describe(*request, scheduled.contains(request.get()), false));
    }
    std::ranges::sort(request_stats_.request_stats, {}, &RequestStats::id);
    request_stats_.iter = iteration_;
    statistics_.record(request_stats_);
  }
}

void StepLoop::post(ActiveRequest& request, FinishReason reason) {
  outbox_.push_back(request.make_response(reason));
}

void StepLoop::send_responses() {
  for (Response& response : outbox_) board_.post(std::move(response));
  outbox_.clear();
}

void StepLoop::remove(ActiveRequest& request) {
  scheduler_.remove(request);
  forget(request);
}

void StepLoop::forget(ActiveRequest& request) {
  if (!request.has_started) queue_.release(1);
  if (request.deadline()) deadlines_.erase({*request.deadline(), request.id});
  requests_.erase(request.id);
}

void StepLoop::close(const std::string& reason, ExecutorEnd end) {
  send_responses();
  queue_.close(reason);
  // Nothing comes in any more; what came in after the last look gets its answer as well.
  for (auto& arrival : queue_.take(false).arrivals) requests_.emplace(arrival->id, std::move(arrival));
  for (const auto& [id, request] : requests_) board_.post(request->make_error(reason));
  board_.close(reason, end);
  if (events_) events_->close();
}

}  // namespace adaptrt
