#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "active_request.h"
#include "adaptrt/exec/config.h"
#include "adaptrt/exec/stats.h"
#include "adaptrt/sched/scheduler.h"

namespace adaptrt {

/// Keeps the newest items, at most `limit`. Reserves the usual number at once, so that adding allocates
/// nothing.
template <class Item>
class Ring {
 public:
  explicit Ring(std::size_t limit) : limit_(limit) { items_.reserve(std::min(limit, kReserved)); }

  void push(Item item) {
    if (items_.size() < limit_) {
      items_.push_back(std::move(item));
    } else if (limit_ > 0) {
      items_[oldest_] = std::move(item);
      oldest_ = (oldest_ + 1) % limit_;
    }
  }
  /// Oldest first.
  [[nodiscard]] std::vector<Item> take_all() {
    std::ranges::rotate(items_, items_.begin() + static_cast<std::ptrdiff_t>(oldest_));
    std::vector<Item> all(std::make_move_iterator(items_.begin()), std::make_move_iterator(items_.end()));
    items_.clear();
    oldest_ = 0;
    return all;
  }

 private:
  static constexpr std::size_t kReserved = 1024;
  std::size_t limit_;
  std::size_t oldest_ = 0;
  std::vector<Item> items_;
};

/// Keeps the newest statistics until they are taken. One thread records, any thread takes.
class Statistics {
 public:
  explicit Statistics(const ExecutorConfig& config)
      : max_iterations_(static_cast<std::size_t>(config.iter_stats_max_iterations)),
        max_request_iterations_(static_cast<std::size_t>(config.request_stats_max_iterations)),
        iterations_(max_iterations_),
        requests_(max_request_iterations_) {}

  [[nodiscard]] bool wants_iterations() const { return max_iterations_ > 0; }
  [[nodiscard]] bool wants_requests() const { return max_request_iterations_ > 0; }
  /// Adds the timestamp.
  void record(IterationStats stats);
  void record(RequestStatsPerIteration stats);
  [[nodiscard]] std::vector<IterationStats> take_iterations();
  [[nodiscard]] std::vector<RequestStatsPerIteration> take_requests();

 private:
  struct TimedIteration {
    IterationStats stats;
    std::chrono::system_clock::time_point end;
  };

  std::size_t max_iterations_;
  std::size_t max_request_iterations_;
  std::mutex mutex_;
  Ring<TimedIteration> iterations_;
  Ring<RequestStatsPerIteration> requests_;
};

/// Describes the batch of a plan. All its sequences must be ActiveSequences. `step` must be unique per step.
[[nodiscard]] InflightBatchingStats describe(const StepPlan& plan, std::int64_t step);
/// Adds the outcome of a plan's drafts, after its step, to the result of describe().
void describe_drafts(const StepPlan& plan, IterationStats& iteration);
/// Number of tokens that a sequence got from drafts, in addition to its normal one.
[[nodiscard]] std::int32_t num_gained_by_drafts(const PlannedSequence& entry);
/// Number of requests with at least one running sequence.
[[nodiscard]] std::int32_t count_active(std::span<Sequence* const> running, std::int64_t step);

/// Describes a request after a step; `step` tells if that step scheduled it.
[[nodiscard]] RequestStats describe(const ActiveRequest& request, std::int64_t step, bool is_complete);

}  // namespace adaptrt
