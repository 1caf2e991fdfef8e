#include "statistics.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <iterator>
#include <utility>

namespace adaptrt {
namespace {

template <class Stats>
void push_bounded(std::deque<Stats>& ring, Stats stats, std::size_t limit) {
  if (limit == 0) return;
  if (ring.size() == limit) ring.pop_front();
  ring.push_back(std::move(stats));
}

template <class Stats>
std::vector<Stats> take_all(std::deque<Stats>& ring) {
  std::vector<Stats> all(std::make_move_iterator(ring.begin()), std::make_move_iterator(ring.end()));
  ring.clear();
  return all;
}

RequestStage stage_of(const ActiveRequest& request, bool is_complete) {
  if (is_complete) return RequestStage::kGenerationComplete;
  if (!request.has_started) return RequestStage::kQueued;
  return request.num_generated() > 0 ? RequestStage::kGenerationInProgress : RequestStage::kContextInProgress;
}

}  // namespace

void Statistics::record(IterationStats stats) {
  const std::lock_guard lock(mutex_);
  push_bounded(iterations_, std::move(stats), max_iterations_);
}

void Statistics::record(RequestStatsPerIteration stats) {
  const std::lock_guard lock(mutex_);
  push_bounded(requests_, std::move(stats), max_request_iterations_);
}

std::vector<IterationStats> Statistics::take_iterations() {
  const std::lock_guard lock(mutex_);
  return take_all(iterations_);
}

std::vector<RequestStatsPerIteration> Statistics::take_requests() {
  const std::lock_guard lock(mutex_);
  return take_all(requests_);
}

std::string timestamp_now() {
  namespace chrono = std::chrono;
  const auto now = chrono::floor<chrono::microseconds>(chrono::system_clock::now());
  const auto day = chrono::floor<chrono::days>(now);
  const chrono::year_month_day date(day);
  const chrono::hh_mm_ss time(now - day);
  std::array<char, 64> text;
  const int length = std::snprintf(
      text.data(), text.size(), "%02u-%02u-%04d %02d:%02d:%02d.%06d", static_cast<unsigned>(date.month()),
      static_cast<unsigned>(date.day()), static_cast<int>(date.year()),
      static_cast<int>(time.hours().count()), static_cast<int>(time.minutes().count()),
      static_cast<int>(time.seconds().count()), static_cast<int>(time.subseconds().count()));
  return {text.data(), static_cast<std::size_t>(length)};
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
