#include "weights/placed_weights.h"

#include <sys/mman.h>

#include <string>
#include <unordered_set>
#include <utility>
#include <variant>

#include "adaptrt/core/error.h"
#include "adaptrt/cpu/cpu_engine.h"
#include "op_members.h"

namespace adaptrt {
namespace {

std::vector<Op>& ops_of(Program& program, std::size_t section) {
  std::vector<Op>* const sections[] = {&program.encoder, &program.body, &program.head};
  return *sections[section];
}

}  // namespace

PlacedWeights::PlacedWeights(Program* program, const WeightMemory& memory)
    : file_(std::make_shared<WeightFile>(memory.path)) {
  WeightPlan plan = plan_weights(*program, memory);
  read_resident(program, memory, plan);
  if (!plan.streamed.empty()) make_stream(program, memory, &plan);
  make_mlps(program, memory, plan);
  make_slots(*program, memory, &plan);
  placement_.resident_bytes += resident_.bytes();
  placement_.is_direct = file_->is_direct();
  lock();
}

void PlacedWeights::read_resident(Program* program, const WeightMemory& memory, const WeightPlan& plan) {
  const FilePages pages(plan.resident);
  resident_ = HugeArray(pages.bytes());
  file_->read(pages, resident_.data());
  std::unordered_set<std::size_t> offsets;
  for (const FileRange& range : plan.resident) offsets.insert(range.offset);
  for (std::size_t section = 0; section < units_.size(); ++section) {
    for (Op& op : ops_of(*program, section)) {
      for_each_member<PanelMatrix>(op, [&](PanelMatrix& matrix) {
        const auto range = file_range(memory, matrix);
        if (range && offsets.contains(range->offset)) {
          matrix.data = resident_.data() + pages.place_of(range->offset);
        }
      });
      auto* linear = std::get_if<LinearOp>(&op);
      if (linear != nullptr && !linear->neurons.is_empty()) {
        const auto offset = file_offset(memory, linear->neurons.data);
        if (offset && offsets.contains(*offset)) {
          linear->neurons.data = resident_.data() + pages.place_of(*offset);
        }
      }
      for_each_member<VectorView>(op, [&](VectorView& vector) {
        const auto range = file_range(memory, vector);
        if (range) {
          vector.data = reinterpret_cast<const float*>(resident_.data() + pages.place_of(range->offset));
        }
      });
    }
  }
}

void PlacedWeights::make_stream(Program* program, const WeightMemory& memory, WeightPlan* plan) {
  std::vector<WeightStream::Unit> stream;
  std::unordered_set<std::size_t> of_mlps;
  for (const WeightPlan::Mlp& mlp : plan->mlps) {
    of_mlps.insert({mlp.whole, mlp.down});
    if (mlp.gate) of_mlps.insert(*mlp.gate);
  }
  std::size_t first_of_body = 0;
  for (std::size_t section = 0; section < units_.size(); ++section) {
    units_[section].assign(ops_of(*program, section).size(), kNone);
  }
  for (const WeightPlan::Streamed& streamed : plan->streamed) {
    const std::size_t unit = stream.size();
    if (!of_mlps.contains(unit)) units_[static_cast<std::size_t>(streamed.section)][streamed.op] = unit;
    stream.push_back({streamed.pages, streamed.is_unexpected});
    placement_.file_bytes += streamed.pages.bytes();
    if (streamed.section == StepSection::kEncoder) ++first_of_body;
  }
  if (first_of_body == stream.size()) first_of_body = 0;
  stream_ = std::make_unique<WeightStream>(file_, std::move(stream), plan->ring_bytes, first_of_body);
  placement_.buffer_bytes += plan->ring_bytes;
  for (std::size_t unit = 0; unit < plan->streamed.size(); ++unit) {
    if (of_mlps.contains(unit)) continue;
    const WeightPlan::Streamed& streamed = plan->streamed[unit];
    Op& op = ops_of(*program, static_cast<std::size_t>(streamed.section))[streamed.op];
    for_each_member<PanelMatrix>(op, [&](PanelMatrix& matrix) {
      matrix.data = stream_->address_of(unit, *file_offset(memory, matrix.data));
    });
  }
}

void PlacedWeights::make_mlps(Program* program, const WeightMemory& memory, const WeightPlan& plan) {
  if (!plan.mlps.empty()) {
    std::vector<RecordCache::Table> tables;
    for (const WeightPlan::Mlp& mlp : plan.mlps) tables.push_back(mlp.mlp.neurons);
    neurons_ = std::make_unique<RecordCache>(file_, std::move(tables), plan.neuron_slots);
  }
  for (std::size_t i = 0; i < plan.mlps.size(); ++i) {
    const NeuronMlp& mlp = plan.mlps[i].mlp;
    StreamedMlp& made = mlps_.emplace_back(*program, memory, plan.mlps[i], stream_.get(), neurons_.get(), i);
    for (const std::size_t op : {mlp.gated_op, mlp.down_op}) {
      mlp_of_.emplace(std::get<LinearOp>(program->body[op]).parts.data(), &made);
    }
    const std::size_t kept = mlp.neurons.kept.size() * neurons_->slot_bytes();
    placement_.resident_bytes += kept;
    placement_.file_bytes += mlp.neuron_bytes() - mlp.neurons.kept.size() * mlp.neurons.record_bytes;
    // The gate is counted once.
    if (plan.mlps[i].gate) placement_.file_bytes -= mlp.gate.bytes;
  }
  if (neurons_) placement_.buffer_bytes += plan.neuron_slots * neurons_->slot_bytes();
  for (Op& op : program->body) {
    auto* linear = std::get_if<LinearOp>(&op);
    if (linear == nullptr || mlp_of_.contains(linear->parts.data())) continue;
    // A layer that is read as a whole has no neurons.
    if (file_offset(memory, linear->neurons.data)) linear->neurons = {};
  }
}

void PlacedWeights::make_slots(const Program& program, const WeightMemory& memory, WeightPlan* plan) {
  for (WeightPlan::Experts& layer : plan->experts) {
    const auto& op = std::get<ExpertsOp>(program.body[layer.op]);
    for (const FilePages& expert : layer.experts) placement_.file_bytes += expert.bytes();
    ExpertSlots& made =
        experts_.try_emplace(op.down.data(), op, memory, file_, std::move(layer.experts), layer.slots)
            .first->second;
    placement_.buffer_bytes += made.memory().bytes();
    fill(memory.usage, layer.op, &made);
  }
}

void PlacedWeights::fill(const WeightUsage& usage, std::size_t op, ExpertSlots* slots) {
  if (usage.tokens == 0) return;
  const auto counts = usage.of_ops.find(op);
  if (counts == usage.of_ops.end() || counts->second.size() != slots->down().size()) {
    throw EngineError("the usage of weights does not have the " + std::to_string(slots->down().size()) +
                      " experts of op " + std::to_string(op) + " of the body");
  }
  slots->fill(counts->second);
}

void PlacedWeights::lock() {
  const auto lock_one = [](const HugeArray& array) {
    return array.bytes() == 0 || mlock(array.data(), array.bytes()) == 0;
  };
  placement_.is_locked = lock_one(resident_) && (!stream_ || lock_one(stream_->ring()));
  if (neurons_) placement_.is_locked = placement_.is_locked && lock_one(neurons_->memory());
  for (const auto& [parts, slots] : experts_) {
    placement_.is_locked = placement_.is_locked && lock_one(slots.memory());
  }
}

std::optional<std::size_t> PlacedWeights::stream_unit(StepSection section, std::size_t op) const {
  if (!stream_) return std::nullopt;
  const std::size_t unit = units_[static_cast<std::size_t>(section)][op];
  if (unit == kNone) return std::nullopt;
  return unit;
}

void PlacedWeights::begin_step(bool has_few_rows) {
  for (StreamedMlp& mlp : mlps_) mlp.begin_step(has_few_rows);
}

StreamedMlp* PlacedWeights::mlp_of(const LinearOp& op) {
  const auto found = mlp_of_.find(op.parts.data());
  return found == mlp_of_.end() ? nullptr : found->second;
}

ExpertSlots* PlacedWeights::experts_of(const ExpertsOp& op) {
  const auto found = experts_.find(op.down.data());
  return found == experts_.end() ? nullptr : &found->second;
}

WeightPlacement PlacedWeights::placement() const {
  WeightPlacement now = placement_;
  now.bytes_read = file_->bytes_read();
  return now;
}

}  // namespace adaptrt
