#include "statistics.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <utility>

namespace adaptrt {
namespace {

/// Formats like IterationStats::timestamp.
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
  return request.first().num_generated() > 0 ? RequestStage::kGenerationInProgress
                                             : RequestStage::kContextInProgress;
}

ActiveRequest::Counted& counted_in(std::int64_t step, const Sequence& sequence) {
  ActiveRequest::Counted& counted = static_cast<const ActiveSequence&>(sequence).request().counted;
  if (counted.step != step) counted = {.step = step};
  return counted;
}

void count_once(bool& is_counted, std::int32_t& count) {
  if (!std::exchange(is_counted, true)) ++count;
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

InflightBatchingStats describe(const StepPlan& plan, std::int64_t step) {
  InflightBatchingStats stats;
  for (const auto& entry : plan.entries) {
    ActiveRequest::Counted& counted = counted_in(step, *entry.sequence);
    count_once(counted.is_scheduled, stats.num_scheduled_requests);
    if (entry.is_prefill) {
      count_once(counted.is_context, stats.num_context_requests);
    } else {
      count_once(counted.is_generation, stats.num_gen_requests);
    }
  }
  stats.num_ctx_tokens = plan.num_context_tokens;
  if (stats.num_gen_requests > 0) {
    stats.avg_num_decoded_tokens_per_iter =
        static_cast<double>(plan.num_generation_sequences) / stats.num_gen_requests;
  }
  return stats;
}

void describe_drafts(const StepPlan& plan, IterationStats& iteration) {
  if (plan.num_draft_tokens == 0) return;
  SpecDecodingStats& stats = iteration.spec_decoding_stats.emplace();
  stats.num_draft_tokens = plan.num_draft_tokens;
  std::int32_t num_gained_by_decodes = 0;
  for (const auto& entry : plan.entries) {
    if (entry.num_drafts == 0) continue;
    ++stats.num_requests_with_draft_tokens;
    stats.num_accepted_tokens += num_gained_by_drafts(entry);
    if (!entry.is_prefill) num_gained_by_decodes += num_gained_by_drafts(entry);
  }
  stats.acceptance_length = 1.0 + static_cast<double>(stats.num_accepted_tokens) /
                                      static_cast<double>(stats.num_requests_with_draft_tokens);
  InflightBatchingStats& batch = *iteration.inflight_batching_stats;
  if (batch.num_gen_requests > 0) {
    batch.avg_num_decoded_tokens_per_iter +=
        static_cast<double>(num_gained_by_decodes) / batch.num_gen_requests;
  }
}

std::int32_t num_gained_by_drafts(const PlannedSequence& entry) {
  return std::max(entry.sequence->num_tokens() - entry.end() - 1, 0);
}

std::int32_t count_active(std::span<Sequence* const> running, std::int64_t step) {
  std::int32_t count = 0;
  for (const Sequence* sequence : running) count_once(counted_in(step, *sequence).is_active, count);
  return count;
}

RequestStats describe(const ActiveRequest& request, std::int64_t step, bool is_complete) {
  RequestStats stats;
  stats.id = request.id();
  stats.stage = stage_of(request, is_complete);
  stats.scheduled = request.counted.step == step && request.counted.is_scheduled;
  std::int32_t num_steps = 0;  // steps that gave a token
  for (const auto& sequence : request.sequences()) {
    stats.context_prefill_position =
        std::max(stats.context_prefill_position, std::min(sequence->num_computed(), sequence->prompt_length));
    stats.num_generated_tokens += sequence->num_generated();
    num_steps = std::max(num_steps, sequence->num_decoding_steps());
    stats.paused = stats.paused || sequence->preempted;
  }
  const BlockCounts blocks = count_blocks(request);
  stats.alloc_new_blocks_per_request = blocks.alloc_new_blocks;
  stats.reused_blocks_per_request = blocks.reused_blocks;
  stats.missed_blocks_per_request = blocks.missed_blocks;
  stats.alloc_total_blocks_per_request = stats.alloc_new_blocks_per_request + stats.reused_blocks_per_request;
  if (num_steps > 0) {
    stats.avg_num_decoded_tokens_per_iter = static_cast<double>(stats.num_generated_tokens) / num_steps;
  }
  stats.kv_cache_hit_rate_per_request = blocks.hit_rate();
  return stats;
}

}  // namespace adaptrt
