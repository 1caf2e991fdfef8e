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

/// The newest items, at most `limit`. Room for the usual number of them is made at once, so that keeping one
/// allocates nothing.
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
  /// The oldest first.
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

/// The newest statistics that nobody has asked for yet. One thread records, any thread takes.
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

/// The batch of a plan: its requests, whose sequences are all ActiveSequences. `step` is another number for
/// each step.
[[nodiscard]] InflightBatchingStats describe(const StepPlan& plan, std::int64_t step);
/// Adds what became of a plan's drafts, after its step, to what describe() said of the batch.
void describe_drafts(const StepPlan& plan, IterationStats& iteration);
/// Tokens that a step with drafts gave a sequence beside the one that it would have got.
[[nodiscard]] std::int32_t num_gained_by_drafts(const PlannedSequence& entry);
/// Requests of which any sequence runs.
[[nodiscard]] std::int32_t count_active(std::span<Sequence* const> running, std::int64_t step);

/// A request after a step that counted it as scheduled, or not.
[[nodiscard]] RequestStats describe(const ActiveRequest& request, std::int64_t step, bool is_complete);

}  // namespace adaptrt
