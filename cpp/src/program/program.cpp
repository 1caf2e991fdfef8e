#include "adaptrt/program/program.h"

#include <algorithm>
#include <cstddef>
#include <variant>

#include "validator.h"

namespace adaptrt {

std::size_t Program::num_ops_to_hidden() const {
  const auto writes_hidden = [&](const Op& op) {
    const auto* rms_norm = std::get_if<RmsNormOp>(&op);
    const auto* layer_norm = std::get_if<LayerNormOp>(&op);
    return (rms_norm != nullptr && rms_norm->output == hidden) ||
           (layer_norm != nullptr && layer_norm->output == hidden);
  };
  const auto found = std::ranges::find_if(head, writes_hidden);
  return static_cast<std::size_t>(found - head.begin()) + (found == head.end() ? 0 : 1);
}

Problems Program::validate() const {
  return Validator(*this).run();
}

}  // namespace adaptrt
