#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "context.h"
#include "ops/linear/linear_spec.h"
#include "ops/linear/permuted_input.h"

namespace adaptrt {

/// Rows of a tile for kernels that read unpacked activations, and for products with adapters.
inline constexpr std::int64_t kBlockRows = kVectorBlockRows;
/// Number of parts whose tiles a thread computes in turn: gate and up of a gated layer.
inline constexpr std::size_t kPartsInTurn = 2;
/// Number of tiles whose sums are kept while their panels are multiplied, one part of k after the other.
inline constexpr std::int64_t kTilesKept = 4;

/// Sizes of the tiles of a layer's product.
struct Tiling {
  std::int64_t block_rows = kBlockRows;
  /// True if the kernels multiply an input in parts of k; see KernelTable::part_bytes.
  bool takes_parts = false;
  std::int64_t whole_bytes = 0;
  std::int64_t part_bytes = 0;
  std::int64_t streamed_rows = 0;
  /// The number of inputs in a part is a multiple of this.
  std::int64_t part_multiple = 1;
  /// Bytes of an activation in the form in which it is multiplied.
  std::int64_t activation_bytes = 1;
  /// Maximum bytes of one input's weights in a panel.
  std::int64_t panel_input_bytes = 0;

  /// Number of floats for the sums of a tile.
  [[nodiscard]] std::int64_t tile_floats() const { return block_rows * kPanelColumns; }
  /// Number of floats for all tiles that a thread has at a time.
  [[nodiscard]] std::int64_t scratch_floats() const {
    return (takes_parts ? kTilesKept : std::int64_t{kPartsInTurn}) * tile_floats();
  }
  /// Returns the number of inputs in a part, for `rows` rows of `width` inputs.
  [[nodiscard]] std::int64_t inputs_of_part(std::int64_t rows, std::int64_t width) const;
};

/// The expanded panels in a thread's scratch, while the thread works on a chunk of a linear layer's tiles.
struct ExpandedPanels {
  struct Key {
    std::size_t part = 0;
    std::int64_t panel = -1;
    bool operator==(const Key&) const = default;
  };
  std::array<Key, kPartsInTurn> held;
};

/// Data that a thread reads after a tile. The kernel prefetches it while it computes the tile.
struct Upcoming {
  /// Base weights that the thread multiplies next; nullptr if not known.
  const std::byte* panel = nullptr;
  /// Adapter data for the tile's rows and columns, or activations of the next part.
  std::span<const MemorySpan> spans;
};

/// Task of one call of BaseProduct::multiply.
struct TileTask {
  std::size_t part;  ///< index into LinearSpec::parts
  std::int64_t panel;
  RowRange rows;
  PackedRows packed;  ///< the same rows, packed; no value if kernels read unpacked rows
  /// Range of inputs, see GemmCall::part; nullopt: all inputs.
  std::optional<InputRange> inputs;
  Upcoming upcoming;
  /// Place for an expanded panel, below kPartsInTurn.
  std::size_t slot;
  int thread;
  /// [rows, width of the panel]; rows are `stride` floats apart. Quantised weights need kPanelColumns.
  float* tile;
  std::int64_t stride = kPanelColumns;
};

/// Computes x W^T of one linear layer, a tile at a time. Supports every storage form of W.
class BaseProduct {
 public:
  /// `spec` and `context` must outlive this object.
  BaseProduct(const LinearSpec& spec, const CpuContext& context);

  [[nodiscard]] const Tiling& tiling() const { return tiling_; }

  /// Converts the input to the form that the kernels read: permutes it like the weights, rounds it to 8 or 16
  /// bits, sums its groups, packs its rows. Call it before the first product, and before products with
  /// adapters.
  void prepare(const LinearCall& call, bool has_adapters) const;

  /// The packed input: the caller's, or the one from prepare(). No value for rows that kernels read unpacked.
  [[nodiscard]] PackedRows packed(const LinearCall& call) const {
    if (call.packed_input.has_value()) return call.packed_input;
    return call.num_rows() <= unpacked_rows_ ? PackedRows{} : context_.memory.packed_for(call.num_rows());
  }

  /// task.tile = x W^T of one part and panel.
  void multiply(const LinearCall& call, const TileTask& task, ExpandedPanels* expanded) const;

  /// Computes tile [all rows, count] = x W^T for some rows of a part with rows (PanelMatrix::has_rows); rows
  /// of the tile are kPanelColumns floats apart.
  void multiply_gathered(const LinearCall& call, std::size_t part, const GatheredOutputs& gathered,
                         int thread, float* tile) const;

 private:
  /// Place of an expanded panel.
  struct ExpansionPlace {
    std::byte* panel;
    ExpandedPanels::Key* held;  ///< the panel that it holds
    ExpandedPanels::Key wanted;

    template <class Expand>
    void fill(const Expand& expand) const {
      if (*held == wanted) return;
      expand(panel);
      *held = wanted;
    }
  };

  /// Place where a thread may keep an expanded panel.
  [[nodiscard]] std::byte* room_for_panel(int thread, std::size_t slot) const;
  /// Input of a part's product, beginning with a tile's first row.
  struct PartInput {
    const std::byte* rows;
    PackedRows packed;
    const float* sums;  ///< sums of groups, if needs_group_sums()
  };
  [[nodiscard]] PartInput input_of(const LinearCall& call, const TileTask& task) const;
  /// Rounds the rows of `input`, or sums their groups. `input`: the layer's input in `permutation`, if its
  /// weights have permutations.
  void read_rows(const LinearCall& call, const Rows& input, std::int64_t permutation, RowRange rows) const;
  void pack_rows(const Rows& input, const PackedRows& packed, RowRange rows) const;
  [[nodiscard]] PackedRows packed_of(const LinearCall& call, std::int64_t permutation) const;
  void multiply_float(const LinearCall& call, const TileTask& task, const ExpansionPlace& place) const;
  void multiply_quantized(const LinearCall& call, const TileTask& task, const ExpansionPlace& place) const;
  void multiply_int16(const LinearCall& call, const TileTask& task, const ExpansionPlace& place) const;
  void multiply_int8(const LinearCall& call, const TileTask& task, const ExpansionPlace& place) const;
  void multiply_w4a8(const LinearCall& call, const TileTask& task, const ExpansionPlace& place) const;
  /// The product for the storage form of this layer's weights.
  using Multiply = void (BaseProduct::*)(const LinearCall&, const TileTask&, const ExpansionPlace&) const;
  static Multiply multiply_for(const Quantization& quantization);

  const LinearSpec& spec_;
  const CpuContext& context_;
  PermutedInput permuted_;
  Tiling tiling_;
  bool multiplies_int16_;
  Multiply multiply_;
  std::int64_t unpacked_rows_;
};

}  // namespace adaptrt
