#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "adaptrt/engine/engine.h"
#include "adaptrt/engine/engine_fields.h"
#include "adaptrt/engine/microbatches.h"

namespace adaptrt {

/// A micro-batch: consecutive tokens of a step as a step of their own, with the part of each sequence that
/// they cover. Running the micro-batches in order gives the same bits as the whole step: earlier tokens of a
/// sequence are in the KV pool or in the same micro-batch.
class Microbatch {
 public:
  /// Tokens [begin, end) of `step`; this is a view of it. The first micro-batch has the copies of KV blocks.
  /// A step with encoder inputs must be one micro-batch.
  Microbatch(const StepInput& step, std::int32_t begin, std::int32_t end);

  [[nodiscard]] StepInput input() const;

 private:
  StepInput views_;  // except for offsets and rows, which are counted anew
  /// Offsets and rows, by index in kStepInputArrays.
  std::array<std::vector<std::int32_t>, kStepInputArrays.size()> lists_;
};

/// Splits a step into micro-batches, so that pipeline stages work at the same time: as many as have at least
/// kMinMicrobatchTokens tokens each. If tokens attend to later tokens, micro-batches have whole sequences. A
/// step stays whole if it has encoder inputs (they have their own micro-batches) or more rows of logits than
/// one transfer takes (EngineInfo::max_batch_size).
[[nodiscard]] std::vector<Microbatch> split_into_microbatches(const StepInput& step, const EngineInfo& info);

}  // namespace adaptrt
