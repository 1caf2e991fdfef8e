#pragma once

#include <cstdint>
#include <vector>

#include "adaptrt/engine/engine.h"

namespace adaptrt {

/// Consecutive tokens of a step as a step of their own, with as much of a sequence as is among them. A step
/// gives the same results as its pieces in turn, bit for bit: what a token sees of its own sequence is in the
/// KV pool by then.
class StepPiece {
 public:
  /// Tokens [begin, end) of `step`, of which it is a view. The first one has the copies of KV blocks.
  StepPiece(const StepInput& step, std::int32_t begin, std::int32_t end);

  [[nodiscard]] StepInput input() const;

 private:
  StepInput views_;  // but for the lists below
  std::vector<std::int32_t> sequence_offsets_;
  std::vector<std::int32_t> logit_rows_;
  std::vector<std::int32_t> hidden_rows_;
};

/// The pieces in which a step of an engine of several stages passes through them, so that stages work at the
/// same time: as many of at least kTokensOfPiece tokens as there are. One with more rows of results than a
/// step returns at once (EngineInfo::max_batch_size) is one piece.
[[nodiscard]] std::vector<StepPiece> pieces_of(const StepInput& step, const EngineInfo& info);

/// Below this, reading the weights once more takes longer than what stages gain by working at the same time.
inline constexpr std::int32_t kTokensOfPiece = 64;

}  // namespace adaptrt
