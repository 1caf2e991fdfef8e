#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "adaptrt/cpu/cpu_engine.h"
#include "adaptrt/engine/engine.h"
#include "adaptrt/program/program.h"
#include "adaptrt/weight_file/record_cache.h"
#include "adaptrt/weight_file/weight_file.h"

namespace adaptrt {

/// A ReLU-gated MLP of the body whose neurons can be read one by one.
struct NeuronMlp {
  std::size_t gated_op = 0;
  std::size_t down_op = 0;
  FileRange gate;
  FileRange up;
  FileRange down;
  RecordCache::Table neurons;

  [[nodiscard]] std::size_t neuron_bytes() const {
    return static_cast<std::size_t>(neurons.count) * neurons.record_bytes;
  }
};

/// Finds the MLPs whose weights are in the file. can_be_placed(op) is true if no other op uses the op's
/// weights.
[[nodiscard]] std::vector<NeuronMlp> find_neuron_mlps(const Program& program, const WeightMemory& memory,
                                                      const std::function<bool(const Op&)>& can_be_placed);

/// Maximum number of slots that a step of few rows needs, with one layer at a time.
[[nodiscard]] std::size_t least_neuron_slots(const std::vector<NeuronMlp>& mlps);
/// Bytes of a slot.
[[nodiscard]] std::size_t neuron_slot_bytes(const std::vector<NeuronMlp>& mlps);

/// Chooses more neurons to stay in memory, the most used ones first. Stops when the room is used up, or at
/// neurons that less than a minimum share of the tokens use. Returns the bytes of the chosen neurons. Throws
/// EngineError if the usage is for other layers.
[[nodiscard]] std::size_t keep_used_neurons(std::vector<NeuronMlp>* mlps, const WeightUsage& usage,
                                            double least_share, std::size_t room);

}  // namespace adaptrt
