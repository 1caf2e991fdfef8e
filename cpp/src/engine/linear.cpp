#include <algorithm>
#include <array>
#include <span>
#include <vector>

#include "base_product.h"
#include "step.h"

namespace adaptrt {
namespace {

/// Multiply-adds that are worth a chunk of a loop.
constexpr std::int64_t kMacsPerChunk = 1 << 17;

RowRange block_of(std::int64_t block, std::int64_t rows) {
  return {block * kBlockRows, std::min((block + 1) * kBlockRows, rows)};
}

std::int64_t blocks_of(std::int64_t rows) {
  return (rows + kBlockRows - 1) / kBlockRows;
}

/// A group's rows within a range; empty when begin >= end.
RowRange within(const AdapterGroup& group, RowRange range) {
  return {std::max(group.begin, range.begin), std::min(group.end, range.end)};
}

/// One linear op in one step: which columns a task makes, and how.
class Linear {
 public:
  Linear(const LinearOp& op, const Step& step)
      : op_(op),
        step_(step),
        input_(step.buffer(op.input)),
        output_(step.buffer(op.output)),
        dtype_(op.parts[0].weight.dtype),
        gemm_(step.kernels.gemm[static_cast<std::size_t>(dtype_)]),
        activation_size_(size_of(input_.dtype)),
        base_(op, step) {
    if (op.lora_site < 0) return;
    for (const auto& group : step.groups) {
      if (site_of(group).total_rank > 0) groups_.push_back(group);
    }
  }

  void run() {
    if (!groups_.empty()) shrink();
    base_.prepare();
    multiply();
  }

 private:
  /// A task of the shrink: one panel of a group's A times a block of its rows.
  struct ShrinkTask {
    const AdapterGroup* group;
    std::int64_t panel;
    RowRange rows;
  };

  [[nodiscard]] const DeviceSite& site_of(const AdapterGroup& group) const {
    return group.adapter->sites[static_cast<std::size_t>(op_.lora_site)];
  }

  /// step.shrink[rows of groups, total_rank] = input A^T, rounded to the activation type.
  void shrink() {
    std::vector<ShrinkTask> tasks;
    for (const auto& group : groups_) {
      const std::int64_t panels = panel_count(site_of(group).total_rank);
      for (std::int64_t panel = 0; panel < panels; ++panel) {
        for (std::int64_t begin = group.begin; begin < group.end; begin += kBlockRows) {
          tasks.push_back({&group, panel, {begin, std::min(begin + kBlockRows, group.end)}});
        }
      }
    }
    const auto body = [&](std::int64_t begin, std::int64_t end, int thread) {
      for (std::int64_t i = begin; i < end; ++i) shrink_tile(tasks[static_cast<std::size_t>(i)], thread);
    };
    step_.threads.parallel_for(static_cast<std::int64_t>(tasks.size()), 1, body);
  }

  void shrink_tile(const ShrinkTask& task, int thread) {
    const DeviceSite& site = site_of(*task.group);
    const std::int64_t width = panel_width(site.total_rank, task.panel);
    float* tile = step_.scratch[static_cast<std::size_t>(thread)].data();
    gemm_({.a = step_.row(op_.input, task.rows.begin),
           .a_stride = input_.width,
           .panel = site.a + panel_offset(dtype_, input_.width, task.panel),
           .k = input_.width,
           .width = width,
           .out = tile,
           .out_stride = kPanelColumns,
           .rows = task.rows.end - task.rows.begin});
    for (std::int64_t row = task.rows.begin; row < task.rows.end; ++row, tile += kPanelColumns) {
      step_.kernels.scale_and_store(tile, 1.0F, width, shrunk(row, task.panel * kPanelColumns), input_.dtype);
    }
  }

  [[nodiscard]] std::byte* shrunk(std::int64_t row, std::int64_t column) const {
    return step_.shrink + static_cast<std::size_t>(row * step_.shrink_stride + column) * activation_size_;
  }

  void multiply() {
    const bool gated = op_.epilogue == LinearEpilogue::kSiluMul;
    std::int64_t units = 0;
    for (const auto& part : op_.parts) units += panel_count(part.weight.n);
    if (gated) units = panel_count(op_.parts[0].weight.n);
    const std::int64_t blocks = blocks_of(step_.rows);
    // Tasks are numbered block by block within a unit of columns, so that a thread that takes several in a
    // row reads a panel from memory once, and panels in the order of their addresses.
    const auto body = [&](std::int64_t begin, std::int64_t end, int thread) {
      ExpandedPanels expanded;
      for (std::int64_t task = begin; task < end; ++task) {
        const std::int64_t unit = task / blocks;
        const RowRange rows = block_of(task % blocks, step_.rows);
        const bool more = task + 1 < end && (task + 1) % blocks == 0;
        if (gated) {
          // With one block of rows, each panel is read once: the parts in turn.
          const std::byte* next = more ? panel_data({0, unit + 1}) : nullptr;
          const std::byte* turn = blocks == 1 ? panel_data({1, unit}) : next;
          const std::byte* last = blocks == 1 || !more ? next : panel_data({1, unit + 1});
          gated_tile(unit, rows, turn, last, thread, &expanded);
        } else {
          plain_tile(place_of(unit), rows, more ? panel_data(place_of(unit + 1)) : nullptr, thread,
                     &expanded);
        }
      }
    };
    step_.threads.parallel_for(units * blocks, grain_of(units, blocks), body);
  }

  /// One panel of one part.
  struct Place {
    std::size_t part;
    std::int64_t panel;
  };

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

  /// Tasks that a thread claims at once: enough work to be worth it, whole units where there are plenty.
  [[nodiscard]] std::int64_t grain_of(std::int64_t units, std::int64_t blocks) const {
    const std::int64_t threads = step_.threads.num_threads();
    const std::int64_t macs = std::min(step_.rows, kBlockRows) * kPanelColumns * input_.width;
    const std::int64_t least = std::max<std::int64_t>(1, kMacsPerChunk / std::max<std::int64_t>(1, macs));
    const std::int64_t share = units / (threads * 4);
    return std::max(least, share > 0 ? share * blocks : 1);
  }

  /// tile[rows, width] = the part's y in one panel of columns; see BaseProduct for `slot`.
  void part_tile(Place place, RowRange rows, const std::byte* next, std::size_t slot, int thread,
                 ExpandedPanels* expanded, float* tile) {
    const LinearPart& part = op_.parts[place.part];
    const std::int64_t width = panel_width(part.weight.n, place.panel);
    if (groups_.empty()) {
      base_.multiply(place.part, place.panel, rows, {next, {}}, slot, thread, expanded, tile);
    } else {
      AdapterSpans spans;
      const Upcoming upcoming{next, adapters_of(place, rows, spans)};
      base_.multiply(place.part, place.panel, rows, upcoming, slot, thread, expanded, tile);
      for (const auto& group : groups_) expand(group, place, rows, width, tile);
    }
    if (part.bias.size == 0) return;
    for (std::int64_t row = 0; row < rows.end - rows.begin; ++row) {
      step_.kernels.add(part.bias.data + place.panel * kPanelColumns, width, tile + row * kPanelColumns);
    }
  }

  /// A panel of B and the magnitudes of its columns, of each group that has rows in a tile.
  using AdapterSpans = std::array<MemorySpan, 2 * static_cast<std::size_t>(kBlockRows)>;

  std::span<const MemorySpan> adapters_of(Place place, RowRange rows, AdapterSpans& spans) const {
    const std::int64_t width = panel_width(op_.parts[place.part].weight.n, place.panel);
    std::size_t count = 0;
    for (const auto& group : groups_) {
      const DevicePart& part = site_of(group).parts[place.part];
      const RowRange shared = within(group, rows);
      if (part.rank == 0 || shared.begin >= shared.end) continue;
      spans[count++] = {part.b + panel_offset(dtype_, part.rank, place.panel),
                        static_cast<std::int64_t>(panel_bytes(dtype_, width, part.rank))};
      if (part.magnitude == nullptr) continue;
      spans[count++] = {reinterpret_cast<const std::byte*>(part.magnitude + place.panel * kPanelColumns),
                        width * static_cast<std::int64_t>(sizeof(float))};
    }
    return {spans.data(), count};
  }

  /// Adds a group's (x A^T) B^T to its rows of the tile and multiplies them by its magnitudes.
  void expand(const AdapterGroup& group, Place place, RowRange rows, std::int64_t width, float* tile) const {
    const DevicePart& part = site_of(group).parts[place.part];
    const RowRange shared = within(group, rows);
    if (part.rank == 0 || shared.begin >= shared.end) return;
    float* out = tile + (shared.begin - rows.begin) * kPanelColumns;
    gemm_({.a = shrunk(shared.begin, part.rank_offset),
           .a_stride = step_.shrink_stride,
           .panel = part.b + panel_offset(dtype_, part.rank, place.panel),
           .k = part.rank,
           .width = width,
           .out = out,
           .out_stride = kPanelColumns,
           .rows = shared.end - shared.begin,
           .accumulate = true});
    if (part.magnitude == nullptr) return;
    for (std::int64_t row = shared.begin; row < shared.end; ++row, out += kPanelColumns) {
      step_.kernels.multiply(part.magnitude + place.panel * kPanelColumns, width, out);
    }
  }

  void plain_tile(Place place, RowRange rows, const std::byte* next, int thread, ExpandedPanels* expanded) {
    float* tile = step_.scratch[static_cast<std::size_t>(thread)].data();
    part_tile(place, rows, next, 0, thread, expanded, tile);
    const std::int64_t width = panel_width(op_.parts[place.part].weight.n, place.panel);
    std::int64_t column = place.panel * kPanelColumns;
    for (std::size_t before = 0; before < place.part; ++before) column += op_.parts[before].weight.n;
    for (std::int64_t row = rows.begin; row < rows.end; ++row, tile += kPanelColumns) {
      float* out = step_.float_row(op_.output, row) + column;
      if (op_.epilogue == LinearEpilogue::kAdd) {
        step_.kernels.add(tile, width, out);
      } else {
        std::copy_n(tile, width, out);
      }
    }
  }

  /// `next`, `last`: what is read after the first and the second part's panel.
  void gated_tile(std::int64_t panel, RowRange rows, const std::byte* next, const std::byte* last, int thread,
                  ExpandedPanels* expanded) {
    float* gated = step_.scratch[static_cast<std::size_t>(thread)].data();
    float* linear = gated + kTileFloats;
    part_tile({0, panel}, rows, next, 0, thread, expanded, gated);
    part_tile({1, panel}, rows, last, 1, thread, expanded, linear);
    const std::int64_t width = panel_width(op_.parts[0].weight.n, panel);
    const std::size_t column = static_cast<std::size_t>(panel * kPanelColumns) * size_of(output_.dtype);
    for (std::int64_t row = rows.begin; row < rows.end; ++row) {
      step_.kernels.silu_mul(gated, linear, width, step_.row(op_.output, row) + column, output_.dtype);
      gated += kPanelColumns;
      linear += kPanelColumns;
    }
  }

  const LinearOp& op_;
  const Step& step_;
  const Buffer& input_;
  const Buffer& output_;
  DType dtype_;
  void (*gemm_)(const PanelGemm&);
  std::size_t activation_size_;
  BaseProduct base_;
  /// Groups whose adapter changes this layer.
  std::vector<AdapterGroup> groups_;
};

}  // namespace

void run_op(const LinearOp& op, const Step& step) {
  Linear(op, step).run();
}

}  // namespace adaptrt
