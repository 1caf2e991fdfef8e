#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "adaptrt/device/device.h"
#include "adaptrt/gpu/gpu_model.h"
#include "adaptrt/gpu/step_arrays.h"
#include "adaptrt/tensorrt/plan_context.h"

namespace adaptrt {

/// Runs a plan in one of its profiles. It sets only the tensors that changed since the last run.
class PlanRunner {
 public:
  explicit PlanRunner(std::unique_ptr<PlanContext> context);

  /// A step's arrays are copied to `step_memory`. Called before the first run; `arrays` must outlive the
  /// runner.
  void set_step_arrays(const StepArrays& arrays, std::byte* step_memory);
  /// Sets a tensor whose address does not change between steps.
  void set_input(std::string_view name, const DeviceArray& array);
  void set_output(std::string_view name, std::byte* address);

  /// Enqueues a run on the stream.
  void run(const RunShape& shape, Stream& stream);
  /// Returns a function that enqueues a run of this shape. A graph may use its context's data for a shape, so
  /// the function has a context of its own, which is never set to another shape.
  [[nodiscard]] std::function<void(Stream&)> make_graph_work(const RunShape& shape) const;

 private:
  /// A tensor whose address does not change; an output has no dims.
  struct FixedTensor {
    std::string name;
    std::optional<std::vector<std::int64_t>> dims;
    std::byte* address = nullptr;
  };

  void set_fixed(FixedTensor tensor);
  void set_shape(PlanContext& context, const RunShape& shape) const;

  std::unique_ptr<PlanContext> context_;
  const StepArrays* arrays_ = nullptr;
  std::byte* step_memory_ = nullptr;
  std::vector<FixedTensor> fixed_;
  /// The shape that the context is set to.
  std::optional<RunShape> shape_;
};

}  // namespace adaptrt
