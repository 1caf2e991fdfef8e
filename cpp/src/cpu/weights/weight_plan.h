#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "adaptrt/cpu/cpu_engine.h"
#include "adaptrt/engine/engine.h"
#include "adaptrt/engine/step_profile.h"
#include "adaptrt/program/program.h"
#include "adaptrt/weight_file/weight_file.h"
#include "weights/neuron_plan.h"

namespace adaptrt {

/// Plan of which weights of a program stay in memory, and how the others are read.
struct WeightPlan {
  /// A linear layer that is read whenever it is used, or the part of one that a NeuronMlp needs.
  struct Streamed {
    StepSection section = StepSection::kBody;
    std::size_t op = 0;  ///< in its section
    FilePages pages;
    /// Only steps with many rows need it.
    bool is_unexpected = false;
  };
  /// An MLP whose neurons are read as their gates open. Units are indices into `streamed`.
  struct Mlp {
    NeuronMlp mlp;
    std::optional<std::size_t> gate;  ///< nullopt: it stays
    std::size_t whole = 0;            ///< up, with the gate unless that stays
    std::size_t down = 0;
  };
  /// A layer of experts, of which some are in memory at a time.
  struct Experts {
    std::size_t op = 0;  ///< in the body
    std::vector<FilePages> experts;
    std::size_t slots = 0;
  };

  std::vector<FileRange> resident;
  std::vector<Streamed> streamed;  ///< in the order of their use
  std::size_t ring_bytes = 0;
  std::vector<Mlp> mlps;
  std::size_t neuron_slots = 0;
  std::vector<Experts> experts;
};

/// File offset of bytes in the program's mapping; nullopt for memory outside the mapping.
[[nodiscard]] std::optional<std::size_t> file_offset(const WeightMemory& memory, const void* data);

/// The bytes of a matrix or a vector in the file; nullopt for one without elements or outside the mapping.
[[nodiscard]] std::optional<FileRange> file_range(const WeightMemory& memory, const PanelMatrix& matrix);
[[nodiscard]] std::optional<FileRange> file_range(const WeightMemory& memory, const VectorView& vector);

/// Plans where a program's weights are. If everything fits, all weights stay in memory. Otherwise embeddings,
/// lm_head, norms and biases stay; then neurons that many tokens use; then linear layers, which every step
/// needs, spread evenly over the network so that no wait for reading is long; then other neurons, and
/// experts, the same number in each layer. Throws ConfigError that says how many bytes are needed at least,
/// and EngineError for a usage of other layers.
[[nodiscard]] WeightPlan plan_weights(const Program& program, const WeightMemory& memory);

}  // namespace adaptrt
