#pragma once

#include "context.h"
#include "ops/linear/linear_layer.h"
#include "weights/streamed_mlp.h"

namespace adaptrt {

/// A layer whose input has many zeros. If there are few rows, it reads only the weights of inputs that are
/// not zero, if these are few or if only their weights are in memory. The result has the same bits as
/// LinearLayer::run.
class SparseInputLayer {
 public:
  /// `whole` is the same layer; it must outlive this object. `neurons` and `mlp` may be nullptr.
  SparseInputLayer(const LinearLayer& whole, const NeuronTable* neurons, StreamedMlp* mlp);

  void run(const LinearCall& call) const;
  /// Runs the layer for few rows, with the columns of live inputs, which `mlp` has loaded.
  void run_brought(const LinearCall& call) const;

 private:
  template <class ColumnOf>
  void multiply(const LinearCall& call, std::span<const std::int32_t> inputs,
                const ColumnOf& column_of) const;

  const LinearLayer& whole_;
  /// Addresses of columns by input; nullptr: the part's own columns.
  const NeuronTable* neurons_;
  /// nullptr: all weights are in memory.
  StreamedMlp* mlp_;
  bool has_columns_;
  /// Maximum number of rows that count as few.
  std::int64_t few_rows_;
};

}  // namespace adaptrt
