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

/// Runs a plan in one of its profiles. It sets only the tensors that changed since the last run.
class PlanRunner {
 public:
  /// A step's arrays are copied to `step_memory`. It and `arrays` must outlive the runner.
  PlanRunner(std::unique_ptr<PlanContext> context, const StepArrays& arrays, std::byte* step_memory);

  /// Sets a tensor whose address does not change between steps.
  void set_input(std::string_view name, std::span<const std::int64_t> dims, std::byte* address);
  void set_output(std::string_view name, std::byte* address);

  /// Enqueues a run on the stream.
  void run(const RunShape& shape, Stream& stream);
  /// Runs as a graph for this shape. The first run of a shape is a normal run, because TensorRT finishes its
  /// preparations for the shape then; after it the graph is captured. A graph may use its context's data for
  /// a shape, so each graph has a context that is never set to another shape.
  void run_graph(const RunShape& shape, Stream& stream);

 private:
  /// A tensor whose address does not change; an output has no dims.
  struct FixedTensor {
    std::string name;
    std::optional<std::vector<std::int64_t>> dims;
    std::byte* address = nullptr;
  };
  /// The graph must be destroyed before its context. It is empty if a step failed before the capture.
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
  /// The shape that the context is set to.
  std::optional<RunShape> shape_;
  std::map<RunShape, Graph> graphs_;
};

}  // namespace adaptrt
