#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "adaptrt/cuda/paged_attention_kernel.h"

namespace adaptrt::cuda {

/// A sequence of a step: `tokens` new tokens after `past` positions in the pool. Padding has no blocks.
struct SequenceOfStep {
  std::int32_t past = 0;
  std::int32_t tokens = 1;
  bool padding = false;
};

/// Sizes of a step that do not depend on its sequences.
struct StepSizes {
  std::int32_t tokens_per_block = 32;
  std::int32_t max_blocks = 8;
  std::int32_t rotary_half = -1;  ///< 0: heads are not rotated; -1: half the head
  float magnitude = 1.0F;         ///< magnitude of queries and keys
  bool fused = false;             ///< q, k and v are columns of one buffer, which has more columns
  bool sinks = false;             ///< heads have sinks
  bool counters = true;           ///< the caller has counters; otherwise they are in the workspace
};

/// A step with random inputs in host memory, for the emulated kernels and a float64 reference. Everything
/// that kernels must not read is NaN: pool slots without tokens, blocks of no sequence, the workspace.
class RandomAttentionStep {
 public:
  RandomAttentionStep(const PagedAttentionConfig& config, const StepSizes& sizes,
                      const std::vector<SequenceOfStep>& sequences, std::mt19937& random);

  /// Runs the kernels with a workspace of exactly the size that they ask for, and blocks in ascending,
  /// descending and random order, in turn. `has_keys`: false gives them no keys and values, so that they take
  /// those of the step from the pool. Throws if the kernels leave counters that are not zero.
  void run(bool has_keys = true);

  /// Lists errors after run(): results that differ from the reference by more than rounding, pool elements
  /// that were written wrongly, or that the step must not write. Empty if there are none.
  [[nodiscard]] std::string problems() const;

  /// Returns tokens begin .. end - 1, all of one sequence, as a step of their own over the same pool.
  [[nodiscard]] RandomAttentionStep part(std::int32_t begin, std::int32_t end) const;

  /// Adds sequences of padding, with NaN as their queries, keys and values.
  void append(const std::vector<SequenceOfStep>& padding);

  /// Results of tokens begin .. end - 1, as bits.
  [[nodiscard]] std::vector<std::uint16_t> attended(std::int32_t begin, std::int32_t end) const;

  /// A pool's content.
  struct Pool {
    std::vector<std::uint16_t> values;  ///< its elements; of an int8 pool, what it stands for, rounded to T
    std::vector<std::int8_t> integers;  ///< the bytes of an int8 pool
    bool operator==(const Pool&) const = default;
  };
  [[nodiscard]] Pool pool() const { return {pool_, int8_pool_}; }
  void set_pool(const Pool& pool) {
    pool_ = pool.values;
    int8_pool_ = pool.integers;
  }
  /// Chooses the kernel of prefills.
  void set_hopper_prefill(bool value) { config_.hopper_prefill = value; }
  /// Makes keys and values NaN that no token's window reaches. Their blocks become -1, or blocks of no
  /// sequence.
  void forget_unseen_keys();
  void set_counters(bool of_caller) { sizes_.counters = of_caller; }
  /// Sets one element of a token's key (head 0).
  void set_key(std::int32_t token, std::int32_t element, float value);
  [[nodiscard]] std::int32_t tokens() const { return static_cast<std::int32_t>(positions_.size()); }

 private:
  [[nodiscard]] std::uint16_t round(float value) const;
  [[nodiscard]] float widen(std::uint16_t bits) const;
  [[nodiscard]] std::int32_t block_of(std::size_t sequence, std::int32_t position) const;
  [[nodiscard]] std::size_t pool_row(std::int32_t block, int part, std::int32_t kv_head,
                                     std::int32_t slot) const;
  [[nodiscard]] std::vector<std::uint16_t> random_elements(std::size_t count, float magnitude,
                                                           std::mt19937& random) const;
  [[nodiscard]] std::vector<float> turn(const std::uint16_t* head, std::int32_t token) const;
  [[nodiscard]] std::vector<std::uint16_t> rotate(const std::uint16_t* head, std::int32_t token,
                                                  double factor = 1.0) const;
  /// The factor of a query.
  [[nodiscard]] double query_factor(std::int32_t position) const;
  [[nodiscard]] std::int32_t first_visible(std::int32_t position) const;
  [[nodiscard]] std::vector<std::uint16_t> expected_pool() const;
  [[nodiscard]] std::string compare_head(std::size_t sequence, std::int32_t token, std::int32_t head) const;
  void fill_tables(const std::vector<SequenceOfStep>& sequences, std::mt19937& random);
  /// Quantises the pool's rows that hold keys or values of earlier tokens.
  void quantize_past();
  /// Compares the rows of the step's tokens in the int8 pool with their keys and values, and checks that the
  /// rest has not changed. Sets pool_ to the values of the new rows.
  [[nodiscard]] std::string check_int8_pool();
  [[nodiscard]] std::size_t block_bytes() const;
  /// Index in the int8 pool of a row that is at `row` in a plain one, and of its scale.
  [[nodiscard]] std::size_t element_of_row(std::size_t row) const;
  [[nodiscard]] std::size_t scale_of_row(std::size_t row) const;
  void fill_past(const std::vector<SequenceOfStep>& sequences, std::mt19937& random);

  PagedAttentionConfig config_;
  StepSizes sizes_;
  std::int32_t num_blocks_ = 0;
  std::vector<std::int32_t> sequence_offsets_;
  std::vector<std::int32_t> positions_;
  std::vector<std::int32_t> block_tables_;
  std::vector<std::uint16_t> q_;
  std::vector<std::uint16_t> k_;
  std::vector<std::uint16_t> v_;
  std::vector<std::uint16_t> pool_;
  std::vector<std::uint16_t> pool_before_;
  std::vector<std::int8_t> int8_pool_;
  std::vector<std::int8_t> int8_pool_before_;
  std::string int8_problems_;
  std::vector<std::uint16_t> attended_;
  std::vector<float> cosine_;
  std::vector<float> sine_;
  std::vector<float> sinks_;
};

}  // namespace adaptrt::cuda
