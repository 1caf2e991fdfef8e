#pragma once

#include <cstdint>
#include <vector>

#include "adaptrt/engine/engine.h"
#include "adaptrt/engine/microbatches.h"

namespace adaptrt {

/// Encoder inputs of a step as the input of the encoder's ops: each one is a sequence of a separate step.
/// Steps reuse the memory.
class EncoderStep {
 public:
  /// Sets the inputs of a run, or all inputs. `step` must outlive the use of input().
  void set(const StepInput& step, const SequenceRun& run);
  void set(const StepInput& step) { set(step, {0, step.encoder.offsets.size() - 1}); }

  [[nodiscard]] const StepInput& input() const { return input_; }

 private:
  StepInput input_;
  std::vector<std::int32_t> offsets_;
  std::vector<std::int32_t> positions_;
  std::vector<std::int32_t> lengths_;
};

}  // namespace adaptrt
