#pragma once

#include <cstddef>
#include <cstdint>

#include "context.h"
#include "ops/linear/linear_spec.h"

namespace adaptrt {

/// Exchange of x A^T between ranks, for a layer whose adapters are fully sharded. If the layer is split by
/// its outputs, each rank computes different columns, and sends them in the stored type. If it is split by
/// its inputs, each rank computes a term of all columns, and the terms are added in float32.
///
/// If ranks have different experts, only those that share the same experts exchange: every
/// experts_for_each-th rank of the stage.
///
/// A rank's results are packed: the rows of LinearCall::adapted follow one another, each as wide as its
/// adapter needs.
class LowRankExchange {
 public:
  LowRankExchange(const LinearCall& call, const LoraSite& site, const CpuContext& context);

  /// Stores a tile of this rank's result for some rows of one of LinearCall::adapted, multiplied by
  /// DeviceSite::rank_scales. Rows of the tile, which is changed, are kPanelColumns floats apart. May be
  /// called from several threads.
  void store(const AdaptedRows& adapted, std::int64_t panel, RowRange rows, float* tile) const;

  /// Computes StepMemory::shrink = x A^T of all ranks. Call it after all tiles are stored.
  void finish() const;

 private:
  /// Number of the stage's rank that has this share.
  [[nodiscard]] std::int32_t number_of(std::int32_t share) const;
  [[nodiscard]] std::int64_t width_on(std::int32_t rank, const AdaptedRows& adapted) const;
  /// Number of packed elements of all rows.
  [[nodiscard]] std::int64_t elements_on(std::int32_t rank) const;
  [[nodiscard]] std::byte* shrunk(std::int64_t row, std::int64_t column) const;
  void gather() const;
  /// Copies the packed result of a rank, at `packed`, to its columns of StepMemory::shrink.
  void place(std::int32_t rank, const std::byte* packed) const;
  void add_up() const;

  const LinearCall& call_;
  const LoraSite& site_;
  const CpuContext& context_;
  std::int32_t rank_;
  std::int32_t ranks_;
  DType type_;  ///< type of the packed results
};

}  // namespace adaptrt
