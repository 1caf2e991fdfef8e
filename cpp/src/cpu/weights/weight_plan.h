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

/// Plan for a program's weights: which ones stay in memory, and how the others are read.
struct WeightPlan {
  /// A linear layer that is read each time it is used, or the part of it that a NeuronMlp needs.
  struct Streamed {
    StepSection section = StepSection::kBody;
    std::size_t op = 0;  ///< in its section
    FilePages pages;
    /// True if only steps with many rows need it.
    bool is_unexpected = false;
  };
  /// An MLP that reads a neuron when the neuron's gate opens. Units are indices into `streamed`.
  struct Mlp {
    NeuronMlp mlp;
    std::optional<std::size_t> gate;  ///< nullopt: the gate stays in memory
    std::size_t whole = 0;            ///< up, with the gate unless the gate stays in memory
    std::size_t down = 0;
  };
  /// A layer of experts that has only some of them in memory at a time.
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

/// Chooses the weights that stay in memory. If everything fits, all weights stay. Otherwise they fill memory
/// in this order:
///
/// 1. embeddings, lm_head, norms and biases;
/// 2. neurons that many tokens use;
/// 3. linear layers, which every step needs, spread evenly over the network, so that no wait is long;
/// 4. other neurons, and experts, the same number in each layer.
///
/// Throws ConfigError with the number of bytes that are needed at least, and EngineError for a usage of other
/// layers.
[[nodiscard]] WeightPlan plan_weights(const Program& program, const WeightMemory& memory);

}  // namespace adaptrt
