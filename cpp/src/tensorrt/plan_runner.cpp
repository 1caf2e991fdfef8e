#include "plan_runner.h"

#include <utility>

namespace adaptrt {
namespace {

/// Sets shape and address of one tensor.
void set_tensor(PlanContext& context, std::string_view name,
                const std::optional<std::span<const std::int64_t>>& dims, std::byte* address) {
  if (dims) context.set_input_shape(name, *dims);
  context.set_tensor_address(name, address);
}

}  // namespace

PlanRunner::PlanRunner(std::unique_ptr<PlanContext> context, const StepArrays& arrays, std::byte* step_memory)
    : context_(std::move(context)), arrays_(arrays), step_memory_(step_memory) {}

void PlanRunner::set_input(std::string_view name, std::span<const std::int64_t> dims, std::byte* address) {
  set_fixed({std::string(name), std::vector<std::int64_t>(dims.begin(), dims.end()), address});
}

void PlanRunner::set_output(std::string_view name, std::byte* address) {
  set_fixed({std::string(name), std::nullopt, address});
}

void PlanRunner::run(const RunShape& shape, Stream& stream) {
  if (shape_ != shape) {
    shape_.reset();
    set_shape(*context_, shape);
    shape_ = shape;
  }
  context_->enqueue(stream.handle());
}

void PlanRunner::run_graph(const RunShape& shape, Stream& stream) {
  Graph& graph = graphs_[shape];
  if (graph.work) {
    stream.launch(*graph.work);
    return;
  }
  // A context left by a failed step is destroyed here, after its work is done, and not during the failed
  // step.
  graph.context = context_->another();
  for (const FixedTensor& tensor : fixed_) {
    set_tensor(*graph.context, tensor.name, tensor.dims, tensor.address);
  }
  set_shape(*graph.context, shape);
  graph.context->enqueue(stream.handle());
  graph.work = stream.capture([&] { graph.context->enqueue(stream.handle()); });
}

void PlanRunner::set_fixed(FixedTensor tensor) {
  set_tensor(*context_, tensor.name, tensor.dims, tensor.address);
  fixed_.push_back(std::move(tensor));
}

void PlanRunner::set_shape(PlanContext& context, const RunShape& shape) const {
  for (const StepArray& array : arrays_.places(shape)) {
    set_tensor(context, array.name, array.dims, step_memory_ + array.offset);
  }
}

}  // namespace adaptrt
