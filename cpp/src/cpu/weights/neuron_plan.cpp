#include "weights/neuron_plan.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>

#include "adaptrt/core/error.h"
#include "adaptrt/cpu/cpu_engine.h"
#include "ops/linear/relu_gated.h"
#include "weights/weight_plan.h"

namespace adaptrt {
namespace {

/// The op that reads the output of a gated op.
std::optional<std::size_t> reader_of(const std::vector<Op>& ops, std::size_t gated) {
  const NeuronTable& neurons = std::get<LinearOp>(ops[gated]).neurons;
  for (std::size_t i = gated + 1; i < ops.size(); ++i) {
    const auto* linear = std::get_if<LinearOp>(&ops[i]);
    if (linear != nullptr && linear->neurons.data == neurons.data) return i;
  }
  return std::nullopt;
}

struct UsedNeuron {
  std::uint32_t count;
  std::size_t mlp;
  std::int32_t neuron;
};

const std::vector<std::uint32_t>& counts_of(const NeuronMlp& mlp, const WeightUsage& usage) {
  const auto found = usage.of_ops.find(mlp.gated_op);
  if (found == usage.of_ops.end() || found->second.size() != static_cast<std::size_t>(mlp.neurons.count)) {
    throw EngineError("the usage of weights does not have the " + std::to_string(mlp.neurons.count) +
                      " neurons of op " + std::to_string(mlp.gated_op) + " of the body");
  }
  return found->second;
}

}  // namespace

std::vector<NeuronMlp> find_neuron_mlps(const Program& program, const WeightMemory& memory,
                                        const std::function<bool(const Op&)>& can_be_placed) {
  std::vector<NeuronMlp> found;
  const std::vector<Op>& ops = program.body;
  for (std::size_t op = 0; op < ops.size(); ++op) {
    const auto* gated = std::get_if<LinearOp>(&ops[op]);
    if (gated == nullptr || gated->neurons.is_empty() || !is_relu_gated(gated->epilogue)) continue;
    const auto down_op = reader_of(ops, op);
    const auto offset = file_offset(memory, gated->neurons.data);
    if (!down_op || !offset || *offset % kFilePage != 0) continue;
    if (!can_be_placed(ops[op]) || !can_be_placed(ops[*down_op])) continue;
    const auto& down = std::get<LinearOp>(ops[*down_op]);
    found.push_back({.gated_op = op,
                     .down_op = *down_op,
                     .gate = *file_range(memory, gated->parts[0].weight),
                     .up = *file_range(memory, gated->parts[1].weight),
                     .down = *file_range(memory, down.parts[0].weight),
                     .neurons = {.offset = *offset,
                                 .record_bytes = gated->neurons.record_bytes(),
                                 .count = static_cast<std::int32_t>(gated->neurons.count),
                                 .kept = {}}});
  }
  return found;
}

std::size_t least_neuron_slots(const std::vector<NeuronMlp>& mlps) {
  std::int64_t most = 0;
  for (const NeuronMlp& mlp : mlps) most = std::max(most, most_gathered_outputs(mlp.neurons.count));
  return static_cast<std::size_t>(most);
}

std::size_t neuron_slot_bytes(const std::vector<NeuronMlp>& mlps) {
  std::size_t bytes = 0;
  for (const NeuronMlp& mlp : mlps) bytes = std::max(bytes, mlp.neurons.record_bytes);
  return bytes;
}

std::size_t keep_used_neurons(std::vector<NeuronMlp>* mlps, const WeightUsage& usage, double least_share,
                              std::size_t room) {
  if (usage.tokens == 0) return 0;
  const double least = std::max(1.0, least_share * static_cast<double>(usage.tokens));
  std::vector<UsedNeuron> used;
  for (std::size_t i = 0; i < mlps->size(); ++i) {
    const NeuronMlp& mlp = (*mlps)[i];
    const std::vector<std::uint32_t>& counts = counts_of(mlp, usage);
    for (std::int32_t neuron = 0; neuron < mlp.neurons.count; ++neuron) {
      const std::uint32_t count = counts[static_cast<std::size_t>(neuron)];
      const bool is_kept = std::ranges::binary_search(mlp.neurons.kept, neuron);
      if (count >= least && !is_kept) used.push_back({count, i, neuron});
    }
  }
  std::ranges::stable_sort(used, std::ranges::greater(), &UsedNeuron::count);
  const std::size_t slot_bytes = neuron_slot_bytes(*mlps);
  const std::size_t taken = slot_bytes == 0 ? 0 : std::min(used.size(), room / slot_bytes);
  for (std::size_t i = 0; i < taken; ++i) (*mlps)[used[i].mlp].neurons.kept.push_back(used[i].neuron);
  for (NeuronMlp& mlp : *mlps) std::ranges::sort(mlp.neurons.kept);
  return taken * slot_bytes;
}

}  // namespace adaptrt
