#pragma once

#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "adaptrt/gpu/gpu_model.h"
#include "adaptrt/tensorrt/tensorrt_engine.h"
#include "plan_runner.h"
#include "weight_inputs.h"

namespace adaptrt {

/// A TensorRT plan as a model: gives the arrays of steps to its contexts, under the names of the plan's
/// tensors.
class TensorRtModel final : public GpuModel {
 public:
  TensorRtModel(std::vector<TensorRtWeight> weights, TensorRtContexts contexts);

  void load(const StepArrays& step_arrays, const GpuModelArrays& arrays, Device& device,
            Stream& stream) override;
  void set_kv_pools(std::span<const DeviceArray> pools) override;
  void run(GpuStepKind kind, const RunShape& shape, Stream& stream) override;
  [[nodiscard]] std::function<void(Stream&)> make_graph_work(const RunShape& shape) override;

 private:
  std::vector<TensorRtWeight> weights_;  ///< empty after load()
  std::optional<WeightInputs> inputs_;
  PlanRunner prefill_;
  PlanRunner decode_;
};

}  // namespace adaptrt
