#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace adaptrt {

// Rules for cutting a step of a pipeline into micro-batches.

/// With fewer tokens, reading the weights once more takes longer than the stages gain by working in parallel.
inline constexpr std::int32_t kMinMicrobatchTokens = 64;

/// Sequences [first, last) of a step.
struct SequenceRun {
  std::size_t first = 0;
  std::size_t last = 0;

  bool operator==(const SequenceRun&) const = default;
};

/// Cuts a step between its sequences: each run ends as soon as it has kMinMicrobatchTokens tokens, and the
/// last one has the rest. `offsets` are StepInput::sequence_offsets or EncoderInputs::offsets.
[[nodiscard]] std::vector<SequenceRun> runs_of_whole_sequences(std::span<const std::int32_t> offsets);

}  // namespace adaptrt
