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
      gemm_(context.kernels.gemm[static_cast<std::size_t>(dtype_)]),
      added_rows_(dtype_ == DType::kBFloat16 ? context.kernels.added_rows : 0) {}

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

AdapterProduct::PanelOfB AdapterProduct::find_in_b(PanelPlace place) const {
  const std::int64_t of_part = spec_.parts[place.part].weight.n;
  std::int64_t outputs = of_part;
  std::int64_t slice = 0;
  std::int64_t panel = place.panel;
  if (spec_.is_sliced) {
    slice = panel / kSlicePanels;
    panel %= kSlicePanels;
    outputs = std::min(kVocabularySlice, outputs - slice * kVocabularySlice);
  }
  const MatrixRows here = spec_.site->rows_of_b(outputs);
  const std::int64_t of_here = panel - here.first / kPanelColumns;
  const bool is_here = of_here >= 0 && of_here < panel_count(here.count);
  return {.slice = slice,
          .part = spec_.is_sliced ? 0 : spec_.first_site_part + place.part % spec_.parts_per_group,
          .first = panel * kPanelColumns,
          .width = panel_width(of_part, place.panel),
          .rows_of_b = here.count,
          .panel = is_here ? std::optional(of_here) : std::nullopt};
}

StoredMatrix AdapterProduct::b_of(const DevicePart& part, const PanelOfB& place) const {
  return {part.b, part.b_storage, dtype_, place.rows_of_b, part.rank};
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

RowRange AdapterProduct::rows_changed(const AdaptedRows& adapted, const DevicePart& part, RowRange rows) {
  if (part.rank == 0) return {};
  return {std::max(adapted.begin, rows.begin), std::min(adapted.end, rows.end)};
}

std::span<const MemorySpan> AdapterProduct::spans(const LinearCall& call, PanelPlace place, RowRange rows,
                                                  Spans* spans) const {
  constexpr std::size_t kOfAdapter = 3;
  const PanelOfB of_b = find_in_b(place);
  std::size_t count = 0;
  for (const AdaptedRows& adapted : from(call, rows)) {
    if (adapted.begin >= rows.end || count + kOfAdapter > spans->size()) break;
    const DevicePart& part = part_of(adapted, of_b);
    if (rows_changed(adapted, part, rows).is_empty()) continue;
    if (of_b.panel) {
      const StoredMatrix b = b_of(part, of_b);
      (*spans)[count++] = {b.panel(*of_b.panel), static_cast<std::int64_t>(b.panel_bytes(*of_b.panel))};
    }
    for (const float* vector : {part.magnitude, part.shift}) {
      if (vector == nullptr) continue;
      (*spans)[count++] = {reinterpret_cast<const std::byte*>(vector + of_b.first),
                           of_b.width * static_cast<std::int64_t>(sizeof(float))};
    }
  }
  return {spans->data(), count};
}

void AdapterProduct::expand(const LinearCall& call, PanelPlace place, RowRange rows, float* tile,
                            int thread) const {
  const PanelOfB of_b = find_in_b(place);
  if (of_b.panel) add_products(call, of_b, rows, tile, thread);
  const bool shifts = call.row_factors.empty();
  for (const AdaptedRows& adapted : from(call, rows)) {
    if (adapted.begin >= rows.end) return;
    const DevicePart& part = part_of(adapted, of_b);
    if (part.magnitude == nullptr && (part.shift == nullptr || !shifts)) continue;
    const RowRange changed = rows_changed(adapted, part, rows);
    float* out = tile + (changed.begin - rows.begin) * kPanelColumns;
    for (std::int64_t row = changed.begin; row < changed.end; ++row, out += kPanelColumns) {
      if (part.magnitude != nullptr) context_.kernels.multiply(part.magnitude + of_b.first, of_b.width, out);
      if (part.shift != nullptr && shifts) context_.kernels.add(part.shift + of_b.first, of_b.width, out);
    }
  }
}

void AdapterProduct::add_shifts(const LinearCall& call, PanelPlace place, RowRange rows, float* tile) const {
  const PanelOfB of_b = find_in_b(place);
  for (const AdaptedRows& adapted : from(call, rows)) {
    if (adapted.begin >= rows.end) return;
    const DevicePart& part = part_of(adapted, of_b);
    if (part.shift == nullptr) continue;
    const RowRange changed = rows_changed(adapted, part, rows);
    float* out = tile + (changed.begin - rows.begin) * kPanelColumns;
    for (std::int64_t row = changed.begin; row < changed.end; ++row, out += kPanelColumns) {
      context_.kernels.add(part.shift + of_b.first, of_b.width, out);
    }
  }
}

void AdapterProduct::add_products(const LinearCall& call, const PanelOfB& place, RowRange rows, float* tile,
                                  int thread) const {
  constexpr std::size_t kMostProducts = 8;
  std::array<AddedProduct, kMostProducts> products;
  std::array<MatrixPanel, kMostProducts> compressed;
  std::size_t count = 0;
  const auto add = [&] {
    if (count > 0) context_.kernels.add_products({products.data(), count});
    count = 0;
  };
  for (const AdaptedRows& adapted : from(call, rows)) {
    if (adapted.begin >= rows.end) break;
    const DevicePart& part = part_of(adapted, place);
    const RowRange changed = rows_changed(adapted, part, rows);
    if (changed.is_empty()) continue;
    float* out = tile + (changed.begin - rows.begin) * kPanelColumns;
    const std::byte* a = shrunk(changed.begin, part.rank_offset);
    const StoredMatrix b = b_of(part, place);
    if (place.width != kPanelColumns || b.storage == LoraStorage::kInt8 || changed.count() > added_rows_) {
      multiply({.call = {.a = a,
                         .a_stride = context_.memory.shrink_stride,
                         .out = out,
                         .out_stride = kPanelColumns,
                         .rows = changed.count()},
                .accumulate = true},
               b, *place.panel, thread);
      continue;
    }
    if (count == kMostProducts) add();
    AddedProduct& product = products[count];
    product = {.a = a,
               .a_stride = context_.memory.shrink_stride * static_cast<std::int64_t>(size_of(dtype_)),
               .panel = b.panel(*place.panel),
               .k = b.k,
               .out = out,
               .rows = changed.count()};
    if (b.storage == LoraStorage::kCompressed) {
      compressed[count] = find_matrix_panel(b.data, b.n, b.k, *place.panel);
      product.compressed = &compressed[count];
    }
    ++count;
  }
  add();
}

}  // namespace adaptrt
