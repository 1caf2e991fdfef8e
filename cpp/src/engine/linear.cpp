#include <algorithm>
#include <optional>

#include "adapter_product.h"
#include "base_product.h"
#include "step.h"

namespace adaptrt {
namespace {

/// Multiply-adds that are worth a chunk of a loop.
constexpr std::int64_t kMacsPerChunk = 1 << 17;

/// Bytes of an output that are written past the caches, where kernels can: before the next op has read so
/// many, most would be gone from them, and fetching lines only to write to them takes as long as writing.
constexpr std::int64_t kStreamedBytes = 1 << 20;

/// One linear op in one step: which columns a task makes, and how.
///
/// A unit is a panel of columns, of both parts where they are gated; a task is a unit times a block of rows.
/// Kernels that take an input in parts go over units together, a part for all of them before the next, and
/// over one block of rows after the other; the others take all blocks of a unit in turn.
class Linear {
 public:
  Linear(const LinearOp& op, const Step& step)
      : op_(op),
        step_(step),
        input_(step.buffer(op.input)),
        output_(step.buffer(op.output)),
        base_(op, step),
        adapters_(op, step),
        tiling_(base_.tiling()),
        streams_(step.kernels.stream_rows != nullptr && op.epilogue != LinearEpilogue::kAdd &&
                 step.rows * row_bytes(output_) >= kStreamedBytes) {}

  void run() const {
    base_.prepare(!adapters_.is_empty());
    if (!adapters_.is_empty()) adapters_.shrink();
    if (!tiling_.takes_parts) {
      multiply({0, step_.rows});
      return;
    }
    for (std::int64_t row = 0; row < step_.rows; row += tiling_.block_rows) {
      multiply({row, std::min(row + tiling_.block_rows, step_.rows)});
    }
  }

 private:
  /// One panel of one part.
  struct Place {
    std::size_t part;
    std::int64_t panel;
  };

  [[nodiscard]] bool is_gated() const { return adaptrt::is_gated(op_.epilogue); }

  [[nodiscard]] std::int64_t num_units() const {
    if (is_gated()) return panel_count(op_.parts[0].weight.n);
    std::int64_t units = 0;
    for (const auto& part : op_.parts) units += panel_count(part.weight.n);
    return units;
  }

  /// Panel `unit` of all parts' panels, one part after another.
  [[nodiscard]] Place place_of(std::int64_t unit) const {
    Place place{0, unit};
    for (; place.panel >= panel_count(op_.parts[place.part].weight.n); ++place.part) {
      place.panel -= panel_count(op_.parts[place.part].weight.n);
    }
    return place;
  }

  [[nodiscard]] const std::byte* panel_data(Place place) const {
    const PanelMatrix& weight = op_.parts[place.part].weight;
    return weight.data + weight.offset(place.panel);
  }

  /// Tasks are numbered block by block within a unit of columns, so that a thread that takes several in a row
  /// reads a panel from memory once, and panels in the order of their addresses.
  void multiply(RowRange rows) const {
    const std::int64_t units = num_units();
    const std::int64_t blocks = (rows.end - rows.begin + tiling_.block_rows - 1) / tiling_.block_rows;
    const std::int64_t part_inputs = tiling_.inputs_of_part(rows.end - rows.begin, input_.width);
    const std::int64_t parts = (input_.width + part_inputs - 1) / part_inputs;
    const std::int64_t together = parts == 1 ? 1 : kTilesKept / (is_gated() ? 2 : 1);
    const auto body = [&](std::int64_t begin, std::int64_t end, int thread) {
      ExpandedPanels expanded;
      for (std::int64_t task = begin; task < end; task += together) {
        const std::int64_t first = rows.begin + task % blocks * tiling_.block_rows;
        const Tile tile{.rows = {first, std::min(first + tiling_.block_rows, rows.end)},
                        .thread = thread,
                        .expanded = &expanded,
                        .is_only_block = blocks == 1};
        if (parts > 1) {  // of one block of rows
          multiply_in_parts({task, std::min(task + together, end)}, end, part_inputs, tile);
        } else {
          multiply_unit(task / blocks, task + 1 < end && (task + 1) % blocks == 0, tile);
        }
      }
    };
    step_.threads.parallel_for(units * blocks, grain_of(units, blocks, together), body);
  }

  /// Tasks that a thread claims at once: enough work to be worth it, whole units where there are plenty.
  [[nodiscard]] std::int64_t grain_of(std::int64_t units, std::int64_t blocks, std::int64_t together) const {
    const std::int64_t threads = step_.threads.num_threads();
    const std::int64_t macs = std::min(step_.rows, tiling_.block_rows) * kPanelColumns * input_.width;
    const std::int64_t least = std::max<std::int64_t>(1, kMacsPerChunk / std::max<std::int64_t>(1, macs));
    const std::int64_t share = units / (threads * 4);
    const std::int64_t grain = std::max(least, share > 0 ? share * blocks : 1);
    return units >= 2 * threads * together ? std::max(grain, together) : grain;
  }

  /// What the tiles of a task have in common.
  struct Tile {
    RowRange rows;
    int thread;
    ExpandedPanels* expanded;
    /// The step's rows are one block: each panel is read once.
    bool is_only_block;
  };

  [[nodiscard]] float* sums(const Tile& tile, std::int64_t index) const {
    return step_.scratch[static_cast<std::size_t>(tile.thread)].data() + index * tiling_.tile_floats();
  }

  /// `more`: the thread goes on with the next unit.
  void multiply_unit(std::int64_t unit, bool more, const Tile& tile) const {
    if (!is_gated()) {
      const std::byte* next = more ? panel_data(place_of(unit + 1)) : nullptr;
      multiply_part(place_of(unit), std::nullopt, next, 0, tile);
    } else {
      // With one block of rows, each panel is read once: the parts in turn.
      const std::byte* next = more ? panel_data({0, unit + 1}) : nullptr;
      const std::byte* turn = tile.is_only_block ? panel_data({1, unit}) : next;
      const std::byte* last = tile.is_only_block || !more ? next : panel_data({1, unit + 1});
      multiply_part({0, unit}, std::nullopt, turn, 0, tile);
      multiply_part({1, unit}, std::nullopt, last, 1, tile);
    }
    finish_unit(unit, 0, tile);
  }

  struct UnitRange {
    std::int64_t begin;
    std::int64_t end;
  };

  /// Units that are taken together, of those up to `end` that the thread takes.
  void multiply_in_parts(UnitRange units, std::int64_t end, std::int64_t part_inputs,
                         const Tile& tile) const {
    const std::int64_t tiles = is_gated() ? 2 : 1;
    const std::int64_t together = units.end - units.begin;
    for (std::int64_t begin = 0; begin < input_.width; begin += part_inputs) {
      const InputRange inputs{begin, std::min(begin + part_inputs, input_.width)};
      for (std::int64_t unit = units.begin; unit < units.end; ++unit) {
        const std::int64_t slot = (unit - units.begin) * tiles;
        for (std::int64_t i = 0; i < tiles; ++i) {
          const auto place = [&](std::int64_t of_unit) {
            return is_gated() ? Place{static_cast<std::size_t>(i), of_unit} : place_of(of_unit);
          };
          const std::byte* next = unit + together < end ? panel_data(place(unit + together)) : nullptr;
          multiply_part(place(unit), inputs, next, slot + i, tile);
        }
      }
    }
    for (std::int64_t unit = units.begin; unit < units.end; ++unit) {
      finish_unit(unit, (unit - units.begin) * tiles, tile);
    }
  }

  void multiply_part(Place place, std::optional<InputRange> inputs, const std::byte* next, std::int64_t index,
                     const Tile& tile) const {
    AdapterProduct::Spans spans;
    Upcoming upcoming{next, {}};
    const bool is_last = !inputs.has_value() || inputs->end == input_.width;
    if (is_last && !adapters_.is_empty()) {
      upcoming.adapters = adapters_.spans(place.part, place.panel, tile.rows, &spans);
    }
    base_.multiply({.part = place.part,
                    .panel = place.panel,
                    .rows = tile.rows,
                    .inputs = inputs,
                    .upcoming = upcoming,
                    .slot = static_cast<std::size_t>(index) % kPartsInTurn,
                    .thread = tile.thread,
                    .tile = sums(tile, index)},
                   tile.expanded);
  }

  /// What adapters, the bias and the op's scale and bound make of a tile.
  void finish_part(Place place, std::int64_t index, const Tile& tile) const {
    const LinearPart& part = op_.parts[place.part];
    float* rows = sums(tile, index);
    if (!adapters_.is_empty()) adapters_.expand(place.part, place.panel, tile.rows, rows);
    if (part.bias.size == 0 && op_.scale == 1.0F && op_.softcap == 0.0F) return;
    const std::int64_t width = panel_width(part.weight.n, place.panel);
    for (std::int64_t row = tile.rows.begin; row < tile.rows.end; ++row, rows += kPanelColumns) {
      if (part.bias.size != 0) step_.kernels.add(part.bias.data + place.panel * kPanelColumns, width, rows);
      if (op_.scale != 1.0F) {
        step_.kernels.scale_and_store(rows, op_.scale, width, reinterpret_cast<std::byte*>(rows),
                                      DType::kFloat32);
      }
      if (op_.softcap != 0.0F) step_.kernels.softcap(op_.softcap, width, rows);
    }
  }

  /// Puts a unit, whose tiles begin at number `index`, where the op's output goes.
  void finish_unit(std::int64_t unit, std::int64_t index, const Tile& tile) const {
    if (is_gated()) {
      finish_part({0, unit}, index, tile);
      finish_part({1, unit}, index + 1, tile);
      store_activated({0, unit}, sums(tile, index), sums(tile, index + 1), tile.rows);
    } else {
      const Place place = place_of(unit);
      finish_part(place, index, tile);
      if (is_activated(op_.epilogue)) {
        store_activated(place, sums(tile, index), nullptr, tile.rows);
      } else {
        store(place, sums(tile, index), tile.rows);
      }
    }
  }

  static std::int64_t row_bytes(const Buffer& buffer) {
    return buffer.width * static_cast<std::int64_t>(size_of(buffer.dtype));
  }

  /// Copies the first `bytes` of each row of a tile to the output, where rows begin at `out`.
  void stream(const float* tile, RowRange rows, std::int64_t bytes, std::byte* out) const {
    step_.kernels.stream_rows(reinterpret_cast<const std::byte*>(tile), kPanelColumns * sizeof(float),
                              rows.end - rows.begin, bytes, out, row_bytes(output_));
  }

  /// Of the output, where a panel's begin.
  [[nodiscard]] std::int64_t column_of(Place place) const {
    std::int64_t column = place.panel * kPanelColumns;
    for (std::size_t before = 0; before < place.part; ++before) column += op_.parts[before].weight.n;
    return column;
  }

  void store(Place place, const float* sums, RowRange rows) const {
    const std::int64_t width = panel_width(op_.parts[place.part].weight.n, place.panel);
    const std::int64_t column = column_of(place);
    if (streams_) {
      stream(sums, rows, width * static_cast<std::int64_t>(sizeof(float)),
             reinterpret_cast<std::byte*>(step_.float_row(op_.output, rows.begin) + column));
      return;
    }
    for (std::int64_t row = rows.begin; row < rows.end; ++row, sums += kPanelColumns) {
      float* out = step_.float_row(op_.output, row) + column;
      if (op_.epilogue == LinearEpilogue::kAdd) {
        step_.kernels.add(sums, width, out);
      } else {
        std::copy_n(sums, width, out);
      }
    }
  }

  /// Where the output is streamed, the result takes the place of `activated` before.
  void store_activated(Place place, float* activated, const float* linear, RowRange rows) const {
    const std::int64_t width = panel_width(op_.parts[place.part].weight.n, place.panel);
    const auto element = static_cast<std::int64_t>(size_of(output_.dtype));
    std::byte* out = step_.row(op_.output, rows.begin) + column_of(place) * element;
    for (std::int64_t i = 0; i < rows.end - rows.begin; ++i) {
      float* row = activated + i * kPanelColumns;
      std::byte* to = streams_ ? reinterpret_cast<std::byte*>(row) : out + i * row_bytes(output_);
      activate(row, linear == nullptr ? nullptr : linear + i * kPanelColumns, width, to);
    }
    if (streams_) stream(activated, rows, width * element, out);
  }

  void activate(const float* x, const float* linear, std::int64_t width, std::byte* out) const {
    switch (op_.epilogue) {
      case LinearEpilogue::kSiluMul:
        return step_.kernels.silu_mul(x, linear, width, out, output_.dtype);
      case LinearEpilogue::kGeluMul:
      case LinearEpilogue::kGelu:
        return step_.kernels.gelu(x, linear, width, out, output_.dtype);
      case LinearEpilogue::kGeluTanhMul:
      case LinearEpilogue::kGeluTanh:
        return step_.kernels.gelu_tanh(x, linear, width, out, output_.dtype);
      case LinearEpilogue::kStore:
      case LinearEpilogue::kAdd:
        return;
    }
  }

  const LinearOp& op_;
  const Step& step_;
  const Buffer& input_;
  const Buffer& output_;
  BaseProduct base_;
  AdapterProduct adapters_;
  Tiling tiling_;
  bool streams_;  ///< the output
};

}  // namespace

void run_op(const LinearOp& op, const Step& step) {
  Linear(op, step).run();
}

}  // namespace adaptrt
