#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/linear/adapter_product.h"
#include "ops/linear/linear_spec.h"

namespace adaptrt {

/// Sums of a panel of a linear layer, or of the same panel of both parts of a gated one.
struct LinearTile {
  PanelPlace place;        ///< of a gated layer the gate's
  std::size_t first_part;  ///< of the rows' group
  RowRange rows;
  float* sums;    ///< [rows], kPanelColumns apart
  float* linear;  ///< the same of the next part; nullptr where the layer is not gated
};

/// Where the tiles of a call go.
struct LinearTarget {
  const LinearCall& call;
  /// The output's columns begin with those of this panel of each group's first part.
  std::int64_t first_panel;
  /// The output is written past the caches.
  bool streams;
};

/// The way of a linear layer's sums into its output: adapters, biases, the layer's scale and bound, its
/// activation.
class LinearOutput {
 public:
  /// All of them outlive it.
  LinearOutput(const LinearSpec& spec, const AdapterProduct& adapters, const CpuContext& context);

  /// Puts a tile, whose sums may change, where the layer's output goes.
  void finish(const LinearTarget& target, const LinearTile& tile) const;

  /// Whether the output is the sums of float products as they are, so that these can be made in it.
  [[nodiscard]] bool is_sums(const LinearTarget& target) const;
  /// Where the sums of a panel's rows go then, as wide as the output apart.
  [[nodiscard]] float* sums_of(const LinearTarget& target, PanelPlace place, std::size_t first_part,
                               std::int64_t row) const;

 private:
  using Activation = void (*)(const ActivatedTile&);

  void finish_part(const LinearTarget& target, PanelPlace place, float* rows, RowRange range) const;
  void make_zeros_positive(PanelPlace place, float* rows, RowRange range) const;
  void close_gates(const LinearTarget& target, const LinearTile& tile) const;
  void stream(const LinearTarget& target, const float* tile, RowRange rows, std::int64_t bytes,
              std::byte* out) const;
  [[nodiscard]] std::int64_t column_of(const LinearTarget& target, PanelPlace place,
                                       std::size_t first_part) const;
  void store(const LinearTarget& target, const LinearTile& tile) const;
  static void store_term(const LinearTarget& target, const LinearTile& tile, std::int64_t column,
                         std::int64_t width);
  void scatter(const LinearTarget& target, const LinearTile& tile, std::int64_t column,
               std::int64_t width) const;
  void store_activated(const LinearTarget& target, const LinearTile& tile) const;
  void store_columns(const LinearTarget& target, const LinearTile& tile, RowRange columns, std::int64_t bytes,
                     std::byte* out, std::int64_t out_stride) const;
  [[nodiscard]] const float* bias_of(PanelPlace place) const;

  const LinearSpec& spec_;
  const AdapterProduct& adapters_;
  const CpuContext& context_;
  /// nullptr: the sums go to the output without an activation.
  Activation activate_;
  /// Biases are added on the way to the activation, to sums that nothing else changes.
  bool activates_biased_;
  /// Nothing but an adapter changes the sums on the way to a float32 output.
  bool keeps_sums_;
};

}  // namespace adaptrt
