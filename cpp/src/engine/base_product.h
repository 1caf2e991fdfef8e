#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "step.h"

namespace adaptrt {

/// Rows of a tile: its sums, of two parts at once, stay in the first-level cache.
inline constexpr std::int64_t kBlockRows = 48;
inline constexpr std::int64_t kTileFloats = kBlockRows * kPanelColumns;
/// Parts whose tiles a thread makes in turn: those of LinearEpilogue::kSiluMul.
inline constexpr std::size_t kPartsInTurn = 2;

struct RowRange {
  std::int64_t begin;
  std::int64_t end;
};

/// Which panels a thread's scratch holds in expanded form, while it works on a chunk of a linear op's tiles.
struct ExpandedPanels {
  struct Key {
    std::size_t part = 0;
    std::int64_t panel = -1;
    bool operator==(const Key&) const = default;
  };
  std::array<Key, kPartsInTurn> held;
};

/// What a thread will read after a tile, to be brought near while the tile is made.
struct Upcoming {
  /// The panel of base weights that it will multiply next; nullptr when it is not known.
  const std::byte* panel = nullptr;
  /// What the adapters of the tile's rows need at the tile's columns.
  std::span<const MemorySpan> adapters;
};

/// x W^T of one linear op in one step, a tile at a time, however W is stored.
class BaseProduct {
 public:
  BaseProduct(const LinearOp& op, const Step& step);

  /// Rounds the input to int8, or sums its groups, where the weights want it. Before the first tile.
  void prepare() const;

  /// tile[rows, width of the panel] = x W^T of one part and panel, rows kPanelColumns floats apart. `slot`,
  /// below kPartsInTurn: where an expanded panel is kept.
  void multiply(std::size_t part, std::int64_t panel, RowRange rows, const Upcoming& upcoming,
                std::size_t slot, int thread, ExpandedPanels* expanded, float* tile) const;

 private:
  /// Where a panel is kept in expanded form.
  struct ExpansionPlace {
    std::byte* panel;
    ExpandedPanels::Key* held;  ///< what is there
    ExpandedPanels::Key wanted;

    template <class Expand>
    void fill(const Expand& expand) const {
      if (*held == wanted) return;
      expand(panel);
      *held = wanted;
    }
  };

  void multiply_float(const PanelMatrix& weight, std::int64_t panel, RowRange rows, const Upcoming& upcoming,
                      const ExpansionPlace& place, float* tile) const;
  void multiply_quantized(const PanelMatrix& weight, std::int64_t panel, RowRange rows, const std::byte* next,
                          const ExpansionPlace& place, float* tile) const;
  void multiply_int8(const PanelMatrix& weight, std::int64_t panel, RowRange rows, const std::byte* next,
                     float* tile) const;

  const LinearOp& op_;
  const Step& step_;
  const Buffer& input_;
};

}  // namespace adaptrt
