#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace adaptrt {

// What is true of all ways in which a step passes the stages of a pipeline in pieces.

/// Below this, reading the weights once more takes longer than what stages gain by working at the same time.
inline constexpr std::int32_t kTokensOfPiece = 64;

/// Sequences [first, last) of a step.
struct SequenceRun {
  std::size_t first = 0;
  std::size_t last = 0;

  bool operator==(const SequenceRun&) const = default;
};

/// All sequences of a step, none of them cut: as many runs of at least kTokensOfPiece tokens as there are
/// when each ends as soon as it has them. `offsets` are StepInput::sequence_offsets or
/// EncoderInputs::offsets.
[[nodiscard]] std::vector<SequenceRun> runs_of_whole_sequences(std::span<const std::int32_t> offsets);

}  // namespace adaptrt
