#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <vector>

namespace adaptrt {

/// Minimal work of an op, independent of its implementation: every element is read, written or multiplied
/// once. Bytes that stay in a cache count too; bytes that an implementation reads again do not.
struct OpCost {
  /// Base weights, norms and biases; for an embedding, only the rows that are looked up.
  std::int64_t weight_bytes = 0;
  /// A, B and vectors of the different adapters of the step.
  std::int64_t adapter_bytes = 0;
  /// Keys and values that the step's tokens see. New ones count twice, because they are also written.
  std::int64_t kv_bytes = 0;
  /// Buffers that the op reads and writes.
  std::int64_t activation_bytes = 0;
  /// Operations of products with base weights, and of attention over the keys that each token sees. A
  /// multiply-add counts as two.
  std::int64_t flops = 0;
  /// Operations of products with A and B.
  std::int64_t adapter_flops = 0;

  bool operator==(const OpCost&) const = default;
};

/// Part of a step that an op belongs to.
enum class StepSection : std::uint8_t {
  kEncoder,  ///< Program::encoder, in steps with encoder inputs
  kBody,     ///< Program::body
  kHead,     ///< Program::head, once for each slice of logit rows
  kSink,     ///< the caller's LogitsSink, after each slice: in an executor, sampling
  kRanks,    ///< work of rank 0 between its ops, with several ranks: index is a RankWork
};

/// Kinds of work in StepSection::kRanks.
enum class RankWork : std::uint8_t {
  kCommands,  ///< sends the step, and adapters that it needs, to the other ranks
  kResults,   ///< waits for the results of a pipeline's last stage, and receives them
  /// Exchanges x A^T of fully sharded adapters, in the middle of a linear layer or of experts.
  kLowRankExchange,
};

/// One op of one step, or a part of it: an op has two parts if ranks exchange values in its middle. Times
/// are StepProfile::now().
struct OpRecord {
  StepSection section = StepSection::kBody;
  /// Index into the section's ops.
  std::int32_t index = 0;
  double begin = 0.0;
  double end = 0.0;
  /// True if another part of the op was recorded before this one.
  bool is_continued = false;
  /// Cost of the whole op; it is in the record of the last part.
  OpCost cost;
  /// Seconds between begin and end in which each thread of the pool worked on the op. Empty if the pool did
  /// not.
  std::vector<double> busy_seconds;
};

/// One step, with its ops in order, within [begin, end].
struct StepRecord {
  double begin = 0.0;
  double end = 0.0;
  std::int64_t num_tokens = 0;
  std::int64_t num_sequences = 0;
  /// Number of different adapters in the step.
  std::int64_t num_adapters = 0;
  std::int64_t num_logit_rows = 0;
  std::vector<OpRecord> ops;
};

struct StepInput;

/// Returns the record of a step, still without times and ops.
[[nodiscard]] StepRecord record_of(const StepInput& input);

/// Keeps records of an engine's newest steps. Thread-safe.
class StepProfile {
 public:
  /// Keeps the newest `max_steps` records. Throws ConfigError for 0.
  explicit StepProfile(std::size_t max_steps);

  /// Seconds since this object was made.
  [[nodiscard]] double now() const;

  void add(StepRecord record);
  /// Begins a record that collects the ops of all records added until end_joined(). With several ranks, rank
  /// 0 runs one or more steps of its own program within each step. A record that is begun and not ended,
  /// because a step threw, is dropped.
  void begin_joined(StepRecord record);
  void add_to_joined(OpRecord op);
  void end_joined();
  /// Returns the records since the last call, oldest first.
  [[nodiscard]] std::vector<StepRecord> take_steps();

 private:
  using Clock = std::chrono::steady_clock;
  void keep(StepRecord record);

  std::size_t max_steps_;
  Clock::time_point made_ = Clock::now();
  std::mutex mutex_;
  std::optional<StepRecord> joined_;
  std::deque<StepRecord> steps_;
};

}  // namespace adaptrt
