#include "ops/linear_output.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "ops/base_product.h"
#include "ranks/overlapped_sum.h"

namespace adaptrt {

LinearOutput::LinearOutput(const LinearWork& work, const Step& step, const AdapterProduct& adapters,
                           std::int64_t first_panel, bool streams)
    : work_(work), step_(step), adapters_(adapters), first_panel_(first_panel), streams_(streams) {}

void LinearOutput::finish(const LinearTile& tile) const {
  finish_part(tile.place, tile.sums, tile.rows);
  if (tile.linear != nullptr) finish_part({tile.place.part + 1, tile.place.panel}, tile.linear, tile.rows);
  if (is_activated(work_.epilogue) && work_.has_scores()) close_gates(tile);
  if (is_activated(work_.epilogue) || tile.linear != nullptr) {
    store_activated(tile);
  } else {
    store(tile);
  }
}

bool LinearOutput::is_sums() const {
  const auto has_bias = [](const LinearPart& part) { return part.bias.size != 0; };
  return work_.epilogue == LinearEpilogue::kStore && adapters_.is_empty() && work_.scale == 1.0F &&
         work_.softcap == 0.0F && work_.sum == nullptr && !streams_ && !work_.has_sparse_input &&
         !work_.live.has_value() && !work_.scattered.is_there() &&
         work_.quantization().algo == QuantAlgo::kNone && std::ranges::none_of(work_.parts, has_bias);
}

float* LinearOutput::sums_of(PanelPlace place, std::size_t first_part, std::int64_t row) const {
  return work_.output.float_row(row) + column_of(place, first_part);
}

/// Whether biases are added on the way to the activation, to the sums that nothing else changes.
bool LinearOutput::activates_biased() const {
  return is_activated(work_.epilogue) && work_.scale == 1.0F && work_.softcap == 0.0F;
}

/// What adapters, the bias and the layer's scale and bound make of a panel's sums.
void LinearOutput::finish_part(PanelPlace place, float* rows, RowRange range) const {
  const LinearPart& part = work_.parts[place.part];
  if (work_.has_sparse_input) make_zeros_positive(place, rows, range);
  if (!adapters_.is_empty()) adapters_.expand(place.part, place.panel, range, rows);
  const bool adds_bias = part.bias.size != 0 && !activates_biased();
  if (!adds_bias && work_.scale == 1.0F && work_.softcap == 0.0F) return;
  const std::int64_t width = panel_width(part.weight.n, place.panel);
  for (std::int64_t row = range.begin; row < range.end; ++row, rows += kPanelColumns) {
    if (adds_bias) step_.kernels.add(part.bias.data + place.panel * kPanelColumns, width, rows);
    if (work_.scale != 1.0F) {
      step_.kernels.scale_and_store(rows, work_.scale, width, reinterpret_cast<std::byte*>(rows),
                                    DType::kFloat32);
    }
    if (work_.softcap != 0.0F) step_.kernels.softcap(work_.softcap, width, rows);
  }
}

/// Sums of products with zeros may be zeros of either sign, by which of them were left out.
void LinearOutput::make_zeros_positive(PanelPlace place, float* rows, RowRange range) const {
  static constexpr std::array<float, kPanelColumns> kZeros{};
  const std::int64_t width = panel_width(work_.parts[place.part].weight.n, place.panel);
  for (std::int64_t row = range.begin; row < range.end; ++row, rows += kPanelColumns) {
    step_.kernels.add(kZeros.data(), width, rows);
  }
}

void LinearOutput::close_gates(const LinearTile& tile) const {
  const std::int64_t column = tile.place.panel * kPanelColumns;
  const std::int64_t width = panel_width(work_.parts[tile.place.part].weight.n, tile.place.panel);
  float* gates = tile.sums;
  for (std::int64_t row = tile.rows.begin; row < tile.rows.end; ++row, gates += kPanelColumns) {
    step_.kernels.close_gates(work_.scores.float_row(row) + column, work_.least_score, width, gates);
  }
}

/// Copies the first `bytes` of each row of a tile to the output, where rows begin at `out`.
void LinearOutput::stream(const float* tile, RowRange rows, std::int64_t bytes, std::byte* out) const {
  step_.kernels.stream_rows(reinterpret_cast<const std::byte*>(tile), kPanelColumns * sizeof(float),
                            rows.end - rows.begin, bytes, out, work_.output.row_bytes());
}

/// Of the output, where a panel's begin.
std::int64_t LinearOutput::column_of(PanelPlace place, std::size_t first_part) const {
  std::int64_t column = (place.panel - first_panel_) * kPanelColumns;
  for (std::size_t before = first_part; before < place.part; ++before) {
    column += work_.parts[before].weight.n;
  }
  return column;
}

void LinearOutput::store(const LinearTile& tile) const {
  const std::int64_t width = panel_width(work_.parts[tile.place.part].weight.n, tile.place.panel);
  const std::int64_t column = column_of(tile.place, tile.first_part);
  if (streams_) {
    stream(tile.sums, tile.rows, width * static_cast<std::int64_t>(sizeof(float)),
           reinterpret_cast<std::byte*>(work_.output.float_row(tile.rows.begin) + column));
    return;
  }
  if (work_.sum != nullptr) return store_term(tile, column, width);
  if (work_.scattered.is_there()) return scatter(tile, column, width);
  const float* sums = tile.sums;
  for (std::int64_t row = tile.rows.begin; row < tile.rows.end; ++row, sums += kPanelColumns) {
    float* out = work_.output.float_row(row) + column;
    if (work_.epilogue == LinearEpilogue::kAdd) {
      step_.kernels.add(sums, width, out);
    } else {
      std::copy_n(sums, width, out);
    }
  }
}

/// Of the sum over ranks that goes on meanwhile.
void LinearOutput::store_term(const LinearTile& tile, std::int64_t column, std::int64_t width) const {
  const OverlappedSum::Place place = work_.sum->place_of(column);
  const float* sums = tile.sums;
  for (std::int64_t row = tile.rows.begin; row < tile.rows.end; ++row, sums += kPanelColumns) {
    std::copy_n(sums, width, place.rows.float_row(row) + column - place.first_column);
  }
  work_.sum->add_made(column, tile.rows.count() * width);
}

void LinearOutput::scatter(const LinearTile& tile, std::int64_t column, std::int64_t width) const {
  const auto first = static_cast<std::size_t>(tile.rows.begin);
  step_.kernels.scatter_rows({.rows = tile.sums,
                              .stride = kPanelColumns,
                              .row_of = work_.scattered.row_of.data() + first,
                              .weights = work_.scattered.weights.data() + first,
                              .count = tile.rows.count(),
                              .width = width,
                              .out = work_.output.float_row(0) + column,
                              .out_stride = work_.output.width});
}

void LinearOutput::store_activated(const LinearTile& tile) const {
  const std::int64_t width = panel_width(work_.parts[tile.place.part].weight.n, tile.place.panel);
  const auto element = static_cast<std::int64_t>(size_of(work_.output.dtype));
  const std::int64_t first = column_of(tile.place, tile.first_part);
  if (!work_.packed_output.is_there()) {
    std::byte* out = work_.output.row(tile.rows.begin) + first * element;
    store_columns(tile, {0, width}, width * element, out, work_.output.row_bytes());
    return;
  }
  const PackedRows packed = work_.packed_output.from(tile.rows.begin);
  const std::int64_t step_columns = PackedSteps::kRowBytes / element;
  for (std::int64_t column = 0; column < width; column += step_columns) {
    std::byte* step = packed.data + (first + column) / step_columns * packed.step_bytes;
    store_columns(tile, {column, std::min(column + step_columns, width)}, PackedSteps::kRowBytes, step,
                  PackedSteps::kRowBytes);
  }
}

/// Columns of a tile, activated, to rows at `out` that have `bytes` for them: zeros behind them. Where the
/// output is streamed, the result takes the place of the sums before.
void LinearOutput::store_columns(const LinearTile& tile, RowRange columns, std::int64_t bytes, std::byte* out,
                                 std::int64_t out_stride) const {
  const PanelPlace place = tile.place;
  const auto from = [&](const float* values) { return values == nullptr ? nullptr : values + columns.begin; };
  float* sums = tile.sums + columns.begin;
  const bool in_place = streams_;
  std::byte* made = in_place ? reinterpret_cast<std::byte*>(sums) : out;
  const std::int64_t made_stride =
      in_place ? kPanelColumns * static_cast<std::int64_t>(sizeof(float)) : out_stride;
  activate({.x = sums,
            .linear = from(tile.linear),
            .stride = kPanelColumns,
            .bias = from(bias_of(place)),
            .linear_bias = tile.linear == nullptr ? nullptr : from(bias_of({place.part + 1, place.panel})),
            .rows = tile.rows.count(),
            .width = columns.count(),
            .out = made,
            .out_stride = made_stride,
            .out_type = work_.output.dtype,
            .threshold = work_.threshold});
  const std::int64_t used = columns.count() * static_cast<std::int64_t>(size_of(work_.output.dtype));
  for (std::int64_t row = 0; used < bytes && row < tile.rows.count(); ++row) {
    std::memset(made + row * made_stride + used, 0, static_cast<std::size_t>(bytes - used));
  }
  if (in_place) {
    step_.kernels.stream_rows(made, made_stride, tile.rows.count(), bytes, out, out_stride);
  }
}

/// Of a panel, where it is for the activation to add.
const float* LinearOutput::bias_of(PanelPlace place) const {
  const LinearPart& part = work_.parts[place.part];
  if (part.bias.size == 0 || !activates_biased()) return nullptr;
  return part.bias.data + place.panel * kPanelColumns;
}

void LinearOutput::activate(const ActivatedTile& tile) const {
  switch (work_.epilogue) {
    case LinearEpilogue::kSiluMul:
      return step_.kernels.silu(tile);
    case LinearEpilogue::kGeluMul:
    case LinearEpilogue::kGelu:
      return step_.kernels.gelu(tile);
    case LinearEpilogue::kGeluTanhMul:
    case LinearEpilogue::kGeluTanh:
      return step_.kernels.gelu_tanh(tile);
    case LinearEpilogue::kRelu:
      return step_.kernels.relu(tile);
    case LinearEpilogue::kReluMul:
      return step_.kernels.relu_mul(tile);
    case LinearEpilogue::kReluMulRelu:
      return step_.kernels.relu_mul_relu(tile);
    case LinearEpilogue::kClampedSiluMul:
      return step_.kernels.clamped_silu_mul(tile);
    case LinearEpilogue::kStore:
    case LinearEpilogue::kAdd:
      return;
  }
}

}  // namespace adaptrt
