#include "step_graphs.h"

namespace adaptrt {

void StepGraphs::run(const RunShape& shape, Stream& stream, const std::function<Work()>& make_work) {
  Graph& graph = graphs_[shape];
  if (graph.captured) {
    stream.launch(*graph.captured);
    return;
  }
  // Work left by a failed step is destroyed here, after it is done, and not during the failed step.
  graph.work = make_work();
  graph.work(stream);
  graph.captured = stream.capture([&] { graph.work(stream); });
}

}  // namespace adaptrt
