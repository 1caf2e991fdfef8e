#pragma once

#include <variant>
#include <vector>

#include "adaptrt/program/program.h"

namespace adaptrt {

/// Calls visit(weight) for the linear layers of a program.
template <class Visit>
void for_each_weight(const Program& program, const Visit& visit) {
  const auto visit_all = [&](const std::vector<LinearPart>& parts) {
    for (const LinearPart& part : parts) visit(part.weight);
  };
  for (const auto* ops : program.sections()) {
    for (const auto& op : *ops) {
      if (const auto* linear = std::get_if<LinearOp>(&op)) visit_all(linear->parts);
      if (const auto* experts = std::get_if<ExpertsOp>(&op)) {
        visit_all(experts->gate_up);
        visit_all(experts->down);
      }
    }
  }
}

}  // namespace adaptrt
