#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/adapter_product.h"
#include "ops/linear_work.h"

namespace adaptrt {

/// One panel of one of LinearWork::parts.
struct PanelPlace {
  std::size_t part;
  std::int64_t panel;
};

/// Sums of a panel of a linear layer, or of the same panel of both parts of a gated one.
struct LinearTile {
  PanelPlace place;        ///< of a gated layer the gate's
  std::size_t first_part;  ///< of the rows' group
  RowRange rows;
  float* sums;    ///< [rows], kPanelColumns apart
  float* linear;  ///< the same of the next part; nullptr where the layer is not gated
};

/// What becomes of a linear layer's sums: adapters, biases, the layer's scale and bound, its activation, and
/// the way into its output.
class LinearOutput {
 public:
  /// The output's columns begin with those of `first_panel` of each group's first part. One that `streams` is
  /// written past the caches.
  LinearOutput(const LinearWork& work, const Step& step, const AdapterProduct& adapters,
               std::int64_t first_panel, bool streams);

  /// Puts a tile, whose sums may change, where the layer's output goes.
  void finish(const LinearTile& tile) const;

  /// Whether the output is the sums of bfloat16 products as they are, so that these can be made in it.
  [[nodiscard]] bool is_sums() const;
  /// Where the sums of a panel's rows go then, as wide as the output apart.
  [[nodiscard]] float* sums_of(PanelPlace place, std::size_t first_part, std::int64_t row) const;

 private:
  [[nodiscard]] bool activates_biased() const;
  void finish_part(PanelPlace place, float* rows, RowRange range) const;
  void make_zeros_positive(PanelPlace place, float* rows, RowRange range) const;
  /// Gates whose scores say so.
  void close_gates(const LinearTile& tile) const;
  void stream(const float* tile, RowRange rows, std::int64_t bytes, std::byte* out) const;
  [[nodiscard]] std::int64_t column_of(PanelPlace place, std::size_t first_part) const;
  void store(const LinearTile& tile) const;
  void store_term(const LinearTile& tile, std::int64_t column, std::int64_t width) const;
  void scatter(const LinearTile& tile, std::int64_t column, std::int64_t width) const;
  void store_activated(const LinearTile& tile) const;
  void store_columns(const LinearTile& tile, RowRange columns, std::int64_t bytes, std::byte* out,
                     std::int64_t out_stride) const;
  [[nodiscard]] const float* bias_of(PanelPlace place) const;
  void activate(const ActivatedTile& tile) const;

  const LinearWork& work_;
  const Step& step_;
  const AdapterProduct& adapters_;
  std::int64_t first_panel_;  ///< of each group
  bool streams_;
};

}  // namespace adaptrt
