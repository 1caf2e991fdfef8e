#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "adaptrt/device/device.h"
#include "adaptrt/tensorrt/tensorrt_engine.h"
#include "plan_runner.h"

namespace adaptrt {

/// Weights on the device that are inputs of the plan.
class WeightInputs {
 public:
  /// Throws ConfigError if the device cannot allocate the memory, StepError if a copy fails.
  WeightInputs(std::span<const TensorRtWeight> weights, Device& device, Stream& stream);

  /// Sets the weights as inputs of a context.
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
