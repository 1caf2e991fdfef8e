#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "ops/base_product.h"
#include "step.h"

namespace adaptrt {

/// What the adapters of a step's rows add to one linear layer: x A^T for all of them first, then B a tile at
/// a time; and the logits of tokens that they bring.
class AdapterProduct {
 public:
  AdapterProduct(const LinearWork& work, const Step& step);

  /// Whether no row's adapter changes this layer.
  [[nodiscard]] bool is_empty() const { return work_.adapted.empty(); }
  /// Whether one reads the layer's input.
  [[nodiscard]] bool reads_input() const { return !is_empty() || !work_.new_tokens.empty(); }

  /// step.shrink[adapted rows, total_rank] = input A^T, rounded to the activation type; where ranks share
  /// adapters, by an exchange of what each of them makes. After BaseProduct::prepare.
  void shrink() const;

  /// output[rows, behind the part's columns] = input A^T of LinearWork::new_tokens, scaled and bounded as the
  /// others are. After BaseProduct::prepare.
  void multiply_new_tokens() const;

  /// Adds (x A^T) B^T to a tile of one part and panel, multiplies it by the magnitudes and adds the shifts;
  /// rows of the tile are kPanelColumns floats apart.
  void expand(std::size_t part, std::int64_t panel, RowRange rows, float* tile) const;

  /// A panel of B and the vectors of its columns, of the adapters that have rows in a tile, as far as
  /// there is room: what is not among them is fetched when it is needed.
  using Spans = std::array<MemorySpan, 96>;
  std::span<const MemorySpan> spans(std::size_t part, std::int64_t panel, RowRange rows, Spans* spans) const;

 private:
  /// Rows of its A that are here.
  [[nodiscard]] std::int64_t rows_of_a(const DeviceSite& site) const;
  [[nodiscard]] std::int64_t panels_of_a(const DeviceSite& site) const {
    return panel_count(rows_of_a(site));
  }
  /// Of its B the panel with these outputs of a part; nullptr: another rank has it.
  [[nodiscard]] const std::byte* panel_of_b(const DevicePart& part, std::int64_t outputs,
                                            std::int64_t panel) const;
  /// What an adapter does to a panel of one of LinearWork::parts; `panel` becomes its number in B.
  [[nodiscard]] const DevicePart& part_of(const AdaptedRows& adapted, std::size_t part,
                                          std::int64_t* panel) const;
  /// Those adapted rows that are among `rows`, or behind the first of these.
  [[nodiscard]] std::span<const AdaptedRows> from(RowRange rows) const;
  /// Those of `rows` that the adapter changes in this part.
  [[nodiscard]] static RowRange rows_changed(const AdaptedRows& adapted, const DevicePart& part,
                                             RowRange rows);
  [[nodiscard]] std::byte* shrunk(std::int64_t row, std::int64_t column) const;
  /// Calls store(adapted, panel, rows, tile) with the tiles of input A^T, whose rows are kPanelColumns floats
  /// apart, from several threads.
  template <class Store>
  void multiply_by_a(std::span<const AdaptedRows> all, const Store& store) const;
  /// `next`, a panel or nullptr, is fetched meanwhile.
  [[nodiscard]] float* multiply_tile(const DeviceSite& site, std::int64_t panel, RowRange rows,
                                     const std::byte* next, int thread) const;
  [[nodiscard]] const std::byte* panel_of_a(const DeviceSite& site, std::int64_t panel) const;
  void expand_rows(const AdaptedRows& adapted, std::size_t part, std::int64_t panel, RowRange rows,
                   float* tile) const;

  const LinearWork& work_;
  const Step& step_;
  DType dtype_;
  void (*gemm_)(const PanelGemm&);
};

}  // namespace adaptrt
