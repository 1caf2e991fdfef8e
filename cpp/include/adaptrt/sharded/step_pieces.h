#pragma once

#include <cstdint>
#include <vector>

#include "adaptrt/engine/engine.h"
#include "adaptrt/engine/pieces.h"

namespace adaptrt {

/// Consecutive tokens of a step as a step of their own, with as much of a sequence as is among them. A step
/// gives the same results as its pieces in turn, bit for bit: what a token sees of its own sequence is in the
/// KV pool by then, or in its piece.
class StepPiece {
 public:
  /// Tokens [begin, end) of `step`, of which it is a view. The first one has the copies of KV blocks; where
  /// there are encoder inputs, it is all of the step.
  StepPiece(const StepInput& step, std::int32_t begin, std::int32_t end);

  [[nodiscard]] StepInput input() const;

 private:
  StepInput views_;  // but for the lists below
  std::vector<std::int32_t> sequence_offsets_;
  std::vector<std::int32_t> logit_rows_;
  std::vector<std::int32_t> hidden_rows_;
};

/// The pieces in which a step of an engine of several stages passes through them, so that stages work at the
/// same time: as many of at least kTokensOfPiece tokens as there are. Where tokens see those behind them,
/// pieces have whole sequences. A step with encoder inputs, which pass in pieces of their own, is one piece,
/// and so is one with more rows of logits than come at a time (EngineInfo::max_batch_size).
[[nodiscard]] std::vector<StepPiece> pieces_of(const StepInput& step, const EngineInfo& info);

}  // namespace adaptrt
