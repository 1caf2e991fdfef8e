#pragma once

#include <functional>
#include <map>
#include <memory>

#include "adaptrt/device/device.h"
#include "adaptrt/gpu/step_arrays.h"

namespace adaptrt {

/// Captured runs, one graph for each shape.
class StepGraphs {
 public:
  /// Enqueues a run on a stream.
  using Work = std::function<void(Stream&)>;

  /// Launches the graph of this shape. The first run of a shape is a normal run of make_work()'s result,
  /// because a model may finish its preparations for the shape then; after it the graph is captured.
  void run(const RunShape& shape, Stream& stream, const std::function<Work()>& make_work);

 private:
  /// The graph must be destroyed before its work. It is empty if a step failed before the capture.
  struct Graph {
    Work work;
    std::unique_ptr<CapturedGraph> captured;
  };

  std::map<RunShape, Graph> graphs_;
};

}  // namespace adaptrt
