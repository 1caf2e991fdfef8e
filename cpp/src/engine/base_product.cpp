#include "base_product.h"

#include <algorithm>
#include <variant>

namespace adaptrt {
namespace {

/// Elements of the input that are worth a chunk when they are rounded.
constexpr std::int64_t kElementsPerChunk = 8192;

std::size_t expanded_bytes(const Buffer& input) {
  return panel_bytes(input.dtype, kPanelColumns, input.width);
}

void bring_near(std::span<const MemorySpan> spans) {
  constexpr std::int64_t kCacheLine = 64;
  for (const MemorySpan& span : spans) {
    for (std::int64_t offset = 0; offset < span.bytes; offset += kCacheLine) {
      __builtin_prefetch(span.data + offset, 0, 2);
    }
  }
}

/// Calls visit(op, its input) for the linear ops of a program.
template <class Visit>
void for_each_linear(const Program& program, const Visit& visit) {
  for (const auto* ops : {&program.body, &program.head}) {
    for (const auto& op : *ops) {
      const auto* linear = std::get_if<LinearOp>(&op);
      if (linear != nullptr) visit(*linear, program.buffers[static_cast<std::size_t>(linear->input)]);
    }
  }
}

}  // namespace

BaseProduct::BaseProduct(const LinearOp& op, const Step& step)
    : op_(op), step_(step), input_(step.buffer(op.input)) {}

void BaseProduct::prepare() const {
  const Quantization& quantization = op_.parts[0].weight.quantization;
  const bool to_int8 = quantization.algo == QuantAlgo::kW8A8;
  if (!to_int8 && !quantization.zero_points) return;
  const std::int64_t groups = group_count(quantization, input_.width);
  const auto body = [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t row = begin; row < end; ++row) {
      const std::byte* x = step_.row(op_.input, row);
      if (to_int8) {
        step_.kernels.quantize_row(x, input_.dtype, input_.width, step_.int8_rows + row * step_.int8_stride,
                                   step_.int8_scales + row);
      } else {
        step_.kernels.sum_groups(x, input_.dtype, input_.width, quantization.group_size,
                                 step_.group_sums + row * groups);
      }
    }
  };
  step_.threads.parallel_for(step_.rows, std::max<std::int64_t>(1, kElementsPerChunk / input_.width), body);
}

void BaseProduct::multiply(std::size_t part, std::int64_t panel, RowRange rows, const Upcoming& upcoming,
                           std::size_t slot, int thread, ExpandedPanels* expanded, float* tile) const {
  const PanelMatrix& weight = op_.parts[part].weight;
  const ExpansionPlace place{
      reinterpret_cast<std::byte*>(step_.scratch[static_cast<std::size_t>(thread)].data() +
                                   kPartsInTurn * kTileFloats) +
          slot * expanded_bytes(input_),
      &expanded->held[slot],
      {part, panel}};
  if (weight.quantization.algo == QuantAlgo::kNone) {
    multiply_float(weight, panel, rows, upcoming, place, tile);
    return;
  }
  bring_near(upcoming.adapters);
  if (weight.quantization.algo == QuantAlgo::kW8A8) {
    multiply_int8(weight, panel, rows, upcoming.panel, tile);
  } else {
    multiply_quantized(weight, panel, rows, upcoming.panel, place, tile);
  }
}

void BaseProduct::multiply_float(const PanelMatrix& weight, std::int64_t panel, RowRange rows,
                                 const Upcoming& upcoming, const ExpansionPlace& place, float* tile) const {
  PanelGemm gemm{.a = step_.row(op_.input, rows.begin),
                 .a_stride = input_.width,
                 .panel = weight.data + weight.offset(panel),
                 .k = weight.k,
                 .width = panel_width(weight.n, panel),
                 .out = tile,
                 .out_stride = kPanelColumns,
                 .rows = rows.end - rows.begin,
                 .next_panel = upcoming.panel,
                 .fetch = upcoming.adapters};
  if (weight.is_compressed()) {
    if (gemm.rows <= step_.kernels.compressed_rows) {
      step_.kernels.compressed_gemm(gemm, weight.exceptions);
      return;
    }
    place.fill(
        [&](std::byte* out) { step_.kernels.expand_compressed(gemm.panel, gemm.k, weight.exceptions, out); });
    gemm.panel = place.panel;
  }
  step_.kernels.gemm[static_cast<std::size_t>(weight.dtype)](gemm);
}

void BaseProduct::multiply_quantized(const PanelMatrix& weight, std::int64_t panel, RowRange rows,
                                     const std::byte* next, const ExpansionPlace& place, float* tile) const {
  QuantizedGemm gemm{.a = step_.row(op_.input, rows.begin),
                     .activation = input_.dtype,
                     .a_stride = input_.width,
                     .a_sums = step_.group_sums + rows.begin * group_count(weight.quantization, weight.k),
                     .quantization = weight.quantization,
                     .panel = weight.data + weight.offset(panel),
                     .expanded = nullptr,
                     .k = weight.k,
                     .width = panel_width(weight.n, panel),
                     .out = tile,
                     .out_stride = kPanelColumns,
                     .rows = rows.end - rows.begin,
                     .next_panel = next};
  const bool is_int4 = weight.quantization.algo == QuantAlgo::kW4A16;
  if (gemm.rows > (is_int4 ? step_.kernels.int4_decoded_rows : step_.kernels.int8_decoded_rows)) {
    place.fill([&](std::byte* out) { step_.kernels.expand_panel(gemm, out); });
    gemm.expanded = place.panel;
  }
  step_.kernels.quantized_gemm(gemm);
}

void BaseProduct::multiply_int8(const PanelMatrix& weight, std::int64_t panel, RowRange rows,
                                const std::byte* next, float* tile) const {
  step_.kernels.int8_gemm({.a = step_.int8_rows + rows.begin * step_.int8_stride,
                           .a_stride = step_.int8_stride,
                           .a_scales = step_.int8_scales + rows.begin,
                           .panel = weight.data + weight.offset(panel),
                           .k = weight.k,
                           .width = panel_width(weight.n, panel),
                           .out = tile,
                           .out_stride = kPanelColumns,
                           .rows = rows.end - rows.begin,
                           .next_panel = next});
}

std::size_t linear_scratch_floats(const Program& program) {
  std::size_t bytes = 0;
  for_each_linear(program, [&](const LinearOp& op, const Buffer& input) {
    for (const LinearPart& part : op.parts) {
      const QuantAlgo algo = part.weight.quantization.algo;
      if (part.weight.is_compressed() || algo == QuantAlgo::kW8A16 || algo == QuantAlgo::kW4A16) {
        bytes = std::max(bytes, expanded_bytes(input));
      }
    }
  });
  return kPartsInTurn * (static_cast<std::size_t>(kTileFloats) + bytes / sizeof(float));
}

std::int64_t most_zero_point_groups(const Program& program) {
  std::int64_t most = 0;
  for_each_linear(program, [&](const LinearOp& op, const Buffer& input) {
    const Quantization& quantization = op.parts[0].weight.quantization;
    if (quantization.zero_points) most = std::max(most, group_count(quantization, input.width));
  });
  return most;
}

std::int64_t int8_row_bytes(const Program& program) {
  constexpr std::int64_t kAlignment = 64;
  std::int64_t widest = 0;
  for_each_linear(program, [&](const LinearOp& op, const Buffer& input) {
    if (op.parts[0].weight.quantization.algo == QuantAlgo::kW8A8) widest = std::max(widest, input.width);
  });
  // An odd number of cache lines: rows a power of two apart would compete for the same places of a cache.
  return widest == 0 ? 0 : ((widest + kAlignment - 1) / kAlignment * kAlignment) | kAlignment;
}

}  // namespace adaptrt
