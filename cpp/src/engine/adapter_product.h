#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base_product.h"
#include "step.h"

namespace adaptrt {

/// What the adapters of a step's rows add to one linear op: x A^T for all of them first, then B a tile at a
/// time.
class AdapterProduct {
 public:
  AdapterProduct(const LinearOp& op, const Step& step);

  /// Whether no row's adapter changes this op.
  [[nodiscard]] bool is_empty() const { return groups_.empty(); }

  /// step.shrink[rows of groups, total_rank] = input A^T, rounded to the activation type. After
  /// BaseProduct::prepare.
  void shrink() const;

  /// Adds (x A^T) B^T to a tile of one part and panel and multiplies it by the magnitudes; rows of the tile
  /// are kPanelColumns floats apart.
  void expand(std::size_t part, std::int64_t panel, RowRange rows, float* tile) const;

  /// A panel of B and the magnitudes of its columns, of the groups that have rows in a tile, as far as there
  /// is room: what is not among them is fetched when it is needed.
  using Spans = std::array<MemorySpan, 96>;
  std::span<const MemorySpan> spans(std::size_t part, std::int64_t panel, RowRange rows, Spans* spans) const;

 private:
  [[nodiscard]] const DeviceSite& site_of(const AdapterGroup& group) const {
    return group.adapter->sites[static_cast<std::size_t>(op_.lora_site)];
  }
  /// Those of `rows` that are the group's, where its adapter changes the part.
  [[nodiscard]] RowRange rows_changed(const AdapterGroup& group, std::size_t part, RowRange rows) const;
  [[nodiscard]] std::byte* shrunk(std::int64_t row, std::int64_t column) const;
  void shrink_tile(const AdapterGroup& group, std::int64_t panel, RowRange rows, int thread) const;
  void expand_group(const AdapterGroup& group, std::size_t part, std::int64_t panel, RowRange rows,
                    float* tile) const;

  const LinearOp& op_;
  const Step& step_;
  const Buffer& input_;
  DType dtype_;
  void (*gemm_)(const PanelGemm&);
  /// Groups whose adapter changes this op.
  std::span<const AdapterGroup> groups_;
};

}  // namespace adaptrt
