#include "statistics.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <utility>

namespace adaptrt {
namespace {

/// As IterationStats::timestamp.
std::string timestamp_of(std::chrono::system_clock::time_point time_point) {
  namespace chrono = std::chrono;
  const auto at = chrono::floor<chrono::microseconds>(time_point);
  const auto day = chrono::floor<chrono::days>(at);
  const chrono::year_month_day date(day);
  const chrono::hh_mm_ss time(at - day);
  std::array<char, 64> text;
  const int length = std::snprintf(
      text.data(), text.size(), "%02u-%02u-%04d %02d:%02d:%02d.%06d", static_cast<unsigned>(date.month()),
      static_cast<unsigned>(date.day()), static_cast<int>(date.year()),
      static_cast<int>(time.hours().count()), static_cast<int>(time.minutes().count()),
      static_cast<int>(time.seconds().count()), static_cast<int>(time.subseconds().count()));
  return {text.data(), static_cast<std::size_t>(length)};
}

RequestStage stage_of(const ActiveRequest& request, bool is_complete) {
  if (is_complete) return RequestStage::kGenerationComplete;
  if (!request.has_started) return RequestStage::kQueued;
  return request.num_generated() > 0 ? RequestStage::kGenerationInProgress : RequestStage::kContextInProgress;
}

}  // namespace

void Statistics::record(IterationStats stats) {
  const auto now = std::chrono::system_clock::now();
  const std::lock_guard lock(mutex_);
  iterations_.push({std::move(stats), now});
}

void Statistics::record(RequestStatsPerIteration stats) {
  const std::lock_guard lock(mutex_);
  requests_.push(std::move(stats));
}

std::vector<IterationStats> Statistics::take_iterations() {
  std::vector<TimedIteration> timed;
  {
    const std::lock_guard lock(mutex_);
    timed = iterations_.take_all();
  }
  std::vector<IterationStats> all;
  all.reserve(timed.size());
  for (TimedIteration& entry : timed) {
    entry.stats.timestamp = timestamp_of(entry.end);
    all.push_back(std::move(entry.stats));
  }
  return all;
}

std::vector<RequestStatsPerIteration> Statistics::take_requests() {
  const std::lock_guard lock(mutex_);
  return requests_.take_all();
}

InflightBatchingStats describe(const StepPlan& plan, std::int32_t num_paused) {
  InflightBatchingStats stats;
  stats.num_scheduled_requests = static_cast<std::int32_t>(plan.entries.size());
  stats.num_context_requests = plan.num_context_sequences;
  stats.num_gen_requests = plan.num_generation_sequences;
  stats.num_paused_requests = num_paused;
  stats.num_ctx_tokens = plan.num_context_tokens;
  stats.avg_num_decoded_tokens_per_iter = plan.num_generation_sequences > 0 ? 1.0 : 0.0;
  return stats;
}

RequestStats describe(const ActiveRequest& request, bool scheduled, bool is_complete) {
  RequestStats stats;
  stats.id = request.id;
  stats.stage = stage_of(request, is_complete);
  stats.context_prefill_position = std::min(request.num_computed, request.prompt_length);
  stats.num_generated_tokens = request.num_generated();
  stats.avg_num_decoded_tokens_per_iter = request.num_generated() > 0 ? 1.0 : 0.0;
  stats.scheduled = scheduled;
  stats.paused = request.paused;
  const BlockTable& table = request.table;
  stats.alloc_total_blocks_per_request = table.alloc_new_blocks + table.reused_blocks;
  stats.alloc_new_blocks_per_request = table.alloc_new_blocks;
  stats.reused_blocks_per_request = table.reused_blocks;
  stats.missed_blocks_per_request = table.missed_blocks;
  const auto looked_up = table.reused_blocks + table.missed_blocks;
  if (looked_up > 0) {
    stats.kv_cache_hit_rate_per_request =
        static_cast<double>(table.reused_blocks) / static_cast<double>(looked_up);
  }
  return stats;
}

}  // namespace adaptrt
