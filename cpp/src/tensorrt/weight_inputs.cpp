#include "weight_inputs.h"

#include <algorithm>
#include <utility>

#include "adaptrt/gpu/staged_copies.h"

namespace adaptrt {

WeightInputs::WeightInputs(std::span<const TensorRtWeight> weights, Device& device, Stream& stream) {
  if (weights.empty()) return;
  std::size_t largest = 0;
  for (const TensorRtWeight& weight : weights) largest = std::max(largest, weight.data.size());
  StagedCopies copies(device, stream, std::min(largest, StagedCopies::kHalfBytes));
  for (const TensorRtWeight& weight : weights) {
    weights_.push_back({weight.name, weight.shape, device.allocate(weight.data.size())});
    copies.copy(weights_.back().memory.data(), weight.data);
  }
  copies.finish();
}

void WeightInputs::bind(PlanRunner& runner) const {
  for (const Weight& weight : weights_) {
    runner.set_input(weight.name, {.dims = weight.shape, .address = weight.memory.data()});
  }
}

}  // namespace adaptrt
