#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "adaptrt/lora/stored_matrix.h"
#include "ops/linear/base_product.h"

namespace adaptrt {

/// The adapters' products in a linear layer: x A^T for all adapted rows first, then the product with B for
/// one tile at a time. Also computes the logits of tokens that adapters add.
class AdapterProduct {
 public:
  /// All arguments must outlive this object.
  AdapterProduct(const LinearSpec& spec, const BaseProduct& base, const CpuContext& context);

  /// True if an adapter reads the layer's input.
  [[nodiscard]] static bool reads_input(const LinearCall& call) {
    return !call.adapted.empty() || !call.new_tokens.empty();
  }

  /// Computes StepMemory::shrink[adapted rows, total_rank] = input A^T, rounded to the activation type. If
  /// ranks share adapters, they exchange their results. Call it after BaseProduct::prepare.
  void shrink(const LinearCall& call) const;

  /// Computes the output's columns after those of the part: input A^T for LinearCall::new_tokens, scaled and
  /// capped like the other columns. Call it after BaseProduct::prepare.
  void multiply_new_tokens(const LinearCall& call) const;

  /// Adds (x A^T) B^T to a tile of one part and panel, multiplies it by the magnitudes, and adds the shifts
  /// if there are no LinearCall::row_factors. Rows of the tile are kPanelColumns floats apart.
  void expand(const LinearCall& call, PanelPlace place, RowRange rows, float* tile, int thread) const;
  /// Adds the shifts to a tile that was multiplied by the factors of rows, which are those of the inputs.
  void add_shifts(const LinearCall& call, PanelPlace place, RowRange rows, float* tile) const;

  /// The data to prefetch for a tile: panels of B and the vectors of their columns, for adapters with rows in
  /// the tile. The number of spans is limited; the rest is not prefetched.
  using Spans = std::array<MemorySpan, 96>;
  std::span<const MemorySpan> spans(const LinearCall& call, PanelPlace place, RowRange rows,
                                    Spans* spans) const;

 private:
  /// Number of rows of A on this rank.
  [[nodiscard]] std::int64_t rows_of_a(const DeviceSite& site) const;
  [[nodiscard]] std::int64_t panels_of_a(const DeviceSite& site) const {
    return panel_count(rows_of_a(site));
  }
  [[nodiscard]] StoredMatrix a_of(const DeviceSite& site) const;
  /// A panel of one of LinearSpec::parts in the adapters' matrices.
  struct PanelOfB {
    std::int64_t slice;      ///< of the vocabulary; 0 for other layers
    std::size_t part;        ///< number in DeviceSite::parts
    std::int64_t first;      ///< its first output in the part's or slice's outputs
    std::int64_t width;      ///< number of its outputs
    std::int64_t rows_of_b;  ///< number of rows of B on this rank
    /// Number of the panel in B on this rank; nullopt if another rank has it.
    std::optional<std::int64_t> panel;
  };
  [[nodiscard]] PanelOfB find_in_b(PanelPlace place) const;
  [[nodiscard]] StoredMatrix b_of(const DevicePart& part, const PanelOfB& place) const;
  /// The product with a panel of a matrix. For int8 it is that of the integers.
  void multiply(PanelGemm gemm, const StoredMatrix& matrix, std::int64_t panel, int thread) const;
  void multiply_compressed(PanelGemm gemm, const StoredMatrix& matrix, std::int64_t panel, int thread) const;
  void multiply_int8(const PanelGemm& gemm, const StoredMatrix& matrix, std::int64_t panel, int thread) const;
  /// Space for a thread's decoded panels or sums; its contents are lost by the next call.
  [[nodiscard]] std::byte* scratch(std::size_t bytes, int thread) const;
  /// Stores a tile of x A^T in StepMemory::shrink, multiplied by DeviceSite::rank_scales of each row's
  /// adapter.
  void store_shrunk(const LinearCall& call, std::int64_t width, std::int64_t panel, RowRange rows,
                    float* tile) const;
  /// Effect of an adapter on a panel.
  [[nodiscard]] static const DevicePart& part_of(const AdaptedRows& adapted, const PanelOfB& place) {
    return adapted.site[place.slice].parts[place.part];
  }
  /// Entries of LinearCall::adapted, beginning with the first that ends after rows.begin.
  [[nodiscard]] static std::span<const AdaptedRows> from(const LinearCall& call, RowRange rows);
  /// Rows among `rows` that the adapter changes in this part.
  [[nodiscard]] static RowRange rows_changed(const AdaptedRows& adapted, const DevicePart& part,
                                             RowRange rows);
  [[nodiscard]] std::byte* shrunk(std::int64_t row, std::int64_t column) const;
  /// Joins consecutive rows whose adapters share A, so that it is read once.
  [[nodiscard]] std::span<const AdaptedRows> rows_by_a(const LinearCall& call) const;
  /// Calls store(adapted, panel, rows, tile) with the tiles of input A^T, from several threads. Rows of a
  /// tile are kPanelColumns floats apart; `store` may change them.
  template <class Store>
  void multiply_by_a(const LinearCall& call, std::span<const AdaptedRows> all, const Store& store) const;
  /// Prefetches panel `next` at the same time; nullptr: prefetches nothing.
  [[nodiscard]] float* multiply_tile(const LinearCall& call, const DeviceSite& site, std::int64_t panel,
                                     RowRange rows, const std::byte* next, int thread) const;
  /// Adds (x A^T) B^T to a tile.
  void add_products(const LinearCall& call, const PanelOfB& place, RowRange rows, float* tile,
                    int thread) const;

  const LinearSpec& spec_;
  const BaseProduct& base_;
  const CpuContext& context_;
  DType dtype_;
  DType input_dtype_;
  void (*gemm_)(const PanelGemm&);
  /// KernelTable::added_rows; 0 if B is not bfloat16.
  std::int64_t added_rows_;
};

}  // namespace adaptrt
