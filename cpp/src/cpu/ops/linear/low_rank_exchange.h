#pragma once

#include <cstddef>
#include <cstdint>

#include "context.h"
#include "ops/linear/linear_spec.h"

namespace adaptrt {

/// Of a layer whose adapters are fully sharded: how the ranks come to all of x A^T. Of a layer that is cut by
/// its outputs each rank has made other columns, which it sends to the others as they are stored; of one that
/// is cut by its inputs each has a term of all of them, and they are added up in float32.
///
/// Where ranks have different experts, those that share the same ones: each experts_for_each-th of the stage.
///
/// What a rank has made is packed: the rows of one of LinearCall::adapted behind those of the one before it,
/// each as wide as its adapter needs.
class LowRankExchange {
 public:
  LowRankExchange(const LinearCall& call, const LoraSite& site, const CpuContext& context);

  /// A tile of what this rank makes of some rows of one of LinearCall::adapted; rows of the tile are
  /// kPanelColumns floats apart. From several threads.
  void store(const AdaptedRows& adapted, std::int64_t panel, RowRange rows, const float* tile) const;

  /// StepMemory::shrink = all of x A^T, once all tiles are stored.
  void finish() const;

 private:
  /// The rank of the stage that has a share.
  [[nodiscard]] std::int32_t number_of(std::int32_t share) const;
  [[nodiscard]] std::int64_t width_on(std::int32_t rank, const AdaptedRows& adapted) const;
  /// Of all rows, packed.
  [[nodiscard]] std::int64_t elements_on(std::int32_t rank) const;
  [[nodiscard]] std::byte* shrunk(std::int64_t row, std::int64_t column) const;
  void gather() const;
  /// Puts what a rank has packed at `packed` where StepMemory::shrink has its columns.
  void place(std::int32_t rank, const std::byte* packed) const;
  void add_up() const;

  const LinearCall& call_;
  const LoraSite& site_;
  const CpuContext& context_;
  std::int32_t rank_;
  std::int32_t ranks_;
  DType type_;  ///< of what is packed
};

}  // namespace adaptrt
