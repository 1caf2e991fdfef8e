#include "plan_runner.h"

#include <span>
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

PlanRunner::PlanRunner(std::unique_ptr<PlanContext> context) : context_(std::move(context)) {}

void PlanRunner::set_step_arrays(const StepArrays& arrays, std::byte* step_memory) {
  arrays_ = &arrays;
  step_memory_ = step_memory;
}

void PlanRunner::set_input(std::string_view name, const DeviceArray& array) {
  set_fixed({std::string(name), array.dims, array.address});
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

std::function<void(Stream&)> PlanRunner::make_graph_work(const RunShape& shape) const {
  const std::shared_ptr<PlanContext> context = context_->another();
  for (const FixedTensor& tensor : fixed_) set_tensor(*context, tensor.name, tensor.dims, tensor.address);
  set_shape(*context, shape);
  return [context](Stream& stream) { context->enqueue(stream.handle()); };
}

void PlanRunner::set_fixed(FixedTensor tensor) {
  set_tensor(*context_, tensor.name, tensor.dims, tensor.address);
  fixed_.push_back(std::move(tensor));
}

void PlanRunner::set_shape(PlanContext& context, const RunShape& shape) const {
  const StepPlaces places = arrays_->places(shape);
  const auto set = [&](std::string_view name, const StepArray& array) {
    set_tensor(context, name, array.dims, step_memory_ + array.offset);
  };
  set("input_ids", places.token_ids);
  set("positions", places.positions);
  set("sequence_offsets", places.sequence_offsets);
  set("block_tables", places.block_tables);
  set("logit_rows", places.logit_rows);
  if (places.prompt_lengths) set("prompt_lengths", *places.prompt_lengths);
  if (places.adapter_slots) set("adapter_slots", *places.adapter_slots);
}

}  // namespace adaptrt
