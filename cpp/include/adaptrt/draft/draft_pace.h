#pragma once

#include <cstdint>

namespace adaptrt {

/// Chooses the number of drafts for one sequence from the results of its earlier drafts.
///
/// Every step may have `length` drafts, 2 at first. When all that were computed were right, it doubles, up to
/// the most; when none was, it halves, and there are no drafts for the next 1, 7, 31, 127, 127, ... steps: a
/// miss counts one, a step with right drafts halves the count. So a text of n tokens without any right draft
/// computes log4(n) + n / 128 wrong ones, two in the first step, and one that repeats itself again gets its
/// drafts back.
class DraftPace {
 public:
  explicit DraftPace(std::int32_t most);

  /// Drafts that the next step may have. Counts the steps: to be asked once for each.
  [[nodiscard]] std::int32_t next();
  /// `num_right` of `num_computed` drafts, at least one, came to be generated.
  void record(std::int32_t num_computed, std::int32_t num_right);
  /// Returns the current miss count: a miss adds one, a step with right drafts halves it.
  [[nodiscard]] std::int32_t num_misses() const { return misses_; }

 private:
  static constexpr std::int32_t kFirstLength = 2;
  static constexpr std::int32_t kMostMisses = 4;

  std::int32_t most_;
  std::int32_t length_;
  std::int32_t misses_ = 0;
  std::int32_t pause_ = 0;  // steps without drafts that are to come
};

}  // namespace adaptrt
