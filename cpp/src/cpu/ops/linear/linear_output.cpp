#include "ops/linear/linear_output.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "ops/linear/base_product.h"
#include "ranks/overlapped_sum.h"

namespace adaptrt {

auto activation_for(LinearEpilogue epilogue, const KernelTable& kernels) -> void (*)(const ActivatedTile&) {
  switch (epilogue) {
    case LinearEpilogue::kSiluMul:
      return kernels.silu;
    case LinearEpilogue::kGeluMul:
    case LinearEpilogue::kGelu:
      return kernels.gelu;
    case LinearEpilogue::kGeluTanhMul:
    case LinearEpilogue::kGeluTanh:
      return kernels.gelu_tanh;
    case LinearEpilogue::kRelu:
      return kernels.relu;
    case LinearEpilogue::kReluSquared:
      return kernels.relu_squared;
    case LinearEpilogue::kReluMul:
      return kernels.relu_mul;
    case LinearEpilogue::kReluMulRelu:
      return kernels.relu_mul_relu;
    case LinearEpilogue::kClampedSiluMul:
      return kernels.clamped_silu_mul;
    case LinearEpilogue::kStore:
    case LinearEpilogue::kAdd:
      return nullptr;
  }
  return nullptr;
}

LinearOutput::LinearOutput(const LinearSpec& spec, const AdapterProduct& adapters, const CpuContext& context)
    : spec_(spec),
      adapters_(adapters),
      context_(context),
      activate_(activation_for(spec.epilogue, context.kernels)),
      activates_biased_(activate_ != nullptr && spec.scale == 1.0F && spec.softcap == 0.0F) {
  const auto has_bias = [](const LinearPart& part) { return part.bias.size != 0; };
  keeps_sums_ = spec.epilogue == LinearEpilogue::kStore && spec.scale == 1.0F && spec.softcap == 0.0F &&
                !spec.has_sparse_input && spec.quantization().algo == QuantAlgo::kNone &&
                std::ranges::none_of(spec.parts, has_bias);
}

void LinearOutput::finish(const LinearTarget& target, const LinearTile& tile) const {
  finish_part(target, tile.place, tile.sums, tile.rows, tile.thread, spec_.scale);
  if (tile.linear != nullptr) {
    finish_part(target, {tile.place.part + 1, tile.place.panel}, tile.linear, tile.rows, tile.thread, 1.0F);
  }
  if (activate_ == nullptr) return store(target, tile);
  if (spec_.has_scores) close_gates(target, tile);
  store_activated(target, tile);
}

bool LinearOutput::is_sums(const LinearTarget& target) const {
  const LinearCall& call = target.call;
  return keeps_sums_ && call.adapted.empty() && call.sum == nullptr && !target.streams &&
         !call.live.has_value() && !call.scattered.has_value();
}

float* LinearOutput::sums_of(const LinearTarget& target, PanelPlace place, std::size_t first_part,
                             std::int64_t row) const {
  return target.call.output.float_row(row) + column_of(target, place, first_part);
}

/// Applies adapters, factors of rows, bias, scale and softcap to a panel's sums.
void LinearOutput::finish_part(const LinearTarget& target, PanelPlace place, float* rows, RowRange range,
                               int thread, float scale) const {
  const LinearPart& part = spec_.parts[place.part];
  if (spec_.has_sparse_input) make_zeros_positive(place, rows, range);
  if (!target.call.adapted.empty()) adapters_.expand(target.call, place, range, rows, thread);
  if (!target.call.row_factors.empty()) {
    scale_rows(target, place, rows, range);
    if (!target.call.adapted.empty()) adapters_.add_shifts(target.call, place, range, rows);
  }
  const bool adds_bias = part.bias.size != 0 && !activates_biased_;
  if (!adds_bias && scale == 1.0F && spec_.softcap == 0.0F) return;
  const std::int64_t width = panel_width(part.weight.n, place.panel);
  for (std::int64_t row = range.begin; row < range.end; ++row, rows += kPanelColumns) {
    if (adds_bias) context_.kernels.add(part.bias.data + place.panel * kPanelColumns, width, rows);
    if (scale != 1.0F) {
      context_.kernels.scale_and_store(rows, scale, width, reinterpret_cast<std::byte*>(rows),
                                       DType::kFloat32);
    }
    if (spec_.softcap != 0.0F) context_.kernels.softcap(spec_.softcap, width, rows);
  }
}

void LinearOutput::scale_rows(const LinearTarget& target, PanelPlace place, float* rows,
                              RowRange range) const {
  const std::int64_t width = panel_width(spec_.parts[place.part].weight.n, place.panel);
  for (std::int64_t row = range.begin; row < range.end; ++row, rows += kPanelColumns) {
    context_.kernels.scale_and_store(rows, target.call.row_factors[static_cast<std::size_t>(row)], width,
                                     reinterpret_cast<std::byte*>(rows), DType::kFloat32);
  }
}

/// A sum that is zero may have either sign, depending on the zero products that were skipped.
void LinearOutput::make_zeros_positive(PanelPlace place, float* rows, RowRange range) const {
  static constexpr std::array<float, kPanelColumns> kZeros{};
  const std::int64_t width = panel_width(spec_.parts[place.part].weight.n, place.panel);
  for (std::int64_t row = range.begin; row < range.end; ++row, rows += kPanelColumns) {
    context_.kernels.add(kZeros.data(), width, rows);
  }
}

/// Closes the gates whose scores are below the layer's minimum.
void LinearOutput::close_gates(const LinearTarget& target, const LinearTile& tile) const {
  const std::int64_t column = tile.place.panel * kPanelColumns;
  const std::int64_t width = panel_width(spec_.parts[tile.place.part].weight.n, tile.place.panel);
  float* gates = tile.sums;
  for (std::int64_t row = tile.rows.begin; row < tile.rows.end; ++row, gates += kPanelColumns) {
    context_.kernels.close_gates(target.call.scores.float_row(row) + column, spec_.least_score, width, gates);
  }
}

/// Copies the first `bytes` of each row of a tile to the output, where rows begin at `out`.
void LinearOutput::stream(const LinearTarget& target, const float* tile, RowRange rows, std::int64_t bytes,
                          std::byte* out) const {
  context_.kernels.stream_rows(reinterpret_cast<const std::byte*>(tile), kPanelColumns * sizeof(float),
                               rows.end - rows.begin, bytes, out, target.call.output.row_bytes());
}

/// The first column of a panel in the output.
std::int64_t LinearOutput::column_of(const LinearTarget& target, PanelPlace place,
                                     std::size_t first_part) const {
  std::int64_t column = (place.panel - target.first_panel) * kPanelColumns;
  for (std::size_t before = first_part; before < place.part; ++before) {
    column += spec_.parts[before].weight.n;
  }
  return column;
}

void LinearOutput::store(const LinearTarget& target, const LinearTile& tile) const {
  const LinearCall& call = target.call;
  const std::int64_t width = panel_width(spec_.parts[tile.place.part].weight.n, tile.place.panel);
  const std::int64_t column = column_of(target, tile.place, tile.first_part);
  if (target.streams) {
    stream(target, tile.sums, tile.rows, width * static_cast<std::int64_t>(sizeof(float)),
           reinterpret_cast<std::byte*>(call.output.float_row(tile.rows.begin) + column));
    return;
  }
  if (call.sum != nullptr) return store_term(target, tile, column, width);
  if (call.scattered.has_value()) return scatter(target, tile, column, width);
  const float* sums = tile.sums;
  for (std::int64_t row = tile.rows.begin; row < tile.rows.end; ++row, sums += kPanelColumns) {
    float* out = call.output.float_row(row) + column;
    if (spec_.epilogue == LinearEpilogue::kAdd) {
      context_.kernels.add(sums, width, out);
    } else {
      std::copy_n(sums, width, out);
    }
  }
}

/// Stores this rank's term of the sum over ranks that overlaps with this op.
void LinearOutput::store_term(const LinearTarget& target, const LinearTile& tile, std::int64_t column,
                              std::int64_t width) {
  OverlappedSum& sum = *target.call.sum;
  const OverlappedSum::Place place = sum.place_of(column);
  const float* sums = tile.sums;
  for (std::int64_t row = tile.rows.begin; row < tile.rows.end; ++row, sums += kPanelColumns) {
    std::copy_n(sums, width, place.rows.float_row(row) + column - place.first_column);
  }
  sum.add_made(column, tile.rows.count() * width);
}

void LinearOutput::scatter(const LinearTarget& target, const LinearTile& tile, std::int64_t column,
                           std::int64_t width) const {
  const LinearCall& call = target.call;
  const auto first = static_cast<std::size_t>(tile.rows.begin);
  context_.kernels.scatter_rows({.rows = tile.sums,
                                 .stride = kPanelColumns,
                                 .row_of = call.scattered.row_of.data() + first,
                                 .weights = call.scattered.weights.data() + first,
                                 .count = tile.rows.count(),
                                 .width = width,
                                 .out = call.output.float_row(0) + column,
                                 .out_stride = call.output.width});
}

void LinearOutput::store_activated(const LinearTarget& target, const LinearTile& tile) const {
  const LinearCall& call = target.call;
  const std::int64_t width = panel_width(spec_.parts[tile.place.part].weight.n, tile.place.panel);
  const auto element = static_cast<std::int64_t>(size_of(call.output.dtype));
  const std::int64_t first = column_of(target, tile.place, tile.first_part);
  if (!call.packed_output.has_value()) {
    std::byte* out = call.output.row(tile.rows.begin) + first * element;
    store_columns(target, tile, {0, width}, width * element, out, call.output.row_bytes());
    return;
  }
  const PackedRows packed = call.packed_output.from(tile.rows.begin);
  const std::int64_t step_columns = PackedSteps::kRowBytes / element;
  for (std::int64_t column = 0; column < width; column += step_columns) {
    std::byte* step = packed.data + (first + column) / step_columns * packed.step_bytes;
    store_columns(target, tile, {column, std::min(column + step_columns, width)}, PackedSteps::kRowBytes,
                  step, PackedSteps::kRowBytes);
  }
}

/// Activates columns of a tile, and stores them in rows of `bytes` bytes at `out`, padded with zeros. If the
/// output is streamed, the result first replaces the sums.
void LinearOutput::store_columns(const LinearTarget& target, const LinearTile& tile, RowRange columns,
                                 std::int64_t bytes, std::byte* out, std::int64_t out_stride) const {
  const DType out_type = target.call.output.dtype;
  const PanelPlace place = tile.place;
  const auto from = [&](const float* values) { return values == nullptr ? nullptr : values + columns.begin; };
  float* sums = tile.sums + columns.begin;
  const bool in_place = target.streams;
  std::byte* made = in_place ? reinterpret_cast<std::byte*>(sums) : out;
  const std::int64_t made_stride =
      in_place ? kPanelColumns * static_cast<std::int64_t>(sizeof(float)) : out_stride;
  activate_({.x = sums,
             .linear = from(tile.linear),
             .stride = kPanelColumns,
             .bias = from(bias_of(place)),
             .linear_bias = tile.linear == nullptr ? nullptr : from(bias_of({place.part + 1, place.panel})),
             .rows = tile.rows.count(),
             .width = columns.count(),
             .out = made,
             .out_stride = made_stride,
             .out_type = out_type,
             .threshold = spec_.threshold});
  const std::int64_t used = columns.count() * static_cast<std::int64_t>(size_of(out_type));
  for (std::int64_t row = 0; used < bytes && row < tile.rows.count(); ++row) {
    std::memset(made + row * made_stride + used, 0, static_cast<std::size_t>(bytes - used));
  }
  if (in_place) {
    context_.kernels.stream_rows(made, made_stride, tile.rows.count(), bytes, out, out_stride);
  }
}

/// Bias of a panel, if the activation adds it.
const float* LinearOutput::bias_of(PanelPlace place) const {
  const LinearPart& part = spec_.parts[place.part];
  if (part.bias.size == 0 || !activates_biased_) return nullptr;
  return part.bias.data + place.panel * kPanelColumns;
}

}  // namespace adaptrt
