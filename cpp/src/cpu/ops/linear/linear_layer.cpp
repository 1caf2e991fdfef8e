#include "ops/linear/linear_layer.h"

#include <algorithm>
#include <array>
#include <optional>
#include <span>
#include <vector>

#include "ranks/overlapped_sum.h"

namespace adaptrt {
namespace {

/// Minimum number of multiply-adds in a chunk of a parallel loop.
constexpr std::int64_t kMacsPerChunk = 1 << 17;

/// Minimum bytes of an output for non-temporal stores, if the kernels have them. Most of such an output would
/// be evicted before the next op reads it. Normal stores also read the lines that they overwrite, which takes
/// as long as writing them.
constexpr std::int64_t kStreamedBytes = 1 << 20;

/// Number of panels of a group's parts; for a gated layer, of one of its parts.
std::int64_t num_panels_of(const LinearSpec& spec) {
  if (is_gated(spec.epilogue)) return panel_count(spec.parts[0].weight.n);
  std::int64_t panels = 0;
  for (const LinearPart& part : spec.parts.first(spec.parts_per_group)) panels += panel_count(part.weight.n);
  return panels;
}

/// One call of a linear layer; splits it into tasks.
///
/// A unit is a panel of columns; in a gated layer, the same panel of both parts. A task is a unit times a
/// block of rows. Kernels that multiply an input in parts process several units together: one part for all of
/// them, then the next part; one block of rows after another. Other kernels process all blocks of a unit in
/// turn.
class LinearRun {
 public:
  /// `panels`: the panels to compute; the output begins with their columns.
  LinearRun(const LinearLayer& layer, const LinearCall& call, PanelRange panels, bool streams)
      : spec_(layer.spec()),
        call_(call),
        context_(layer.context()),
        base_(layer.base()),
        adapters_(layer.adapters()),
        output_(layer.output()),
        tiling_(base_.tiling()),
        units_(spec_, panels),
        target_{.call = call, .first_panel = panels.begin, .streams = streams},
        output_is_sums_(output_.is_sums(target_)) {}

  void multiply() const {
    for (ThreadRows& rows : call_.chosen.threads) rows.first_row = -1;
    const std::span<const RowGroup> groups = cut_groups();
    if (call_.groups.size() > 1 || !tiling_.takes_parts || has_few_units()) {
      multiply(groups);
    } else {
      for (const RowGroup& block : groups) multiply({&block, 1});
    }
  }

  /// The groups; for kernels that multiply an input in parts, each has one block of rows. Used until a layer
  /// splits its groups itself.
  [[nodiscard]] std::span<const RowGroup> cut_groups() const {
    if (!tiling_.takes_parts) return call_.groups;
    cut_into_blocks();
    return context_.memory.linear.blocks;
  }

  /// Computes everything in one thread; `groups` are split already. `following` is the thread's next panel.
  void multiply_here(std::span<const RowGroup> groups, const std::byte* following, int thread) const {
    ExpandedPanels expanded;
    for (std::size_t i = 0; i < groups.size(); ++i) {
      const std::byte* next = i + 1 < groups.size() ? units_.panel_of(groups[i + 1], 0) : following;
      multiply_group(groups[i], {0, units_.count() * blocks_of(groups[i])}, next, thread, &expanded);
    }
  }

 private:
  using Place = PanelPlace;
  using ActivationSpans = LinearUnits::ActivationSpans;

  [[nodiscard]] std::int64_t blocks_of(const RowGroup& group) const {
    return (group.rows.count() + tiling_.block_rows - 1) / tiling_.block_rows;
  }

  /// Blocks of a group have equal sizes, as far as whole tiles of every kernel allow. The next panel is
  /// fetched during the last block, and a block of few rows would be too short for that.
  [[nodiscard]] std::int64_t rows_of_blocks(const RowGroup& group) const {
    if (tiling_.takes_parts) return tiling_.block_rows;
    constexpr std::int64_t kWholeTiles = 12;
    static_assert(kBlockRows % kWholeTiles == 0);
    const std::int64_t blocks = blocks_of(group);
    const std::int64_t even = (group.rows.count() + blocks - 1) / blocks;
    return (even + kWholeTiles - 1) / kWholeTiles * kWholeTiles;
  }

  /// True if threads share a unit's rows, because there are not enough units.
  [[nodiscard]] bool has_few_units() const {
    return call_.groups.size() == 1 && units_.count() < context_.threads.num_threads();
  }

  /// Splits the groups into groups of one block of rows each, in LinearScratch::blocks.
  void cut_into_blocks() const {
    constexpr std::int64_t kPairOfTiles = 2 * PackedSteps::kBlockRows;
    const std::int64_t threads = context_.threads.num_threads();
    std::int64_t block_rows = tiling_.block_rows;
    if (has_few_units()) {
      const std::int64_t pairs = (call_.num_rows() + kPairOfTiles * threads - 1) / (kPairOfTiles * threads);
      block_rows = std::min(block_rows, pairs * kPairOfTiles);
    }
    std::vector<RowGroup>& blocks = context_.memory.linear.blocks;
    blocks.clear();
    for (const RowGroup& group : call_.groups) {
      for (std::int64_t row = group.rows.begin; row < group.rows.end; row += block_rows) {
        blocks.push_back({{row, std::min(row + block_rows, group.rows.end)}, group.first_part});
      }
    }
  }

  /// Tasks are numbered block by block within a unit of columns. So a thread with several consecutive tasks
  /// reads a panel from memory once, and reads panels in the order of their addresses.
  void multiply(std::span<const RowGroup> groups) const {
    std::vector<std::int64_t>& ends = context_.memory.linear.task_ends;
    ends.clear();
    std::int64_t tasks = 0;
    for (const RowGroup& group : groups) ends.push_back(tasks += units_.count() * blocks_of(group));
    const auto group_of = [&](std::int64_t task) {
      return static_cast<std::size_t>(std::ranges::upper_bound(ends, task) - ends.begin());
    };
    const auto begin_of = [&](std::size_t group) { return group == 0 ? 0 : ends[group - 1]; };
    const auto first_panel_of = [&](std::int64_t task) -> const std::byte* {
      if (task == tasks) return nullptr;
      const std::size_t group = group_of(task);
      const std::int64_t unit = (task - begin_of(group)) / blocks_of(groups[group]);
      return units_.panel_of(groups[group], unit);
    };
    const auto body = [&](const ThreadPool::Chunk& chunk, int thread) {
      ExpandedPanels expanded;
      std::size_t group = group_of(chunk.begin);
      for (std::int64_t task = chunk.begin; task < chunk.end; ++group) {
        const std::int64_t first = begin_of(group);
        const std::int64_t last = std::min(chunk.end, ends[group]);
        multiply_group(groups[group], {task - first, last - first},
                       first_panel_of(last < chunk.end ? last : chunk.next), thread, &expanded);
        task = last;
      }
      if (thread == 0 && context_.overlapped_sum.is_under_way()) context_.overlapped_sum.go_on();
    };
    context_.threads.parallel_for(tasks, grain_of(groups, tasks), body);
  }

  /// Runs tasks [range.begin, range.end) of one group; `following` is the thread's next panel.
  void multiply_group(const RowGroup& group, RowRange range, const std::byte* following, int thread,
                      ExpandedPanels* expanded) const {
    const std::int64_t blocks = blocks_of(group);
    const std::int64_t block_rows = rows_of_blocks(group);
    const std::int64_t part_inputs = inputs_of_part(group.rows.count());
    const bool in_parts = part_inputs < spec_.inputs();  // of one block of rows
    const std::int64_t together = in_parts ? tiles_together() : 1;
    const PackedRows packed = packed_rows_of(group, thread);
    for (std::int64_t task = range.begin; task < range.end; task += together) {
      const std::int64_t first = group.rows.begin + task % blocks * block_rows;
      const Tile tile{.rows = {first, std::min(first + block_rows, group.rows.end)},
                      .first_part = group.first_part,
                      .thread = thread,
                      .expanded = expanded,
                      .packed = packed.from(first - group.rows.begin),
                      .is_only_block = blocks == 1};
      if (in_parts) {
        multiply_in_parts({task, std::min(task + together, range.end)}, range.end, following, part_inputs,
                          tile);
        continue;
      }
      const std::int64_t unit = task / blocks;
      const bool leaves_unit = (task + 1) % blocks == 0;
      const std::byte* next = nullptr;
      if (task + 1 == range.end) {
        next = following;
      } else if (leaves_unit) {
        next = units_.panel_data(units_.first_place_of(unit + 1, group.first_part));
      }
      multiply_unit(unit, leaves_unit && task + 1 < range.end, next, tile);
    }
  }

  /// Rows of a group; the thread packs them unless it has done so already.
  [[nodiscard]] PackedRows packed_rows_of(const RowGroup& group, int thread) const {
    if (!call_.chosen.has_value()) return base_.packed(call_).from(group.rows.begin);
    ThreadRows& room = call_.chosen.threads[static_cast<std::size_t>(thread)];
    const std::int64_t blocks = PackedSteps::blocks_of(group.rows.count());
    const PackedRows packed{room.memory.data(), odd_step_bytes(blocks)};
    if (room.first_row != group.rows.begin) {
      const Rows& input = call_.input;
      context_.kernels.pack_rows(
          {input.data, input.row_bytes(), input.row_bytes(), call_.chosen.numbers.data() + group.rows.begin},
          group.rows.count(), packed.data, packed.step_bytes);
      room.first_row = group.rows.begin;
    }
    return packed;
  }

  [[nodiscard]] std::int64_t inputs_of_part(std::int64_t rows) const {
    return tiling_.inputs_of_part(rows, spec_.inputs());
  }

  /// Number of units that a thread processes together, if it multiplies in parts.
  [[nodiscard]] std::int64_t tiles_together() const { return kTilesKept / (units_.is_gated() ? 2 : 1); }

  /// Number of tasks that a thread claims at once. They are enough work to be worth the claim, and whole
  /// units if there are many. They are a small part of the thread's share, because other threads may have to
  /// wait for the last ones.
  [[nodiscard]] std::int64_t grain_of(std::span<const RowGroup> groups, std::int64_t tasks) const {
    constexpr std::int64_t kChunksPerThread = 32;
    // Scattered lines arrive slowly, in particular the first ones of a chunk.
    constexpr std::int64_t kLiveChunksPerThread = 2;
    const std::int64_t threads = context_.threads.num_threads();
    const std::int64_t rows = groups.back().rows.end - groups.front().rows.begin;
    const std::int64_t rows_of_task =
        std::min(tiling_.block_rows, std::max<std::int64_t>(1, rows / std::ssize(groups)));
    const std::int64_t macs = rows_of_task * kPanelColumns * spec_.inputs();
    const std::int64_t least = std::max<std::int64_t>(1, kMacsPerChunk / std::max<std::int64_t>(1, macs));
    if (groups.size() > 1) return std::max(least, tasks / (threads * kChunksPerThread));
    if (call_.live.has_value())
      return std::max<std::int64_t>(1, units_.count() / (threads * kLiveChunksPerThread));
    const std::int64_t share = units_.count() / (threads * kChunksPerThread);
    const std::int64_t blocks = blocks_of(groups.front());
    const std::int64_t grain = std::max(least, share > 0 ? share * blocks : 1);
    const std::int64_t part_inputs = inputs_of_part(rows);
    const std::int64_t together = part_inputs < spec_.inputs() ? tiles_together() : 1;
    return units_.count() >= 2 * threads * together ? std::max(grain, together) : grain;
  }

  /// Common data of a task's tiles.
  struct Tile {
    RowRange rows;
    std::size_t first_part;  ///< of the rows' group
    int thread;
    ExpandedPanels* expanded;
    PackedRows packed;  ///< the rows
    /// True if the group's rows are one block. Each panel is then read once.
    bool is_only_block;
  };

  [[nodiscard]] float* sums(const Tile& tile, std::int64_t index) const {
    return context_.scratch(tile.thread) + index * tiling_.tile_floats();
  }

  /// `more`: the thread continues with the next unit of the group. `next` is the first panel of that unit, or
  /// of the data after it.
  void multiply_unit(std::int64_t unit, bool more, const std::byte* next, const Tile& tile) const {
    const std::size_t part = tile.first_part;
    if (!units_.is_gated()) {
      const Place place = units_.place_of(unit, part);
      if (output_is_sums_) {
        base_.multiply(call_,
                       task_of(place, std::nullopt, {next, {}}, 0, tile,
                               output_.sums_of(target_, place, part, tile.rows.begin), call_.output.width),
                       tile.expanded);
        return;
      }
      multiply_part(place, std::nullopt, {next, {}}, 0, tile);
    } else {
      // With one block of rows, each panel is read once: the parts in turn.
      const std::byte* turn = tile.is_only_block ? units_.panel_data({part + 1, unit}) : next;
      const std::byte* last = tile.is_only_block || !more ? next : units_.panel_data({part + 1, unit + 1});
      multiply_part({part, unit}, std::nullopt, {turn, {}}, 0, tile);
      multiply_part({part + 1, unit}, std::nullopt, {last, {}}, 1, tile);
    }
    finish_unit(unit, 0, tile);
  }

  struct UnitRange {
    std::int64_t begin;
    std::int64_t end;
  };

  /// Processes units together, up to `end`; `last_next` is the data after them.
  void multiply_in_parts(UnitRange units, std::int64_t end, const std::byte* last_next,
                         std::int64_t part_inputs, const Tile& tile) const {
    const std::int64_t tiles = units_.is_gated() ? 2 : 1;
    const std::int64_t count = (units.end - units.begin) * tiles;
    const std::int64_t width = spec_.inputs();
    const auto place = [&](std::int64_t index) {
      const std::int64_t unit = units.begin + index / tiles;
      return units_.is_gated() ? Place{tile.first_part + static_cast<std::size_t>(index % tiles), unit}
                               : units_.place_of(unit, tile.first_part);
    };
    for (std::int64_t begin = 0; begin < width; begin += part_inputs) {
      const InputRange inputs{begin, std::min(begin + part_inputs, width)};
      const bool is_last = inputs.end == width;
      const InputRange following = is_last
                                       ? InputRange{0, part_inputs}
                                       : InputRange{inputs.end, std::min(inputs.end + part_inputs, width)};
      for (std::int64_t index = 0; index < count; ++index) {
        const std::byte* next = last_next;
        if (index + 1 < count) {
          next = units_.inputs_data(place(index + 1), inputs);
        } else if (!is_last || units.end < end) {
          next = units_.inputs_data(place(is_last ? count : 0), following);
        }
        ActivationSpans spans;
        multiply_part(
            place(index), inputs,
            {next, units_.activations_of(tile.packed, tile.rows.count(), following, index, count, &spans)},
            index, tile);
      }
    }
    for (std::int64_t unit = units.begin; unit < units.end; ++unit) {
      finish_unit(unit, (unit - units.begin) * tiles, tile);
    }
  }

  /// For the last part of the inputs, the adapters' data replaces `upcoming.spans`.
  void multiply_part(Place place, std::optional<InputRange> inputs, Upcoming upcoming, std::int64_t index,
                     const Tile& tile) const {
    AdapterProduct::Spans spans;
    const bool is_last = !inputs.has_value() || inputs->end == spec_.inputs();
    if (is_last && !call_.adapted.empty()) {
      upcoming.spans = adapters_.spans(call_, place, tile.rows, &spans);
    }
    base_.multiply(call_, task_of(place, inputs, upcoming, index, tile, sums(tile, index), kPanelColumns),
                   tile.expanded);
  }

  /// `sums` are `stride` floats apart.
  static TileTask task_of(Place place, std::optional<InputRange> inputs, const Upcoming& upcoming,
                          std::int64_t index, const Tile& tile, float* sums, std::int64_t stride) {
    return {.part = place.part,
            .panel = place.panel,
            .rows = tile.rows,
            .packed = tile.packed,
            .inputs = inputs,
            .upcoming = upcoming,
            .slot = static_cast<std::size_t>(index) % kPartsInTurn,
            .thread = tile.thread,
            .tile = sums,
            .stride = stride};
  }

  /// Stores a unit, whose tiles begin at number `index`, to the layer's output.
  void finish_unit(std::int64_t unit, std::int64_t index, const Tile& tile) const {
    output_.finish(target_, {.place = units_.first_place_of(unit, tile.first_part),
                             .first_part = tile.first_part,
                             .rows = tile.rows,
                             .sums = sums(tile, index),
                             .linear = units_.is_gated() ? sums(tile, index + 1) : nullptr,
                             .thread = tile.thread});
  }

  const LinearSpec& spec_;
  const LinearCall& call_;
  const CpuContext& context_;
  const BaseProduct& base_;
  const AdapterProduct& adapters_;
  const LinearOutput& output_;
  const Tiling& tiling_;
  LinearUnits units_;  ///< of each group
  LinearTarget target_;
  bool output_is_sums_;
};

}  // namespace

LinearLayer::LinearLayer(const LinearSpec& spec, const CpuContext& context)
    : spec_(spec),
      context_(context),
      base_(spec_, context),
      adapters_(spec_, base_, context),
      output_(spec_, adapters_, context),
      num_panels_(num_panels_of(spec_)) {}

bool LinearLayer::streams(const LinearCall& call) const {
  return context_.kernels.stream_rows != nullptr && spec_.epilogue != LinearEpilogue::kAdd &&
         call.sum == nullptr && call.num_rows() * call.output.row_bytes() >= kStreamedBytes;
}

void LinearLayer::prepare(const LinearCall& call) const {
  base_.prepare(call, AdapterProduct::reads_input(call));
  if (!call.adapted.empty() && !call.is_shrunk) adapters_.shrink(call);
  if (!call.new_tokens.empty()) adapters_.multiply_new_tokens(call);
}

void LinearLayer::run(const LinearCall& call) const {
  prepare(call);
  LinearRun(*this, call, {0, num_panels_}, streams(call)).multiply();
}

void LinearLayer::run_by_columns(const LinearCall& call, std::int64_t panels_at_once,
                                 const std::function<void(const ThreadPanels&)>& finish) const {
  const PanelRange all{0, panel_count(spec_.parts[0].weight.n)};
  const auto panels_of = [&](std::int64_t chunk) {
    return PanelRange{chunk * panels_at_once, std::min((chunk + 1) * panels_at_once, all.end)};
  };
  const std::int64_t chunks = (all.end + panels_at_once - 1) / panels_at_once;
  const LinearUnits units(spec_, all);
  prepare(call);
  const std::span<const RowGroup> groups = LinearRun(*this, call, all, false).cut_groups();
  const auto body = [&](const ThreadPool::Chunk& chunk, int thread) {
    LinearCall own = call;
    own.output.data += thread * call.scattered.rows * call.output.row_bytes();
    for (std::int64_t i = chunk.begin; i < chunk.end; ++i) {
      const std::int64_t next = i + 1 < chunk.end ? i + 1 : chunk.next;
      const PanelRange panels = panels_of(i);
      const std::byte* following =
          next < chunks ? units.panel_of(groups.front(), panels_of(next).begin) : nullptr;
      // Adding -0 changes no value.
      std::fill_n(own.output.float_row(0), call.scattered.rows * call.output.width, -0.0F);
      LinearRun(*this, own, panels, false).multiply_here(groups, following, thread);
      finish({panels, own.output, thread});
    }
  };
  context_.threads.parallel_for(chunks, 1, body);
}

void LinearLayer::run_in_chunks(const LinearCall& call, std::int64_t panels_at_once,
                                const std::function<void(PanelRange)>& finish) const {
  const std::int64_t panels = panel_count(spec_.parts[0].weight.n);
  prepare(call);
  for (std::int64_t begin = 0; begin < panels; begin += panels_at_once) {
    const PanelRange chunk{begin, std::min(begin + panels_at_once, panels)};
    LinearRun(*this, call, chunk, false).multiply();
    finish(chunk);
  }
}

}  // namespace adaptrt
