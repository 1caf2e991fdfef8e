#include "plan_runner.h"

#include <utility>

namespace adaptrt {

PlanRunner::PlanRunner(std::unique_ptr<PlanContext> context, const StepArrays& arrays, std::byte* step_memory)
    : context_(std::move(context)), arrays_(arrays), step_memory_(step_memory) {}

void PlanRunner::set_input(std::string_view name, std::span<const std::int64_t> dims, std::byte* address) {
  context_->set_input_shape(name, dims);
  context_->set_tensor_address(name, address);
}

void PlanRunner::set_output(std::string_view name, std::byte* address) {
  context_->set_tensor_address(name, address);
}

void PlanRunner::run(const RunShape& shape, Stream& stream) {
  set_shape(shape);
  context_->enqueue(stream.handle());
}

void PlanRunner::run_graph(const RunShape& shape, Stream& stream) {
  const auto found = graphs_.find(shape);
  if (found != graphs_.end()) {
    stream.launch(*found->second);
    return;
  }
  run(shape, stream);
  graphs_[shape] = stream.capture([&] { context_->enqueue(stream.handle()); });
}

void PlanRunner::set_shape(const RunShape& shape) {
  if (shape_ == shape) return;
  shape_.reset();
  for (const StepArray& array : arrays_.places(shape)) {
    set_input(array.name, array.dims, step_memory_ + array.offset);
  }
  shape_ = shape;
}

}  // namespace adaptrt
