#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "adaptrt/device/device.h"
#include "adaptrt/tensorrt/plan_context.h"
#include "step_arrays.h"

namespace adaptrt {

/// Runs a plan in one of its profiles. A context is told only what changed since its last run.
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
  /// preparations for a shape then, and is captured after that. A graph may use what its context keeps for a
  /// shape, so each has a context of its own, which is never set to another.
  void run_graph(const RunShape& shape, Stream& stream);

 private:
  /// A tensor that stays where it is; an output has no dims.
  struct FixedTensor {
    std::string name;
    std::optional<std::vector<std::int64_t>> dims;
    std::byte* address = nullptr;
  };
  /// The graph goes before its context; there is none yet where a step failed on the way to it.
  struct Graph {
    std::unique_ptr<PlanContext> context;
    std::unique_ptr<CapturedGraph> work;
  };

  void set_fixed(FixedTensor tensor);
  void set_shape(PlanContext& context, const RunShape& shape) const;

  std::unique_ptr<PlanContext> context_;
  const StepArrays& arrays_;
  std::byte* step_memory_;
  std::vector<FixedTensor> fixed_;
  /// What the context is set to.
  std::optional<RunShape> shape_;
  std::map<RunShape, Graph> graphs_;
};

}  // namespace adaptrt
