#pragma once

#include "context.h"
#include "ops/linear/linear_layer.h"
#include "weights/streamed_mlp.h"

namespace adaptrt {

/// A layer whose input has zeros. A few rows read only the weights of the other inputs, if these are few or
/// if only their weights are in memory. The bits are those of LinearLayer::run.
class SparseInputLayer {
 public:
  /// `whole` is the same layer; it outlives this. `neurons` and `mlp` may be nullptr.
  SparseInputLayer(const LinearLayer& whole, const NeuronTable* neurons, StreamedMlp* mlp);

  void run(const LinearCall& call) const;
  /// Runs the layer for a few rows by the columns of live inputs, which `mlp` has brought.
  void run_brought(const LinearCall& call) const;

 private:
  template <class ColumnOf>
  void multiply(const LinearCall& call, std::span<const std::int32_t> inputs,
                const ColumnOf& column_of) const;

  const LinearLayer& whole_;
  /// Columns by input; nullptr: the part's columns.
  const NeuronTable* neurons_;
  /// nullptr: all weights are in memory.
  StreamedMlp* mlp_;
  bool has_columns_;
  /// Maximum number of rows that count as few.
  std::int64_t few_rows_;
};

}  // namespace adaptrt
