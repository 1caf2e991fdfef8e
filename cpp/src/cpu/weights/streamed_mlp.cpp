#include "weights/streamed_mlp.h"

#include <algorithm>
#include <variant>

#include "ops/linear/relu_gated.h"

namespace adaptrt {

StreamedMlp::StreamedMlp(const Program& program, const WeightMemory& memory, const WeightPlan::Mlp& plan,
                         WeightStream* stream, RecordCache* cache, std::size_t table)
    : plan_(plan),
      stream_(*stream),
      cache_(*cache),
      table_(table),
      gated_(std::get<LinearOp>(program.body[plan.mlp.gated_op]).parts),
      down_(std::get<LinearOp>(program.body[plan.mlp.down_op]).parts) {
  const NeuronTable& neurons = std::get<LinearOp>(program.body[plan.mlp.gated_op]).neurons;
  column_place_ = neurons.vector_bytes();
  records_.assign(static_cast<std::size_t>(neurons.count), nullptr);
  // Code that prefetches may read this address.
  gated_[1].weight.data = stream_.address_of(plan_.whole, *file_offset(memory, gated_[1].weight.data));
  down_[0].weight.data = stream_.address_of(plan_.down, *file_offset(memory, down_[0].weight.data));
  if (plan_.gate) gated_[0].weight.data = stream_.address_of(*plan_.gate, plan_.mlp.gate.offset);
}

void StreamedMlp::begin_step(bool has_few_rows) {
  bool is_whole = !has_few_rows;
  if (has_few_rows && whole_steps_ > 0) {
    --whole_steps_;
    is_whole = true;
  }
  read_whole(is_whole);
}

void StreamedMlp::read_whole(bool is_whole) {
  if (is_whole == reads_whole_) return;
  reads_whole_ = is_whole;
  if (plan_.gate) stream_.expect(*plan_.gate, !is_whole);
  stream_.expect(plan_.whole, is_whole);
  stream_.expect(plan_.down, is_whole);
}

void StreamedMlp::hold(std::size_t unit, LinearPart* part, std::size_t offset) {
  held_.reset();
  held_.emplace(stream_.hold(unit));
  part->weight.data = stream_.address_of(unit, offset);
}

void StreamedMlp::hold_gate() {
  if (plan_.gate) hold(*plan_.gate, gated_.data(), plan_.mlp.gate.offset);
}

void StreamedMlp::hold_gated() {
  if (!reads_whole_) {
    whole_steps_ = kWholeSteps;
    read_whole(true);
  }
  hold(plan_.whole, &gated_[1], plan_.mlp.up.offset);
  if (plan_.gate) gated_[0].weight.data = stream_.address_of(plan_.whole, plan_.mlp.gate.offset);
}

void StreamedMlp::hold_down() {
  hold(plan_.down, down_.data(), plan_.mlp.down.offset);
}

void StreamedMlp::bring(std::span<const std::int32_t> neurons) {
  for (const std::int32_t neuron : brought_) records_[static_cast<std::size_t>(neuron)] = nullptr;
  brought_.clear();
  cache_.bring(table_, neurons);
  brought_.assign(neurons.begin(), neurons.end());
  for (const std::int32_t neuron : brought_) {
    records_[static_cast<std::size_t>(neuron)] = cache_.address_of(table_, neuron);
  }
}

}  // namespace adaptrt
