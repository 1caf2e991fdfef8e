#include "adaptrt/program/state_layout.h"

#include <variant>

namespace adaptrt {

StateLayout::StateLayout(const Program& program) : layers_(static_cast<std::size_t>(program.num_layers)) {
  for (const Op& op : program.body) {
    if (const auto* convolution = std::get_if<CausalConvolutionOp>(&op)) {
      layers_[static_cast<std::size_t>(convolution->layer)].convolution = place(convolution->state_size());
    } else if (const auto* gated = std::get_if<GatedConvolutionOp>(&op)) {
      layers_[static_cast<std::size_t>(gated->layer)].convolution = place(gated->state_size());
    } else if (const auto* scan = std::get_if<SelectiveScanOp>(&op)) {
      layers_[static_cast<std::size_t>(scan->layer)].scan = place(scan->shape.state_size());
    } else if (const auto* delta = std::get_if<GatedDeltaOp>(&op)) {
      layers_[static_cast<std::size_t>(delta->layer)].delta = place(delta->shape.state_size());
    }
  }
}

std::size_t StateLayout::place(std::int64_t floats) {
  constexpr std::size_t kAlignment = 64;
  const std::size_t offset = slot_bytes_;
  const std::size_t bytes = static_cast<std::size_t>(floats) * sizeof(float);
  slot_bytes_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  return offset;
}

}  // namespace adaptrt
