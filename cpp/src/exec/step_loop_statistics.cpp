// Statistics of the step loop.

#include <algorithm>
#include <utility>

#include "step_loop.h"

namespace adaptrt {

void StepLoop::describe_step() {
  iteration_stats_ = {};
  request_stats_.request_stats.clear();
  if (!statistics_.wants_iterations() && !statistics_.wants_requests()) return;
  iteration_stats_.inflight_batching_stats = describe(plan_, iteration_);
  iteration_stats_.num_active_requests = count_active(scheduler_.running(), iteration_);
}

void StepLoop::record(Clock::time_point begin) {
  const std::int64_t step = iteration_ - 1;
  if (statistics_.wants_iterations()) statistics_.record(take_iteration_stats(begin));
  if (statistics_.wants_requests()) {
    for (const auto& [id, request] : requests_) {
      request_stats_.request_stats.push_back(describe(*request, step, false));
    }
    std::ranges::sort(request_stats_.request_stats, {}, &RequestStats::id);
    request_stats_.iter = iteration_;
    statistics_.record(request_stats_);
  }
}

IterationStats StepLoop::take_iteration_stats(Clock::time_point begin) {
  IterationStats stats = std::move(iteration_stats_);
  stats.iter = iteration_;
  stats.iter_latency_ms = std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
  stats.engine_latency_ms = std::chrono::duration<double, std::milli>(engine_latency_).count();
  stats.new_active_requests_queue_latency_ms =
      std::chrono::duration<double, std::milli>(queue_latency_).count();
  stats.num_new_active_requests = num_started_;
  stats.num_queued_requests = static_cast<std::int32_t>(queue_.num_queued());
  stats.max_num_active_requests = scheduler_.limits().max_batch_size;
  stats.kv_cache_stats = memory_.block_pool().stats();
  if (memory_.has_encoder()) stats.cross_kv_cache_stats = memory_.cross_pool()->stats();
  const std::size_t state_bytes = engine_.info().state_bytes;
  if (memory_.has_states()) {
    stats.state_stats = memory_.state_pool()->stats();
    stats.state_stats->slot_bytes = static_cast<std::int64_t>(state_bytes);
    if (second_level_of_states_) stats.state_stats->second_level = second_level_of_states_->stats();
  }
  if (stats.spec_decoding_stats) {
    stats.spec_decoding_stats->iter_latency_ms =
        std::chrono::duration<double, std::milli>(draft_latency_ + draft_engine_latency_).count();
    stats.spec_decoding_stats->draft_overhead =
        stats.spec_decoding_stats->iter_latency_ms / stats.iter_latency_ms;
  }
  stats.inflight_batching_stats->num_paused_requests = num_paused_requests();
  std::size_t device_bytes = static_cast<std::size_t>(memory_.num_blocks()) * engine_.info().kv_block_bytes +
                             static_cast<std::size_t>(num_state_slots()) * state_bytes;
  if (lora_cache_ != nullptr) {
    const LoraCacheStats lora = lora_cache_->stats();
    stats.cpu_mem_usage += lora.host_bytes_used;
    device_bytes += lora.memory_bytes - lora.host_bytes_used;
    stats.lora_cache_stats = lora;
  }
  for (const KvFileLevel* level : {second_level_.get(), second_level_of_states_.get()}) {
    if (level != nullptr) stats.cpu_mem_usage += level->buffer_bytes();
  }
  stats.speculation_stats = speculation_stats_;
  if (const auto placement = engine_.weight_placement()) {
    stats.weight_bytes_read =
        placement->bytes_read - std::exchange(weight_bytes_read_, placement->bytes_read);
  }
  if (draft_target_ != nullptr) {
    const DraftEngineStats draft_engine = draft_target_->engine().stats();
    (draft_target_->has_device_memory() ? stats.gpu_mem_usage : stats.cpu_mem_usage) +=
        draft_engine.mem_usage;
    stats.speculation_stats.draft_engine = draft_engine;
  }
  (has_device_memory_ ? stats.gpu_mem_usage : stats.cpu_mem_usage) += device_bytes;
  return stats;
}

std::int32_t StepLoop::num_paused_requests() const {
  if (scheduler_.num_preempted() == 0) return 0;
  const auto is_paused = [](const auto& entry) {
    return std::ranges::any_of(entry.second->sequences(),
                               [](const auto& sequence) { return sequence->preempted; });
  };
  return static_cast<std::int32_t>(std::ranges::count_if(requests_, is_paused));
}

}  // namespace adaptrt
