#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "adaptrt/device/device.h"
#include "adaptrt/tensorrt/plan_context.h"
#include "step_arrays.h"

namespace adaptrt {

/// Runs a plan in one of its profiles. The context is told only what changed since the last run.
class PlanRunner {
 public:
  /// `step_memory` is where a step's arrays are copied to; it and `arrays` outlive the runner.
  PlanRunner(std::unique_ptr<PlanContext> context, const StepArrays& arrays, std::byte* step_memory);

  /// A tensor that stays where it is from step to step.
  void set_input(std::string_view name, std::span<const std::int64_t> dims, std::byte* address);
  void set_output(std::string_view name, std::byte* address);

  /// Puts a run into the stream.
  void run(const RunShape& shape, Stream& stream);
  /// The same by a graph of runs of this shape. The first one runs as it is, because TensorRT finishes its
  /// preparations for a shape then, and is captured after that.
  void run_graph(const RunShape& shape, Stream& stream);

 private:
  void set_shape(const RunShape& shape);

  std::unique_ptr<PlanContext> context_;
  const StepArrays& arrays_;
  std::byte* step_memory_;
  /// What the context is set to.
  std::optional<RunShape> shape_;
  std::map<RunShape, std::unique_ptr<CapturedGraph>> graphs_;
};

}  // namespace adaptrt
