#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "adaptrt/cpu/cpu_engine.h"
#include "adaptrt/program/ops.h"
#include "adaptrt/program/program.h"
#include "adaptrt/weight_file/weight_slots.h"
#include "ops/linear/row_groups.h"

namespace adaptrt {

/// The weights of an ExpertsOp that has only some of its experts in memory at a time.
class ExpertSlots {
 public:
  /// The weights of `op` must lie in the mapping of `memory`.
  ExpertSlots(const ExpertsOp& op, const WeightMemory& memory, std::shared_ptr<WeightFile> file,
              std::vector<FilePages> experts, std::size_t num_slots);

  /// Number of experts that can be in memory together.
  [[nodiscard]] std::size_t most() const { return slots_.num_slots(); }
  [[nodiscard]] const HugeArray& memory() const { return slots_.memory(); }

  /// Fills the slots with the most used experts; `counts` has each expert's number of uses. Throws StepError.
  void fill(std::span<const std::uint32_t> counts);

  /// Loads experts, given as the first_part of groups. Throws StepError.
  void bring(std::span<const RowGroup> experts);

  /// Like ExpertsOp's weights; only experts that bring() loaded have weights.
  [[nodiscard]] std::span<const LinearPart> gate_up() const { return gate_up_; }
  [[nodiscard]] std::span<const LinearPart> down() const { return down_; }

 private:
  void bring_wanted();
  void point(std::size_t expert);

  std::vector<LinearPart> gate_up_;
  std::vector<LinearPart> down_;
  std::vector<std::size_t> gate_up_offsets_;  ///< in the file
  std::vector<std::size_t> down_offsets_;
  std::vector<std::size_t> wanted_;
  WeightSlots slots_;
};

}  // namespace adaptrt
