#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "adaptrt/engine/engine.h"
#include "adaptrt/lora/layout.h"
#include "adaptrt/program/program.h"

namespace adaptrt {

/// Consecutive queries of a sequence and consecutive key heads (key_heads()), computed by one thread.
struct AttentionTask {
  std::int32_t sequence = 0;
  std::int32_t first_token = 0;  ///< number in the step
  std::int32_t tokens = 0;
  std::int32_t first_head = 0;
  std::int32_t heads = 0;
  /// Keys [first_key, end_key) of the sequence that the queries' window has; 0 and 0 without windows. With
  /// chunks, first_key is the start of the queries' chunk, and end_key is 0.
  std::int32_t first_key = 0;
  std::int32_t end_key = 0;
  /// End of the tokens of the step that the queries attend to: neighbours with equal numbers
  /// (AttentionOp::joint_column). 0: queries attend up to their own position.
  std::int32_t end_token = 0;
};

/// The heads of an op's attention; nullptr if the op has no attention.
[[nodiscard]] const AttentionShape* shape_of(const Op& op);

/// How attention cuts sequences into runs: by columns of given rows into neighbours with equal numbers, or
/// into chunks. At most one of these is given.
struct RunRule {
  std::int32_t window = -1;  ///< AttentionOp::window_column
  std::int32_t joint = -1;   ///< AttentionOp::joint_column
  std::int32_t chunk = 0;    ///< AttentionOp::chunk

  bool operator==(const RunRule&) const = default;
};

/// Number of groups of query heads that attend to keys together: the key-value heads. If all queries have the
/// same keys, there are more groups, so that several threads can compute a sequence.
[[nodiscard]] std::int64_t key_heads(const AttentionShape& shape);

/// Maximum number of rows of a task: query positions times the query heads of its key heads.
[[nodiscard]] std::int64_t rows_per_task(const AttentionShape& shape);

/// Cuts the queries of steps into tasks, once for all ops with the same numbers of heads and the same runs.
class AttentionPlans {
 public:
  /// Plans of one section.
  explicit AttentionPlans(const std::vector<Op>& ops);

  /// Makes the tasks of a step for `num_threads` threads. Long tasks come first, so that they do not end
  /// last.
  void make(const StepInput& input, int num_threads);
  /// Tasks of ops with these heads and runs, filled by make(). The vector's address does not change.
  [[nodiscard]] const std::vector<AttentionTask>& tasks_of(const AttentionShape& shape,
                                                           const RunRule& rule) const;

 private:
  struct Plan {
    AttentionShape shape;
    RunRule rule;
    std::vector<AttentionTask> tasks;
  };
  std::vector<Plan> plans_;
};

}  // namespace adaptrt
