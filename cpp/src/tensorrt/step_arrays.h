#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "adaptrt/engine/engine.h"
#include "adaptrt/tensorrt/tensorrt_engine.h"

namespace adaptrt {

/// The base model's place in adapter_slots.
inline constexpr std::int32_t kNoSlot = -1;

/// The sizes of one run of the plan; all shapes of its inputs follow from them.
struct RunShape {
  std::int32_t tokens = 0;
  std::int32_t sequences = 0;
  std::int32_t blocks_per_sequence = 0;
  std::int32_t logit_rows = 0;

  friend auto operator<=>(const RunShape&, const RunShape&) = default;
};

/// An int32 input of the plan that changes with each step.
struct StepArray {
  std::string_view name;
  std::vector<std::int64_t> dims;
  /// From the start of the step's memory, in bytes.
  std::size_t offset = 0;
};

/// The inputs that a step writes, one behind the other in one piece of memory, so that one copy takes them to
/// the device.
class StepArrays {
 public:
  explicit StepArrays(const TensorRtProgram& program);

  /// Bytes that are enough for every run.
  [[nodiscard]] std::size_t max_bytes() const { return max_bytes_; }
  /// Where everything is in a run of this shape.
  [[nodiscard]] std::vector<StepArray> places(const RunShape& shape) const;
  [[nodiscard]] std::size_t bytes(const RunShape& shape) const;

  /// Writes a step as a run of this shape, which is at least as large. Sequences of one slot come next to
  /// each other, the base model's first, so that the LoRA kernels see their tokens as one run. Logit rows
  /// keep their order. What the shape has beyond the step are sequences of one token without a block, and
  /// rows of token 0.
  ///
  /// `slots` [S] are the sequences' slots, `logit_rows` those of input.logit_rows that this run computes.
  void write(std::byte* memory, const RunShape& shape, const StepInput& input,
             std::span<const std::int32_t> slots, std::span<const std::int32_t> logit_rows);

  /// The number of blocks a sequence that runs of a step with so many have: a power of two, so that there are
  /// few shapes, and no more than a sequence can have.
  [[nodiscard]] std::int32_t padded_blocks(std::int32_t blocks_per_sequence) const;

 private:
  class Writer;

  bool has_prompt_lengths_;
  bool has_adapters_;
  std::int32_t max_blocks_per_sequence_;
  std::size_t max_bytes_ = 0;
  // Of the step that is written.
  std::vector<std::int32_t> order_;
  std::vector<std::int32_t> first_rows_;
};

}  // namespace adaptrt
