#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "adaptrt/device/device.h"
#include "adaptrt/tensorrt/tensorrt_engine.h"
#include "plan_runner.h"

namespace adaptrt {

/// Weights that are inputs of the plan, on the device.
class WeightInputs {
 public:
  /// Throws ConfigError when the device refuses the memory, StepError when a copy fails.
  WeightInputs(std::span<const TensorRtWeight> weights, Device& device, Stream& stream);

  /// Names the weights to a context.
  void bind(PlanRunner& runner) const;

 private:
  struct Weight {
    std::string name;
    std::vector<std::int64_t> shape;
    Allocation memory;
  };
  std::vector<Weight> weights_;
};

}  // namespace adaptrt
