#include "ops/linear/adapter_product.h"

#include <algorithm>
#include <vector>

#include "measure/step_recorder.h"
#include "ops/linear/low_rank_exchange.h"

namespace adaptrt {
namespace {

constexpr std::int64_t kSlicePanels = kVocabularySlice / kPanelColumns;
static_assert(kSlicePanels * kPanelColumns == kVocabularySlice);

/// Scales of 1 for the integers of an int8 panel: DeviceSite::rank_scales are applied to x A^T.
constexpr auto kNoScales = [] {
  std::array<float, kPanelColumns> scales{};
  scales.fill(1.0F);
  return scales;
}();

std::int64_t blocks_of(const AdaptedRows& adapted) {
  return (adapted.end - adapted.begin + kBlockRows - 1) / kBlockRows;
}

}  // namespace

AdapterProduct::AdapterProduct(const LinearSpec& spec, const BaseProduct& base, const CpuContext& context)
    : spec_(spec),
      base_(base),
      context_(context),
      dtype_(spec.parts[0].weight.dtype),
      input_dtype_(activation_dtype(context.program.dtype)),
      gemm_(context.kernels.gemm[static_cast<std::size_t>(dtype_)]) {}

std::int64_t AdapterProduct::rows_of_a(const DeviceSite& site) const {
  return spec_.site == nullptr ? site.total_rank : spec_.site->rows_of_a(site.total_rank).count;
}

void AdapterProduct::shrink(const LinearCall& call) const {
  if (spec_.site->num_shares > 1) {
    const LowRankExchange exchange(call, *spec_.site, context_);
    multiply_by_a(call, call.adapted,
                  [&](const AdaptedRows& adapted, std::int64_t panel, RowRange rows, float* tile) {
                    exchange.store(adapted, panel, rows, tile);
                  });
    if (context_.recorder != nullptr) context_.recorder->begin_exchange();
    exchange.finish();
    if (context_.recorder != nullptr) context_.recorder->end_exchange(RankWork::kLowRankExchange);
    return;
  }
  multiply_by_a(call, rows_by_a(call),
                [&](const AdaptedRows& adapted, std::int64_t panel, RowRange rows, float* tile) {
                  store_shrunk(call, panel_width(adapted.site->total_rank, panel), panel, rows, tile);
                });
}

void AdapterProduct::store_shrunk(const LinearCall& call, std::int64_t width, std::int64_t panel,
                                  RowRange rows, float* tile) const {
  const std::int64_t column = panel * kPanelColumns;
  // Rows that were joined by rows_by_a() have adapters with different scales.
  for (const AdaptedRows& adapted : from(call, rows)) {
    if (adapted.begin >= rows.end) return;
    const std::int64_t end = std::min(adapted.end, rows.end);
    const float* scales = adapted.site->rank_scales;
    for (std::int64_t row = std::max(adapted.begin, rows.begin); row < end; ++row, tile += kPanelColumns) {
      if (scales != nullptr) context_.kernels.multiply(scales + column, width, tile);
      context_.kernels.scale_and_store(tile, 1.0F, width, shrunk(row, column), input_dtype_);
    }
  }
}

void AdapterProduct::multiply_new_tokens(const LinearCall& call) const {
  multiply_by_a(call, call.new_tokens,
                [&](const AdaptedRows& adapted, std::int64_t panel, RowRange rows, const float* tile) {
                  const std::int64_t width = panel_width(adapted.site->total_rank, panel);
                  const std::int64_t column = spec_.parts[0].weight.n + panel * kPanelColumns;
                  for (std::int64_t row = rows.begin; row < rows.end; ++row, tile += kPanelColumns) {
                    float* out = call.output.float_row(row) + column;
                    context_.kernels.scale_and_store(tile, spec_.scale, width,
                                                     reinterpret_cast<std::byte*>(out), DType::kFloat32);
                    if (spec_.softcap != 0.0F) context_.kernels.softcap(spec_.softcap, width, out);
                  }
                });
}

std::span<const AdaptedRows> AdapterProduct::rows_by_a(const LinearCall& call) const {
  std::vector<AdaptedRows>& joined = context_.memory.linear.rows_by_a;
  joined.clear();
  for (const AdaptedRows& adapted : call.adapted) {
    const bool is_same = !joined.empty() && joined.back().end == adapted.begin &&
                         joined.back().site->a == adapted.site->a &&
                         joined.back().site->total_rank == adapted.site->total_rank;
    if (is_same) {
      joined.back().end = adapted.end;
    } else {
      joined.push_back(adapted);
    }
  }
  return joined;
}

template <class Store>
void AdapterProduct::multiply_by_a(const LinearCall& call, std::span<const AdaptedRows> all,
                                   const Store& store) const {
  std::vector<std::int64_t>& ends = context_.memory.linear.task_ends;
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
          next = a_of(*all[of + 1].site).panel(0);
        } else if ((of_adapted + 1) % blocks == 0) {
          next = a_of(*adapted.site).panel(panel + 1);
        }
      }
      store(adapted, panel, rows, multiply_tile(call, *adapted.site, panel, rows, next, thread));
    }
  };
  constexpr std::int64_t kChunksPerThread = 8;
  const std::int64_t grain = tasks / (context_.threads.num_threads() * kChunksPerThread);
  context_.threads.parallel_for(tasks, std::max<std::int64_t>(1, grain), body);
}

StoredMatrix AdapterProduct::a_of(const DeviceSite& site) const {
  return {site.a, site.a_storage, dtype_, rows_of_a(site), spec_.inputs()};
}

std::int64_t AdapterProduct::outputs_of_b(PanelPlace place) const {
  const std::int64_t outputs = spec_.parts[place.part].weight.n;
  if (!spec_.is_sliced) return outputs;
  return std::min(kVocabularySlice, outputs - place.panel / kSlicePanels * kVocabularySlice);
}

StoredMatrix AdapterProduct::b_of(const DevicePart& part, std::int64_t outputs) const {
  return {part.b, part.b_storage, dtype_, spec_.site->rows_of_b(outputs).count, part.rank};
}

void AdapterProduct::multiply(PanelGemm gemm, const StoredMatrix& matrix, std::int64_t panel,
                              int thread) const {
  gemm.call.k = matrix.k;
  gemm.call.width = panel_width(matrix.n, panel);
  switch (matrix.storage) {
    case LoraStorage::kExact:
      gemm.call.panel = matrix.panel(panel);
      gemm_(gemm);
      return;
    case LoraStorage::kCompressed:
      multiply_compressed(gemm, matrix, panel, thread);
      return;
    case LoraStorage::kInt8:
      multiply_int8(gemm, matrix, panel, thread);
      return;
  }
}

void AdapterProduct::multiply_compressed(PanelGemm gemm, const StoredMatrix& matrix, std::int64_t panel,
                                         int thread) const {
  const KernelTable& kernels = context_.kernels;
  const MatrixPanel compressed = find_matrix_panel(matrix.data, matrix.n, matrix.k, panel);
  if (kernels.matrix_panel_gemm != nullptr && kernels.matrix_panel_gemm(gemm, compressed)) return;
  std::byte* expanded = scratch(static_cast<std::size_t>(compressed.num_pieces * kPiecePanelBytes), thread);
  kernels.expand_matrix_panel(compressed, gemm.call.next_panel, expanded);
  gemm.call.panel = expanded;
  gemm_(gemm);
}

void AdapterProduct::multiply_int8(const PanelGemm& gemm, const StoredMatrix& matrix, std::int64_t panel,
                                   int thread) const {
  const KernelTable& kernels = context_.kernels;
  const auto type = static_cast<std::size_t>(input_dtype_);
  QuantizedGemm product{.call = gemm.call,
                        .activation = input_dtype_,
                        .a_steps = gemm.a_steps,
                        .a_step_bytes = gemm.a_step_bytes,
                        .quantization = kInt8Matrix,
                        .scales = kNoScales.data()};
  product.call.panel = matrix.panel(panel);
  const std::int64_t rows = gemm.call.rows;
  const std::size_t sums_bytes =
      gemm.accumulate ? static_cast<std::size_t>(rows * kPanelColumns) * sizeof(float) : 0;
  const std::size_t expanded_bytes =
      rows > kernels.int8_decoded_rows ? panel_bytes(input_dtype_, gemm.call.width, gemm.call.k) : 0;
  std::byte* const space = scratch(sums_bytes + expanded_bytes, thread);
  if (expanded_bytes > 0) {
    kernels.expand_panel[type](product, space + sums_bytes);
    product.expanded = space + sums_bytes;
  }
  if (!gemm.accumulate) {
    kernels.quantized_gemm[type](product);
    return;
  }
  auto* sums = reinterpret_cast<float*>(space);
  product.call.out = sums;
  product.call.out_stride = kPanelColumns;
  kernels.quantized_gemm[type](product);
  for (std::int64_t row = 0; row < rows; ++row) {
    kernels.add(sums + row * kPanelColumns, gemm.call.width, gemm.call.out + row * gemm.call.out_stride);
  }
}

std::byte* AdapterProduct::scratch(std::size_t bytes, int thread) const {
  HugeArray& space = context_.memory.linear.adapter_panels[static_cast<std::size_t>(thread)];
  if (space.bytes() < bytes) space = HugeArray(bytes);
  return space.data();
}

float* AdapterProduct::multiply_tile(const LinearCall& call, const DeviceSite& site, std::int64_t panel,
                                     RowRange rows, const std::byte* next, int thread) const {
  const PackedRows packed = base_.packed(call).from(rows.begin);
  float* tile = context_.scratch(thread);
  multiply({.call = {.a = call.input.row(rows.begin),
                     .a_stride = call.input.width,
                     .out = tile,
                     .out_stride = kPanelColumns,
                     .rows = rows.count(),
                     .next_panel = next},
            .a_steps = packed.data,
            .a_step_bytes = packed.step_bytes},
           a_of(site), panel, thread);
  return tile;
}

std::byte* AdapterProduct::shrunk(std::int64_t row, std::int64_t column) const {
  return context_.memory.shrink.data() +
         static_cast<std::size_t>(row * context_.memory.shrink_stride + column) * size_of(input_dtype_);
}

std::span<const AdaptedRows> AdapterProduct::from(const LinearCall& call, RowRange rows) {
  const auto first = std::ranges::partition_point(
      call.adapted, [&](const AdaptedRows& adapted) { return adapted.end <= rows.begin; });
  return {first, call.adapted.end()};
}

const DevicePart& AdapterProduct::part_of(const AdaptedRows& adapted, std::size_t part,
                                          std::int64_t* panel) const {
  if (!spec_.is_sliced) {
    return adapted.site->parts[spec_.first_site_part + part % spec_.parts_per_group];
  }
  const std::int64_t slice = *panel / kSlicePanels;
  *panel %= kSlicePanels;
  return adapted.site[slice].parts[0];
}

std::optional<std::int64_t> AdapterProduct::panel_here(std::int64_t outputs, std::int64_t panel) const {
  const MatrixRows here = spec_.site->rows_of_b(outputs);
  const std::int64_t of_here = panel - here.first / kPanelColumns;
  if (of_here < 0 || of_here >= panel_count(here.count)) return std::nullopt;
  return of_here;
}

RowRange AdapterProduct::rows_changed(const AdaptedRows& adapted, const DevicePart& part, RowRange rows) {
  if (part.rank == 0) return {};
  return {std::max(adapted.begin, rows.begin), std::min(adapted.end, rows.end)};
}

std::span<const MemorySpan> AdapterProduct::spans(const LinearCall& call, PanelPlace place, RowRange rows,
                                                  Spans* spans) const {
  constexpr std::size_t kOfAdapter = 3;
  const std::int64_t outputs = outputs_of_b(place);
  const std::int64_t width = panel_width(spec_.parts[place.part].weight.n, place.panel);
  std::size_t count = 0;
  for (const AdaptedRows& adapted : from(call, rows)) {
    if (adapted.begin >= rows.end || count + kOfAdapter > spans->size()) break;
    std::int64_t of_b = place.panel;
    const DevicePart& of_part = part_of(adapted, place.part, &of_b);
    if (rows_changed(adapted, of_part, rows).is_empty()) continue;
    if (const auto here = panel_here(outputs, of_b)) {
      const StoredMatrix b = b_of(of_part, outputs);
      (*spans)[count++] = {b.panel(*here), static_cast<std::int64_t>(b.panel_bytes(*here))};
    }
    for (const float* vector : {of_part.magnitude, of_part.shift}) {
      if (vector == nullptr) continue;
      (*spans)[count++] = {reinterpret_cast<const std::byte*>(vector + of_b * kPanelColumns),
                           width * static_cast<std::int64_t>(sizeof(float))};
    }
  }
  return {spans->data(), count};
}

void AdapterProduct::expand(const LinearCall& call, PanelPlace place, RowRange rows, float* tile,
                            int thread) const {
  for (const AdaptedRows& adapted : from(call, rows)) {
    if (adapted.begin >= rows.end) return;
    expand_rows(adapted, place, rows, tile, thread);
  }
}

void AdapterProduct::expand_rows(const AdaptedRows& adapted, PanelPlace place, RowRange rows, float* tile,
                                 int thread) const {
  const std::int64_t outputs = outputs_of_b(place);
  std::int64_t of_b = place.panel;
  const DevicePart& of_part = part_of(adapted, place.part, &of_b);
  const RowRange shared = rows_changed(adapted, of_part, rows);
  if (shared.is_empty()) return;
  const std::int64_t width = panel_width(spec_.parts[place.part].weight.n, place.panel);
  float* out = tile + (shared.begin - rows.begin) * kPanelColumns;
  if (const auto here = panel_here(outputs, of_b)) {
    multiply({.call = {.a = shrunk(shared.begin, of_part.rank_offset),
                       .a_stride = context_.memory.shrink_stride,
                       .out = out,
                       .out_stride = kPanelColumns,
                       .rows = shared.count()},
              .accumulate = true},
             b_of(of_part, outputs), *here, thread);
  }
  if (of_part.magnitude == nullptr && of_part.shift == nullptr) return;
  const std::int64_t first = of_b * kPanelColumns;
  for (std::int64_t row = shared.begin; row < shared.end; ++row, out += kPanelColumns) {
    if (of_part.magnitude != nullptr) context_.kernels.multiply(of_part.magnitude + first, width, out);
    if (of_part.shift != nullptr) context_.kernels.add(of_part.shift + first, width, out);
  }
}

}  // namespace adaptrt
