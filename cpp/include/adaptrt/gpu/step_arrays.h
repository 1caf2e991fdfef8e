#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "adaptrt/engine/engine.h"
#include "adaptrt/gpu/gpu_model_description.h"

namespace adaptrt {

/// Value in adapter_slots for the base model, and in state_slots for padding.
inline constexpr std::int32_t kNoSlot = -1;

/// Sizes of one run of the model, which determine all shapes of its inputs, and the work that it needs.
struct RunShape {
  std::int32_t tokens = 0;
  std::int32_t sequences = 0;
  std::int32_t blocks_per_sequence = 0;
  std::int32_t logit_rows = 0;
  /// False: no sequence of the run has an adapter, and the model skips unused adapters.
  bool has_adapters = true;
  /// Number of sequences with tokens on both sides of their adapter's start position. 0 unless the model has
  /// such positions.
  std::int32_t split_sequences = 0;
  /// False: sequences' states stay as they were before the run, because another run of the same step follows.
  bool advances_states = true;

  friend auto operator<=>(const RunShape&, const RunShape&) = default;
};

/// An int32 array that changes in each step.
struct StepArray {
  std::vector<std::int64_t> dims;
  /// Byte offset from the start of the step's memory.
  std::size_t offset = 0;
};

/// The arrays of a run of T tokens, S sequences and R logit rows.
struct StepPlaces {
  StepArray token_ids;         ///< [T]
  StepArray positions;         ///< [T]
  StepArray sequence_offsets;  ///< [S + 1]
  StepArray block_tables;      ///< [S, blocks_per_sequence]
  StepArray logit_rows;        ///< [R]
  /// [S], only where the model has prompt lengths
  std::optional<StepArray> prompt_lengths;
  /// Only with LoRA: the slot of each range of tokens. [S]; with start positions, [S + split sequences],
  /// because the tokens before its adapter's start position are a range without an adapter.
  std::optional<StepArray> adapter_slots;
  /// [ranges + 1], first token of each range; only with start positions
  std::optional<StepArray> adapter_offsets;
  /// [T], the slot of each token, where adapters change the embedding, experts or norms, or add tokens
  std::optional<StepArray> token_adapter_slots;
  /// Where adapters change lm_head or norms, or add tokens: the slot of each row of logits [R], and 0 .. R
  /// [R + 1], since each row is a range of its own
  std::optional<StepArray> row_adapter_slots;
  std::optional<StepArray> row_adapter_offsets;
  /// [S], only where the model keeps states: the slot of each sequence's state
  std::optional<StepArray> state_slots;
  std::size_t bytes = 0;  ///< of all of them
};

/// The inputs that each step writes. They are contiguous, so that one copy moves them to the device.
class StepArrays {
 public:
  explicit StepArrays(const GpuModelDescription& model);

  /// Number of bytes that is enough for every run.
  [[nodiscard]] std::size_t max_bytes() const { return max_bytes_; }
  /// Returns the location of each array in a run of this shape.
  [[nodiscard]] StepPlaces places(const RunShape& shape) const;

  /// Writes a step as a run of `shape`, which must be at least as large. Sequences of one slot are placed
  /// next to each other, the base model's first, so that the LoRA kernels see their tokens as one range.
  /// Logit rows keep their order. The rest of the shape is padded with one-token sequences without a block,
  /// and with rows of token 0.
  ///
  /// `slots` [S]: the sequences' slots. `logit_rows`: the rows of logits that this run computes, as indices
  /// into the input's tokens.
  /// Returns the number of bytes written.
  std::size_t write(std::byte* memory, const RunShape& shape, const StepInput& input,
                    std::span<const std::int32_t> slots, std::span<const std::int32_t> logit_rows);

  /// Returns RunShape::split_sequences of a step. `slots` [S]: the sequences' slots.
  [[nodiscard]] std::int32_t split_sequences(const StepInput& input,
                                             std::span<const std::int32_t> slots) const;

  /// Rounds the blocks per sequence of a step up to a power of two, so that there are few shapes, but not
  /// above the maximum of a sequence.
  [[nodiscard]] std::int32_t padded_blocks(std::int32_t blocks_per_sequence) const;

 private:
  bool has_prompt_lengths_;
  bool has_adapters_;
  bool has_adapter_starts_;
  bool has_token_adapters_;
  bool has_row_adapters_;
  bool has_states_;
  std::int32_t max_blocks_per_sequence_;
  std::size_t max_bytes_ = 0;
  // Scratch of write():
  std::vector<std::int32_t> order_;
  std::vector<std::int32_t> first_rows_;
};

}  // namespace adaptrt
