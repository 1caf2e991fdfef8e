#pragma once

#include <cstddef>
#include <vector>

#include "adaptrt/engine/step_profile.h"
#include "lowered_op.h"

namespace adaptrt {

/// The ops of one section of a program, ready to run.
class LoweredSection {
 public:
  /// `context`, its program and `rows` must outlive this object.
  LoweredSection(StepSection section, const std::vector<Op>& ops, const CpuContext& context,
                 const SectionRows& rows);

  [[nodiscard]] std::size_t size() const { return ops_.size(); }
  [[nodiscard]] StepSection section() const { return section_; }
  /// The program's op `number`.
  [[nodiscard]] const Op& op(std::size_t number) const { return program_ops_[number]; }
  void run(std::size_t number, Step& step) const { ops_[number]->run(step); }

 private:
  StepSection section_;
  const std::vector<Op>& program_ops_;
  std::vector<LoweredOpPtr> ops_;
};

}  // namespace adaptrt
