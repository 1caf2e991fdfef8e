#include "ops/adapter_product.h"

#include <algorithm>
#include <vector>

#include "measure/step_recorder.h"
#include "ranks/low_rank_exchange.h"

namespace adaptrt {
namespace {

std::int64_t blocks_of(const AdaptedRows& adapted) {
  return (adapted.end - adapted.begin + kBlockRows - 1) / kBlockRows;
}

}  // namespace

AdapterProduct::AdapterProduct(const LinearWork& work, const Step& step)
    : work_(work),
      step_(step),
      dtype_(work.parts[0].weight.dtype),
      gemm_(step.kernels.gemm[static_cast<std::size_t>(dtype_)]) {}

std::int64_t AdapterProduct::rows_of_a(const DeviceSite& site) const {
  return work_.site == nullptr ? site.total_rank : work_.site->rows_of_a(site.total_rank).count;
}

void AdapterProduct::shrink() const {
  if (work_.site->num_shares > 1) {
    const LowRankExchange exchange(work_, step_);
    multiply_by_a(work_.adapted, [&](const AdaptedRows& adapted, std::int64_t panel, RowRange rows,
                                     const float* tile) { exchange.store(adapted, panel, rows, tile); });
    if (step_.recorder != nullptr) step_.recorder->begin_exchange();
    exchange.finish();
    if (step_.recorder != nullptr) step_.recorder->end_exchange(RankWork::kLowRankExchange);
    return;
  }
  multiply_by_a(work_.adapted, [&](const AdaptedRows& adapted, std::int64_t panel, RowRange rows,
                                   const float* tile) {
    const std::int64_t width = panel_width(adapted.site->total_rank, panel);
    for (std::int64_t row = rows.begin; row < rows.end; ++row, tile += kPanelColumns) {
      step_.kernels.scale_and_store(tile, 1.0F, width, shrunk(row, panel * kPanelColumns), work_.input.dtype);
    }
  });
}

void AdapterProduct::multiply_new_tokens() const {
  multiply_by_a(work_.new_tokens,
                [&](const AdaptedRows& adapted, std::int64_t panel, RowRange rows, const float* tile) {
                  const std::int64_t width = panel_width(adapted.site->total_rank, panel);
                  const std::int64_t column = work_.parts[0].weight.n + panel * kPanelColumns;
                  for (std::int64_t row = rows.begin; row < rows.end; ++row, tile += kPanelColumns) {
                    float* out = work_.output.float_row(row) + column;
                    step_.kernels.scale_and_store(tile, work_.scale, width, reinterpret_cast<std::byte*>(out),
                                                  DType::kFloat32);
                    if (work_.softcap != 0.0F) step_.kernels.softcap(work_.softcap, width, out);
                  }
                });
}

template <class Store>
void AdapterProduct::multiply_by_a(std::span<const AdaptedRows> all, const Store& store) const {
  std::vector<std::int64_t>& ends = step_.linear_scratch.task_ends;
  ends.clear();
  std::int64_t tasks = 0;
  for (const AdaptedRows& adapted : all) {
    ends.push_back(tasks += blocks_of(adapted) * panels_of_a(*adapted.site));
  }
  const auto body = [&](std::int64_t begin, std::int64_t end, int thread) {
    auto of = static_cast<std::size_t>(std::ranges::upper_bound(ends, begin) - ends.begin());
    for (std::int64_t task = begin; task < end; ++task) {
      while (task == ends[of]) ++of;
      const AdaptedRows& adapted = all[of];
      const std::int64_t blocks = blocks_of(adapted);
      const std::int64_t of_adapted = task - (of == 0 ? 0 : ends[of - 1]);
      const std::int64_t row = adapted.begin + of_adapted % blocks * kBlockRows;
      const RowRange rows{row, std::min(row + kBlockRows, adapted.end)};
      const std::int64_t panel = of_adapted / blocks;
      const std::byte* next = nullptr;
      if (task + 1 < end) {
        if (task + 1 == ends[of]) {
          next = panel_of_a(*all[of + 1].site, 0);
        } else if ((of_adapted + 1) % blocks == 0) {
          next = panel_of_a(*adapted.site, panel + 1);
        }
      }
      store(adapted, panel, rows, multiply_tile(*adapted.site, panel, rows, next, thread));
    }
  };
  constexpr std::int64_t kChunksPerThread = 8;
  const std::int64_t grain = tasks / (step_.threads.num_threads() * kChunksPerThread);
  step_.threads.parallel_for(tasks, std::max<std::int64_t>(1, grain), body);
}

const std::byte* AdapterProduct::panel_of_a(const DeviceSite& site, std::int64_t panel) const {
  return site.a + panel_offset(dtype_, work_.input.width, panel);
}

float* AdapterProduct::multiply_tile(const DeviceSite& site, std::int64_t panel, RowRange rows,
                                     const std::byte* next, int thread) const {
  float* tile = step_.scratch[static_cast<std::size_t>(thread)].data();
  gemm_({.a = work_.input.row(rows.begin),
         .a_stride = work_.input.width,
         .a_steps = work_.packed(step_).from(rows.begin).data,
         .a_step_bytes = work_.packed(step_).step_bytes,
         .panel = panel_of_a(site, panel),
         .k = work_.input.width,
         .width = panel_width(rows_of_a(site), panel),
         .out = tile,
         .out_stride = kPanelColumns,
         .rows = rows.count(),
         .next_panel = next});
  return tile;
}

std::byte* AdapterProduct::shrunk(std::int64_t row, std::int64_t column) const {
  return step_.shrink +
         static_cast<std::size_t>(row * step_.shrink_stride + column) * size_of(work_.input.dtype);
}

std::span<const AdaptedRows> AdapterProduct::from(RowRange rows) const {
  const auto first = std::ranges::partition_point(
      work_.adapted, [&](const AdaptedRows& adapted) { return adapted.end <= rows.begin; });
  return {first, work_.adapted.end()};
}

const DevicePart& AdapterProduct::part_of(const AdaptedRows& adapted, std::size_t part,
                                          std::int64_t* panel) const {
  if (!work_.is_sliced) {
    return adapted.site->parts[work_.first_site_part + part % work_.parts_per_group];
  }
  constexpr std::int64_t kSlicePanels = kVocabularySlice / kPanelColumns;
  static_assert(kSlicePanels * kPanelColumns == kVocabularySlice);
  const std::int64_t slice = *panel / kSlicePanels;
  *panel %= kSlicePanels;
  return adapted.site[slice].parts[0];
}

const std::byte* AdapterProduct::panel_of_b(const DevicePart& part, std::int64_t outputs,
                                            std::int64_t panel) const {
  const MatrixRows here = work_.site->rows_of_b(outputs);
  const std::int64_t of_here = panel - here.first / kPanelColumns;
  if (of_here < 0 || of_here >= panel_count(here.count)) return nullptr;
  return part.b + panel_offset(dtype_, part.rank, of_here);
}

RowRange AdapterProduct::rows_changed(const AdaptedRows& adapted, const DevicePart& part, RowRange rows) {
  if (part.rank == 0) return {};
  return {std::max(adapted.begin, rows.begin), std::min(adapted.end, rows.end)};
}

std::span<const MemorySpan> AdapterProduct::spans(std::size_t part, std::int64_t panel, RowRange rows,
                                                  Spans* spans) const {
  constexpr std::size_t kOfAdapter = 3;
  const std::int64_t width = panel_width(work_.parts[part].weight.n, panel);
  std::size_t count = 0;
  for (const AdaptedRows& adapted : from(rows)) {
    if (adapted.begin >= rows.end || count + kOfAdapter > spans->size()) break;
    std::int64_t of_b = panel;
    const DevicePart& of_part = part_of(adapted, part, &of_b);
    if (rows_changed(adapted, of_part, rows).is_empty()) continue;
    const std::byte* b = panel_of_b(of_part, work_.parts[part].weight.n, of_b);
    if (b != nullptr) {
      (*spans)[count++] = {b, static_cast<std::int64_t>(panel_bytes(dtype_, width, of_part.rank))};
    }
    for (const float* vector : {of_part.magnitude, of_part.shift}) {
      if (vector == nullptr) continue;
      (*spans)[count++] = {reinterpret_cast<const std::byte*>(vector + of_b * kPanelColumns),
                           width * static_cast<std::int64_t>(sizeof(float))};
    }
  }
  return {spans->data(), count};
}

void AdapterProduct::expand(std::size_t part, std::int64_t panel, RowRange rows, float* tile) const {
  for (const AdaptedRows& adapted : from(rows)) {
    if (adapted.begin >= rows.end) return;
    expand_rows(adapted, part, panel, rows, tile);
  }
}

void AdapterProduct::expand_rows(const AdaptedRows& adapted, std::size_t part, std::int64_t panel,
                                 RowRange rows, float* tile) const {
  std::int64_t of_b = panel;
  const DevicePart& of_part = part_of(adapted, part, &of_b);
  const RowRange shared = rows_changed(adapted, of_part, rows);
  if (shared.is_empty()) return;
  const std::int64_t width = panel_width(work_.parts[part].weight.n, panel);
  float* out = tile + (shared.begin - rows.begin) * kPanelColumns;
  if (const std::byte* b = panel_of_b(of_part, work_.parts[part].weight.n, of_b); b != nullptr) {
    gemm_({.a = shrunk(shared.begin, of_part.rank_offset),
           .a_stride = step_.shrink_stride,
           .panel = b,
           .k = of_part.rank,
           .width = width,
           .out = out,
           .out_stride = kPanelColumns,
           .rows = shared.count(),
           .accumulate = true});
  }
  if (of_part.magnitude == nullptr && of_part.shift == nullptr) return;
  const std::int64_t first = of_b * kPanelColumns;
  for (std::int64_t row = shared.begin; row < shared.end; ++row, out += kPanelColumns) {
    if (of_part.magnitude != nullptr) step_.kernels.multiply(of_part.magnitude + first, width, out);
    if (of_part.shift != nullptr) step_.kernels.add(of_part.shift + first, width, out);
  }
}

}  // namespace adaptrt
