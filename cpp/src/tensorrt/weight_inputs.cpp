#include "weight_inputs.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace adaptrt {
namespace {

/// Weights are copied through pinned memory in pieces, because mapped files are not pinned.
constexpr std::size_t kPieceBytes = std::size_t{16} << 20;

}  // namespace

WeightInputs::WeightInputs(std::span<const TensorRtWeight> weights, Device& device, Stream& stream) {
  std::size_t largest = 0;
  for (const TensorRtWeight& weight : weights) largest = std::max(largest, weight.data.size());
  const Allocation piece = device.allocate_pinned(std::min(largest, kPieceBytes));
  for (const TensorRtWeight& weight : weights) {
    Allocation memory = device.allocate(weight.data.size());
    for (std::size_t done = 0; done < weight.data.size();) {
      const std::size_t bytes = std::min(piece.bytes(), weight.data.size() - done);
      std::memcpy(piece.data(), weight.data.data() + done, bytes);
      stream.copy_to_device(memory.data() + done, piece.data(), bytes);
      stream.synchronize();
      done += bytes;
    }
    weights_.push_back({weight.name, weight.shape, std::move(memory)});
  }
}

void WeightInputs::bind(PlanRunner& runner) const {
  for (const Weight& weight : weights_) {
    runner.set_input(weight.name, {.dims = weight.shape, .address = weight.memory.data()});
  }
}

}  // namespace adaptrt
