#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "context.h"
#include "ops/linear/linear_layer.h"
#include "weights/streamed_mlp.h"

namespace adaptrt {

/// Steps of few rows for which a gated layer is read whole without asking, after one in which most of its
/// gates were open.
inline constexpr std::int32_t kWholeSteps = 15;

/// Maximum number of open outputs of a gated layer for which the others are left out.
[[nodiscard]] std::int64_t most_gathered_outputs(std::int64_t width);

/// Maximum number of rows of a program's layers that count as few.
[[nodiscard]] std::int64_t most_sparse_rows(const KernelTable& kernels, DType weights);

/// A gated layer, or a ReLU without a second part, of which a few rows read only the open outputs. It
/// computes the gates, with adapters, for all outputs except those that the scores close in all rows. Then it
/// computes the second part, if there is one, where a gate of some row is open. The bits are those of
/// LinearLayer::run.
class ReluGatedLayer {
 public:
  /// `whole` is the same layer; it outlives this. `neurons` and `mlp` may be nullptr.
  ReluGatedLayer(const LinearLayer& whole, const NeuronTable* neurons, StreamedMlp* mlp);

  /// Runs the layer for at most most_sparse_rows() rows. Returns whether anything was left out.
  bool run(const LinearCall& call) const;

 private:
  friend class ReluGatedRun;

  const LinearLayer& whole_;
  /// Records of the second part by neuron; nullptr: reads the rows of the part.
  const NeuronTable* neurons_;
  /// nullptr: the weights are in memory.
  StreamedMlp* mlp_;
  /// Each of the two parts by itself, without the activation.
  LinearLayer gate_;
  std::optional<LinearLayer> linear_;
};

}  // namespace adaptrt
