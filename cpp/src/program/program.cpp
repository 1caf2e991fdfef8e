#include "adaptrt/program/program.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <string_view>
#include <variant>

#include "validator.h"

namespace adaptrt {

std::string_view name_of(const Op& op) {
  static constexpr std::array<std::string_view, std::variant_size_v<Op>> kNames = {"embedding",
                                                                                   "rope table",
                                                                                   "rms norm",
                                                                                   "attention",
                                                                                   "linear",
                                                                                   "keep logit rows",
                                                                                   "layer norm",
                                                                                   "cast",
                                                                                   "experts",
                                                                                   "gated add",
                                                                                   "cross keys",
                                                                                   "cross attention",
                                                                                   "all reduce",
                                                                                   "gather",
                                                                                   "receive",
                                                                                   "send",
                                                                                   "all heads norm",
                                                                                   "broadcast",
                                                                                   "sigmoid gate",
                                                                                   "gated rms norm",
                                                                                   "causal convolution",
                                                                                   "gated delta",
                                                                                   "gated convolution",
                                                                                   "selective scan",
                                                                                   "xielu",
                                                                                   "latent queries",
                                                                                   "latent values",
                                                                                   "gated columns",
                                                                                   "add given columns",
                                                                                   "join columns",
                                                                                   "join neighbours"};
  return kNames[op.index()];
}

std::size_t Program::num_ops_to_hidden() const {
  const auto writes_hidden = [&](const Op& op) {
    const auto* rms_norm = std::get_if<RmsNormOp>(&op);
    const auto* layer_norm = std::get_if<LayerNormOp>(&op);
    const auto* join = std::get_if<JoinColumnsOp>(&op);
    return (rms_norm != nullptr && rms_norm->output == hidden) ||
           (layer_norm != nullptr && layer_norm->output == hidden) ||
           (join != nullptr && join->output == hidden);
  };
  const auto found = std::ranges::find_if(head, writes_hidden);
  return static_cast<std::size_t>(found - head.begin()) + (found == head.end() ? 0 : 1);
}

Problems Program::validate() const {
  return Validator(*this).run();
}

}  // namespace adaptrt
