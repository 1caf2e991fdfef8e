#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <vector>

namespace adaptrt {

/// What an op must move and multiply at least, however it is implemented: every element once. Bytes that stay
/// in a cache count as well; bytes that an implementation reads again do not.
struct OpCost {
  /// Base weights, norms, biases; of an embedding, the rows that are looked up.
  std::int64_t weight_bytes = 0;
  /// A, B and vectors of the different adapters of the step.
  std::int64_t adapter_bytes = 0;
  /// Keys and values: those that the step's tokens see, and the new ones once more as they are written.
  std::int64_t kv_bytes = 0;
  /// Buffers that are read and written.
  std::int64_t activation_bytes = 0;
  /// Of products with base weights, and of attention over the keys that each token sees; a multiply-add is
  /// two.
  std::int64_t flops = 0;
  /// Of products with A and B.
  std::int64_t adapter_flops = 0;

  bool operator==(const OpCost&) const = default;
};

/// Which part of a step an op belongs to.
enum class StepSection : std::uint8_t {
  kEncoder,  ///< Program::encoder, in steps with encoder inputs
  kBody,     ///< Program::body
  kHead,     ///< Program::head, once for each slice of logit rows
  kSink,     ///< the caller's LogitsSink, after each slice: in an executor, sampling
  kRanks,    ///< what rank 0 of several does beside and between its own ops: index is a RankWork
};

/// Of StepSection::kRanks.
enum class RankWork : std::uint8_t {
  kCommands,  ///< sends the step, and adapters that it needs, to the other ranks
  kResults,   ///< waits for what the last stage of a pipeline makes, and receives it
  /// Exchanges x A^T of fully sharded adapters, in the middle of a linear layer or of experts.
  kLowRankExchange,
};

/// One op of one step, or a part of it: between its parts is what ranks exchange in the middle. Times are
/// StepProfile::now().
struct OpRecord {
  StepSection section = StepSection::kBody;
  /// Index into the section's ops.
  std::int32_t index = 0;
  double begin = 0.0;
  double end = 0.0;
  /// Another part of the op was recorded before this one.
  bool is_continued = false;
  /// Of the whole op, with the last of its parts.
  OpCost cost;
  /// By thread of the pool: seconds between begin and end in which it ran a part of the op. Empty where the
  /// pool has no part in it.
  std::vector<double> busy_seconds;
};

/// One step: its ops one after another, within [begin, end].
struct StepRecord {
  double begin = 0.0;
  double end = 0.0;
  std::int64_t num_tokens = 0;
  std::int64_t num_sequences = 0;
  /// Different adapters of the step.
  std::int64_t num_adapters = 0;
  std::int64_t num_logit_rows = 0;
  std::vector<OpRecord> ops;
};

struct StepInput;

/// A record of a step that has no times and ops yet.
[[nodiscard]] StepRecord record_of(const StepInput& input);

/// Records of an engine's newest steps. Thread-safe.
class StepProfile {
 public:
  /// Keeps `max_steps` records; older ones make room. Throws ConfigError for 0.
  explicit StepProfile(std::size_t max_steps);

  /// Seconds since this was made.
  [[nodiscard]] double now() const;

  void add(StepRecord record);
  /// Until end_joined(), the ops of records that are added become part of this one: rank 0 of several runs a
  /// step of its own program, or several, in each step. One that is begun and not ended, because it threw,
  /// leaves no record.
  void begin_joined(StepRecord record);
  void add_to_joined(OpRecord op);
  void end_joined();
  /// The records since the last call, oldest first.
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
