#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/linear/adapter_product.h"
#include "ops/linear/linear_spec.h"

namespace adaptrt {

/// Sums of a panel of a linear layer, or of the same panel of both parts of a gated one.
struct LinearTile {
  PanelPlace place;        ///< the gate's place for a gated layer
  std::size_t first_part;  ///< first part of the rows' group
  RowRange rows;
  float* sums;    ///< [rows]; rows are kPanelColumns floats apart
  float* linear;  ///< the same for the next part; nullptr if the layer is not gated
  int thread;
};

/// Kernel of an activated epilogue; nullptr for the others.
[[nodiscard]] auto activation_for(LinearEpilogue epilogue, const KernelTable& kernels)
    -> void (*)(const ActivatedTile&);

/// Where a call's tiles go.
struct LinearTarget {
  const LinearCall& call;
  /// The output's columns begin with the columns of this panel of each group's first part.
  std::int64_t first_panel;
  /// The output is written with non-temporal stores.
  bool streams;
};

/// Turns a linear layer's sums into its output. Applies adapters, biases, scale, softcap and activation.
class LinearOutput {
 public:
  /// All arguments must outlive this object.
  LinearOutput(const LinearSpec& spec, const AdapterProduct& adapters, const CpuContext& context);

  /// Stores a tile to the layer's output; may change the tile's sums.
  void finish(const LinearTarget& target, const LinearTile& tile) const;

  /// The activation of an activated layer, for tiles that other code has computed.
  void activate(const ActivatedTile& tile) const { activate_(tile); }

  /// True if the output equals the sums of float products. Products can then write to the output directly.
  [[nodiscard]] bool is_sums(const LinearTarget& target) const;
  /// Address in the output of a panel's sums in that case. Rows are as far apart as the output's rows.
  [[nodiscard]] float* sums_of(const LinearTarget& target, PanelPlace place, std::size_t first_part,
                               std::int64_t row) const;

 private:
  using Activation = void (*)(const ActivatedTile&);

  void finish_part(const LinearTarget& target, PanelPlace place, float* rows, RowRange range, int thread,
                   float scale) const;
  void scale_rows(const LinearTarget& target, PanelPlace place, float* rows, RowRange range) const;
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
  /// True if the activation adds the biases, because nothing else changes the sums before it.
  bool activates_biased_;
  /// True if the output is float32 and only adapters change the sums.
  bool keeps_sums_;
};

}  // namespace adaptrt
