#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "active_request.h"
#include "adaptrt/exec/config.h"
#include "adaptrt/exec/stats.h"
#include "adaptrt/sched/scheduler.h"

namespace adaptrt {

/// The newest statistics that nobody has asked for yet. One thread records, any thread takes.
class Statistics {
 public:
  explicit Statistics(const ExecutorConfig& config)
      : max_iterations_(static_cast<std::size_t>(config.iter_stats_max_iterations)),
        max_request_iterations_(static_cast<std::size_t>(config.request_stats_max_iterations)) {}

  [[nodiscard]] bool wants_iterations() const { return max_iterations_ > 0; }
  [[nodiscard]] bool wants_requests() const { return max_request_iterations_ > 0; }
  void record(IterationStats stats);
  void record(RequestStatsPerIteration stats);
  [[nodiscard]] std::vector<IterationStats> take_iterations();
  [[nodiscard]] std::vector<RequestStatsPerIteration> take_requests();

 private:
  std::size_t max_iterations_;
  std::size_t max_request_iterations_;
  std::mutex mutex_;
  std::deque<IterationStats> iterations_;
  std::deque<RequestStatsPerIteration> requests_;
};

/// Now, as IterationStats::timestamp.
[[nodiscard]] std::string timestamp_now();

/// The batch of a plan whose step is over; `num_paused` requests wait although they ran before.
[[nodiscard]] InflightBatchingStats describe(const StepPlan& plan, std::int32_t num_paused);

/// A request after a step that it was part of, or not.
[[nodiscard]] RequestStats describe(const ActiveRequest& request, bool scheduled, bool is_complete);

}  // namespace adaptrt
