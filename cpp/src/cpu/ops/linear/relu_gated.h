#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "context.h"
#include "ops/linear/linear_layer.h"
#include "weights/streamed_mlp.h"

namespace adaptrt {

/// After a step of few rows in which most gates were open, the gated layer is read whole for this number of
/// such steps.
inline constexpr std::int32_t kWholeSteps = 15;

/// Maximum number of open outputs with which a gated layer skips its closed outputs.
[[nodiscard]] std::int64_t most_gathered_outputs(std::int64_t width);

/// Maximum number of rows of a program's layers that count as few.
[[nodiscard]] std::int64_t most_sparse_rows(const KernelTable& kernels, DType weights);

/// A gated layer, or a ReLU without a second part, that reads only its open outputs if there are few rows. It
/// computes the gates, with adapters, except those that the scores close in all rows. Then it computes the
/// second part, if there is one, for outputs whose gate is open in at least one row. The result has the same
/// bits as LinearLayer::run.
class ReluGatedLayer {
 public:
  /// `whole` is the same layer; it must outlive this object. `neurons` and `mlp` may be nullptr.
  ReluGatedLayer(const LinearLayer& whole, const NeuronTable* neurons, StreamedMlp* mlp);

  /// Runs the layer for at most most_sparse_rows() rows. Returns true if it skipped any output.
  bool run(const LinearCall& call) const;

 private:
  friend class ReluGatedRun;

  const LinearLayer& whole_;
  /// Records with the second part's weights by neuron; nullptr: the layer reads the part's rows.
  const NeuronTable* neurons_;
  /// nullptr: all weights are in memory.
  StreamedMlp* mlp_;
  /// Each of the two parts as a layer of its own, without the activation.
  LinearLayer gate_;
  std::optional<LinearLayer> linear_;
};

}  // namespace adaptrt
