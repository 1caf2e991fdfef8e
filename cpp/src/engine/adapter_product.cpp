#include "adapter_product.h"

#include <algorithm>

namespace adaptrt {
namespace {

/// Tiles of the shrink: rows of a group, and panels of its A.
struct ShrinkTiles {
  std::int64_t blocks;
  std::int64_t panels;
};

ShrinkTiles tiles_of(const AdapterGroup& group, std::int64_t total_rank) {
  return {(group.end - group.begin + kBlockRows - 1) / kBlockRows, panel_count(total_rank)};
}

}  // namespace

AdapterProduct::AdapterProduct(const LinearOp& op, const Step& step)
    : op_(op),
      step_(step),
      input_(step.buffer(op.input)),
      dtype_(op.parts[0].weight.dtype),
      gemm_(step.kernels.gemm[static_cast<std::size_t>(dtype_)]) {
  if (op.lora_site < 0) return;
  step.groups_of_op.clear();
  for (const AdapterGroup& group : step.groups) {
    if (site_of(group).total_rank > 0) step.groups_of_op.push_back(group);
  }
  groups_ = step.groups_of_op;
}

void AdapterProduct::shrink() const {
  std::int64_t tasks = 0;
  for (const AdapterGroup& group : groups_) {
    const ShrinkTiles tiles = tiles_of(group, site_of(group).total_rank);
    tasks += tiles.blocks * tiles.panels;
  }
  const auto body = [&](std::int64_t begin, std::int64_t end, int thread) {
    std::int64_t first = 0;  // task of the group
    for (const AdapterGroup& group : groups_) {
      const ShrinkTiles tiles = tiles_of(group, site_of(group).total_rank);
      const std::int64_t last = first + tiles.blocks * tiles.panels;
      for (std::int64_t task = std::max(begin, first); task < std::min(end, last); ++task) {
        const std::int64_t row = group.begin + (task - first) % tiles.blocks * kBlockRows;
        shrink_tile(group, (task - first) / tiles.blocks, {row, std::min(row + kBlockRows, group.end)},
                    thread);
      }
      first = last;
    }
  };
  step_.threads.parallel_for(tasks, 1, body);
}

void AdapterProduct::shrink_tile(const AdapterGroup& group, std::int64_t panel, RowRange rows,
                                 int thread) const {
  const DeviceSite& site = site_of(group);
  const std::int64_t width = panel_width(site.total_rank, panel);
  float* tile = step_.scratch[static_cast<std::size_t>(thread)].data();
  gemm_({.a = step_.row(op_.input, rows.begin),
         .a_stride = input_.width,
         .a_steps = step_.steps_of_row(rows.begin),
         .a_step_bytes = step_.packed_step_bytes,
         .panel = site.a + panel_offset(dtype_, input_.width, panel),
         .k = input_.width,
         .width = width,
         .out = tile,
         .out_stride = kPanelColumns,
         .rows = rows.end - rows.begin});
  for (std::int64_t row = rows.begin; row < rows.end; ++row, tile += kPanelColumns) {
    step_.kernels.scale_and_store(tile, 1.0F, width, shrunk(row, panel * kPanelColumns), input_.dtype);
  }
}

std::byte* AdapterProduct::shrunk(std::int64_t row, std::int64_t column) const {
  return step_.shrink + static_cast<std::size_t>(row * step_.shrink_stride + column) * size_of(input_.dtype);
}

RowRange AdapterProduct::rows_changed(const AdapterGroup& group, std::size_t part, RowRange rows) const {
  if (site_of(group).parts[part].rank == 0) return {};
  return {std::max(group.begin, rows.begin), std::min(group.end, rows.end)};
}

std::span<const MemorySpan> AdapterProduct::spans(std::size_t part, std::int64_t panel, RowRange rows,
                                                  Spans* spans) const {
  constexpr std::size_t kOfGroup = 2;
  const std::int64_t width = panel_width(op_.parts[part].weight.n, panel);
  std::size_t count = 0;
  for (const AdapterGroup& group : groups_) {
    if (rows_changed(group, part, rows).is_empty()) continue;
    const DevicePart& of_part = site_of(group).parts[part];
    if (count + kOfGroup > spans->size()) break;
    (*spans)[count++] = {of_part.b + panel_offset(dtype_, of_part.rank, panel),
                         static_cast<std::int64_t>(panel_bytes(dtype_, width, of_part.rank))};
    if (of_part.magnitude == nullptr) continue;
    (*spans)[count++] = {reinterpret_cast<const std::byte*>(of_part.magnitude + panel * kPanelColumns),
                         width * static_cast<std::int64_t>(sizeof(float))};
  }
  return {spans->data(), count};
}

void AdapterProduct::expand(std::size_t part, std::int64_t panel, RowRange rows, float* tile) const {
  for (const AdapterGroup& group : groups_) expand_group(group, part, panel, rows, tile);
}

void AdapterProduct::expand_group(const AdapterGroup& group, std::size_t part, std::int64_t panel,
                                  RowRange rows, float* tile) const {
  const RowRange shared = rows_changed(group, part, rows);
  if (shared.is_empty()) return;
  const DevicePart& of_part = site_of(group).parts[part];
  const std::int64_t width = panel_width(op_.parts[part].weight.n, panel);
  float* out = tile + (shared.begin - rows.begin) * kPanelColumns;
  gemm_({.a = shrunk(shared.begin, of_part.rank_offset),
         .a_stride = step_.shrink_stride,
         .panel = of_part.b + panel_offset(dtype_, of_part.rank, panel),
         .k = of_part.rank,
         .width = width,
         .out = out,
         .out_stride = kPanelColumns,
         .rows = shared.end - shared.begin,
         .accumulate = true});
  if (of_part.magnitude == nullptr) return;
  for (std::int64_t row = shared.begin; row < shared.end; ++row, out += kPanelColumns) {
    step_.kernels.multiply(of_part.magnitude + panel * kPanelColumns, width, out);
  }
}

}  // namespace adaptrt
