#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "adaptrt/engine/step_profile.h"
#include "adaptrt/program/program.h"
#include "step.h"

namespace adaptrt {

/// Where ops pack their output for the linear layer that comes next, which then need not: a norm besides its
/// rows, and a layer behind an activation instead of them, where nothing else reads them.
class PackedOutputs {
 public:
  explicit PackedOutputs(const Program& program);

  /// Of op `number` of a section, with the rows of the step. Not there where the next op is another one,
  /// reads rows as they are, or has so few that it does.
  [[nodiscard]] PackedRows of(StepSection section, std::size_t number, const Step& step) const;

 private:
  struct Reader {
    const LinearOp* linear = nullptr;  ///< nullptr: the op packs nothing
    bool instead_of_rows = false;
    std::int64_t first_step = 0;  ///< of Step::packed
  };
  static std::vector<Reader> readers_of(const Program& program, const std::vector<Op>& ops);

  std::array<std::vector<Reader>, 3> readers_;  ///< by StepSection
};

/// Steps that Step::packed needs for the widest input, and for an input and an output that are both packed.
[[nodiscard]] std::int64_t most_packed_steps(const Program& program);

}  // namespace adaptrt
