#pragma once

#include <cstdint>

namespace adaptrt {

/// Chooses the number of drafts for one sequence from the results of its earlier drafts.
///
/// A step may have `length` drafts, initially 2. If all computed drafts were right, `length` doubles, up to
/// the maximum. If none was right, it halves, and the next 1, 7, 31, 127, 127, ... steps have no drafts: a
/// miss increments the miss count, and a step with right drafts halves it. So a text of n tokens without any
/// right draft computes log4(n) + n / 128 wrong ones, two in the first step. A text that repeats itself later
/// gets its drafts back.
class DraftPace {
 public:
  explicit DraftPace(std::int32_t most);

  /// Returns the maximum number of drafts of the next step. Call it exactly once per step.
  [[nodiscard]] std::int32_t next();
  /// Records that `num_right` of `num_computed` drafts (at least one) were generated.
  void record(std::int32_t num_computed, std::int32_t num_right);
  /// Returns the current miss count: a miss adds one, a step with right drafts halves it.
  [[nodiscard]] std::int32_t num_misses() const { return misses_; }

 private:
  static constexpr std::int32_t kFirstLength = 2;
  static constexpr std::int32_t kMostMisses = 4;

  std::int32_t most_;
  std::int32_t length_;
  std::int32_t misses_ = 0;
  std::int32_t pause_ = 0;  // remaining steps without drafts
};

}  // namespace adaptrt
