#include "ops/linear/base_product.h"

#include <algorithm>
#include <numeric>
#include <variant>

#include "adaptrt/cpu/int16_spans.h"
#include "op_members.h"
#include "op_sizes.h"

namespace adaptrt {
namespace {

std::size_t expanded_bytes(DType activations, std::int64_t inputs) {
  return panel_bytes(activations, kPanelColumns, inputs);
}

void prefetch(std::span<const MemorySpan> spans) {
  constexpr std::int64_t kCacheLine = 64;
  for (const MemorySpan& span : spans) {
    for (std::int64_t offset = 0; offset < span.bytes; offset += kCacheLine) {
      __builtin_prefetch(span.data + offset, 0, 2);
    }
  }
}

/// True if activations are rounded to 16 bits for products with such weights.
bool multiplies_int16(const Quantization& how, DType activations, const KernelTable& kernels) {
  const bool has_integers =
      (how.algo == QuantAlgo::kW8A16 || how.algo == QuantAlgo::kW4A16) && !how.is_codebook();
  return has_integers && activations == DType::kBFloat16 && kernels.int16_gemm != nullptr;
}

/// True if a panel's groups fit the stretches that the kernel decodes.
bool has_stretches(const PanelMatrix& weight, std::int64_t panel, DType activations,
                   const KernelTable& kernels) {
  const std::int64_t size = weight.quantization.group_size;
  const std::int64_t inputs = kernels.stretch_inputs[static_cast<std::size_t>(activations)];
  return inputs > 0 && size > 0 && inputs % size == 0 && panel_width(weight.n, panel) == kPanelColumns;
}

/// True if a panel is expanded before the product with this number of rows, instead of during it.
bool is_expanded(const PanelMatrix& weight, std::int64_t panel, std::int64_t rows, DType activations,
                 const KernelTable& kernels) {
  if (weight.is_compressed(panel)) return rows > kernels.compressed_rows;
  if (weight.quantization.is_codebook()) {
    return rows > kernels.codebook_rows[static_cast<std::size_t>(weight.dtype)] ||
           panel_width(weight.n, panel) < kPanelColumns;
  }
  if (multiplies_int16(weight.quantization, activations, kernels)) return false;
  switch (weight.quantization.algo) {
    case QuantAlgo::kW8A16:
      return rows > kernels.int8_decoded_rows && !has_stretches(weight, panel, activations, kernels);
    case QuantAlgo::kW4A16:
      return rows > kernels.int4_decoded_rows && !has_stretches(weight, panel, activations, kernels);
    case QuantAlgo::kNone:
    case QuantAlgo::kW8A8:
    case QuantAlgo::kW4A8:
      return false;
  }
  return false;
}

/// The arguments of a tile's product that do not depend on how its weights are stored.
GemmCall gemm_call(const PanelMatrix& weight, const TileTask& task, const void* a, std::int64_t a_stride) {
  return {.a = a,
          .a_stride = a_stride,
          .panel = weight.data + weight.offset(task.panel),
          .k = weight.k,
          .width = panel_width(weight.n, task.panel),
          .out = task.tile,
          .out_stride = task.stride,
          .rows = task.rows.count(),
          .part = task.inputs,
          .next_panel = task.upcoming.panel};
}

Tiling tiling_of(const Program& program, const KernelTable& kernels, DType activations,
                 const Quantization& quantization) {
  if (kernels.part_bytes == 0 || activations != DType::kBFloat16) return {};
  constexpr std::int64_t kLeastInputs = 512;
  return {.block_rows = std::min(kernels.block_rows,
                                 PackedSteps::blocks_of(most_linear_rows(program)) * PackedSteps::kBlockRows),
          .takes_parts = true,
          .whole_bytes = kernels.whole_bytes,
          .part_bytes = kernels.part_bytes,
          .streamed_rows = kernels.streamed_rows,
          .part_multiple = std::lcm(kLeastInputs, std::max<std::int64_t>(1, quantization.group_size)),
          .activation_bytes = rounds_activations(quantization.algo) ? 1 : 2,
          .panel_input_bytes = kPanelColumns * (quantization.algo == QuantAlgo::kNone ? 2 : 1)};
}

/// Maximum number of groups of inputs in a matrix for which counts(quantization) is true.
template <class Counts>
std::int64_t most_groups(const Program& program, const Counts& counts) {
  std::int64_t most = 0;
  for_each_member<LinearPart>(program, [&](const LinearPart& part) {
    const Quantization& how = part.weight.quantization;
    if (counts(how)) most = std::max(most, group_count(how, part.weight.k));
  });
  return most;
}

}  // namespace

std::int64_t Tiling::inputs_of_part(std::int64_t rows, std::int64_t width) const {
  constexpr std::int64_t kPanelShare = 4;
  const std::int64_t bytes =
      std::max(rows * activation_bytes, rows > streamed_rows ? kPanelShare * panel_input_bytes : 0);
  if (!takes_parts || bytes * width <= whole_bytes) return width;
  const std::int64_t inputs = part_bytes / bytes / part_multiple * part_multiple;
  return std::min(std::max(inputs, part_multiple), width);
}

BaseProduct::BaseProduct(const LinearSpec& spec, const CpuContext& context)
    : spec_(spec),
      context_(context),
      permuted_(spec, context),
      tiling_(tiling_of(context.program, context.kernels, activation_dtype(context.program.dtype),
                        spec.quantization())),
      multiplies_int16_(
          multiplies_int16(spec.quantization(), activation_dtype(context.program.dtype), context.kernels)),
      multiply_(multiplies_int16_ ? &BaseProduct::multiply_int16 : multiply_for(spec.quantization())),
      unpacked_rows_(unpacked_rows(spec.quantization(), context.kernels)) {}

BaseProduct::Multiply BaseProduct::multiply_for(const Quantization& quantization) {
  if (quantization.is_codebook()) return &BaseProduct::multiply_float;
  switch (quantization.algo) {
    case QuantAlgo::kNone:
      return &BaseProduct::multiply_float;
    case QuantAlgo::kW8A8:
      return &BaseProduct::multiply_int8;
    case QuantAlgo::kW4A8:
      return &BaseProduct::multiply_w4a8;
    case QuantAlgo::kW8A16:
    case QuantAlgo::kW4A16:
      return &BaseProduct::multiply_quantized;
  }
  return nullptr;
}

void BaseProduct::prepare(const LinearCall& call, bool has_adapters) const {
  const Quantization& quantization = spec_.quantization();
  const bool to_int8 = rounds_activations(quantization.algo);
  const bool permutes = permuted_.is_needed();
  const bool packs_input = !call.packed_input.has_value() && !call.chosen.has_value() &&
                           packed(call).has_value() && (has_adapters || (!to_int8 && !permutes));
  const bool reads_rows = to_int8 || multiplies_int16_ || quantization.needs_group_sums();
  if (!packs_input && !reads_rows && !permutes) return;
  const std::int64_t permutations = permutes ? permuted_.find_permutations(call) : 0;
  const auto body = [&](std::int64_t begin, std::int64_t end, int) {
    const RowRange rows{begin * PackedSteps::kBlockRows,
                        std::min(end * PackedSteps::kBlockRows, call.num_rows())};
    if (packs_input) pack_rows(call.input, packed(call), rows);
    if (!permutes) {
      read_rows(call, call.input, 0, rows);
      return;
    }
    permuted_.make(call, rows);
    for (std::int64_t permutation = 0; permutation < permutations; ++permutation) {
      const Rows made = permuted_.rows(call, permutation);
      read_rows(call, made, permutation, rows);
      if (context_.memory.has_packed()) pack_rows(made, packed_of(call, permutation), rows);
    }
  };
  context_.threads.parallel_for(PackedSteps::blocks_of(call.num_rows()),
                                rows_per_chunk(call.input.width * PackedSteps::kBlockRows), body);
}

void BaseProduct::read_rows(const LinearCall& call, const Rows& input, std::int64_t permutation,
                            RowRange rows) const {
  const Quantization& quantization = spec_.quantization();
  const std::int64_t groups = group_count(quantization, input.width);
  const std::int64_t first_row = permutation * call.num_rows();
  float* sums = context_.memory.group_sums() + first_row * groups;
  for (std::int64_t row = rows.begin; row < rows.end; ++row) {
    const std::byte* x = input.row(row);
    if (rounds_activations(quantization.algo)) {
      std::uint8_t* made = context_.memory.int8_row(row);
      context_.kernels.quantize_row(x, input.dtype, input.width, made, context_.memory.int8_scales() + row);
      if (quantization.algo == QuantAlgo::kW4A8) {
        context_.kernels.arrange_int8_row(made, input.width, quantization,
                                          context_.memory.int8_sums() + row * groups);
      }
    } else if (multiplies_int16_) {
      context_.memory.int16_rows.round_row(context_.kernels, x, input.width, quantization, first_row + row);
    } else if (quantization.needs_group_sums()) {
      context_.kernels.sum_groups(x, input.dtype, input.width, quantization.group_size, sums + row * groups);
    }
  }
}

void BaseProduct::pack_rows(const Rows& input, const PackedRows& packed, RowRange rows) const {
  context_.kernels.pack_rows({input.row(rows.begin), input.row_bytes(), input.row_bytes()}, rows.count(),
                             packed.from(rows.begin).data, packed.step_bytes);
}

PackedRows BaseProduct::packed_of(const LinearCall& call, std::int64_t permutation) const {
  if (!context_.memory.has_packed()) return {};
  return {context_.memory.packed.data() + (1 + permutation) * context_.memory.packed_permutation_bytes,
          packed_step_bytes(call.num_rows())};
}

BaseProduct::PartInput BaseProduct::input_of(const LinearCall& call, const TileTask& task) const {
  const std::int64_t row = task.rows.begin;
  const Quantization& quantization = spec_.quantization();
  const std::int64_t groups = group_count(quantization, call.input.width);
  if (!permuted_.is_needed()) {
    return {call.input.row(row), task.packed, context_.memory.group_sums() + row * groups};
  }
  const std::int64_t permutation = permuted_.permutation_of(task.part);
  return {permuted_.rows(call, permutation).row(row), packed_of(call, permutation).from(row),
          context_.memory.group_sums() + (permutation * call.num_rows() + row) * groups};
}

void BaseProduct::multiply(const LinearCall& call, const TileTask& task, ExpandedPanels* expanded) const {
  const ExpansionPlace place{
      room_for_panel(task.thread, task.slot), &expanded->held[task.slot], {task.part, task.panel}};
  (this->*multiply_)(call, task, place);
}

std::byte* BaseProduct::room_for_panel(int thread, std::size_t slot) const {
  float* after_tiles = context_.scratch(thread) + tiling_.scratch_floats();
  return reinterpret_cast<std::byte*>(after_tiles) +
         slot * expanded_bytes(activation_dtype(context_.program.dtype), spec_.inputs());
}

void BaseProduct::multiply_gathered(const LinearCall& call, std::size_t part, const GatheredOutputs& gathered,
                                    int thread, float* tile) const {
  const PanelMatrix& weight = spec_.parts[part].weight;
  const auto type = static_cast<std::size_t>(weight.dtype);
  PanelGemm gemm{.call = {.a = call.input.row(0),
                          .a_stride = call.input.width,
                          .k = weight.k,
                          .width = kPanelColumns,
                          .out = tile,
                          .out_stride = kPanelColumns,
                          .rows = call.num_rows()},
                 .a_steps = packed(call).data,
                 .a_step_bytes = packed(call).step_bytes};
  if (context_.kernels.gathered_gemm[type] != nullptr) {
    context_.kernels.gathered_gemm[type](gemm, gathered);
    return;
  }
  std::byte* panel = room_for_panel(thread, 0);
  context_.kernels.gather_outputs(gathered, weight.k / k_interleave(weight.dtype), panel);
  gemm.call.panel = panel;
  context_.kernels.gemm[type](gemm);
}

void BaseProduct::multiply_float(const LinearCall& call, const TileTask& task,
                                 const ExpansionPlace& place) const {
  const PanelMatrix& weight = spec_.parts[task.part].weight;
  PanelGemm gemm{.call = gemm_call(weight, task, call.input.row(task.rows.begin), call.input.width),
                 .a_steps = task.packed.data,
                 .a_step_bytes = task.packed.step_bytes,
                 .fetch = task.upcoming.spans};
  const auto type = static_cast<std::size_t>(weight.dtype);
  const KernelTable& kernels = context_.kernels;
  if (call.live.has_value() && gemm.call.width == kPanelColumns && !gemm.call.part.has_value()) {
    kernels.sparse_gemm[type](gemm, *call.live);
    return;
  }
  const bool expands = is_expanded(weight, task.panel, gemm.call.rows, weight.dtype, kernels);
  if (weight.is_compressed(task.panel)) {
    if (!expands) {
      kernels.compressed_gemm(gemm, weight.outliers);
      return;
    }
    place.fill([&](std::byte* out) {
      kernels.expand_compressed(gemm.call.panel, gemm.call.k, weight.outliers, out);
    });
    gemm.call.panel = place.panel;
  } else if (weight.quantization.is_codebook()) {
    if (!expands) {
      kernels.codebook_gemm[type](gemm, weight.quantization);
      return;
    }
    place.fill([&](std::byte* out) {
      kernels.expand_codebook[type](gemm.call.panel, weight.quantization, gemm.call.k, gemm.call.width, out);
    });
    gemm.call.panel = place.panel;
  }
  kernels.gemm[type](gemm);
}

void BaseProduct::multiply_quantized(const LinearCall& call, const TileTask& task,
                                     const ExpansionPlace& place) const {
  const PanelMatrix& weight = spec_.parts[task.part].weight;
  const PartInput input = input_of(call, task);
  prefetch(task.upcoming.spans);
  const auto activation = static_cast<std::size_t>(call.input.dtype);
  QuantizedGemm gemm{.call = gemm_call(weight, task, input.rows, call.input.width),
                     .activation = call.input.dtype,
                     .a_steps = input.packed.data,
                     .a_step_bytes = input.packed.step_bytes,
                     .a_sums = input.sums,
                     .quantization = weight.quantization,
                     .expanded = nullptr};
  if (is_expanded(weight, task.panel, gemm.call.rows, call.input.dtype, context_.kernels)) {
    place.fill([&](std::byte* out) { context_.kernels.expand_panel[activation](gemm, out); });
    gemm.expanded = place.panel;
  }
  context_.kernels.quantized_gemm[activation](gemm);
}

void BaseProduct::multiply_int16(const LinearCall& call, const TileTask& task,
                                 const ExpansionPlace& /*place*/) const {
  const PanelMatrix& weight = spec_.parts[task.part].weight;
  prefetch(task.upcoming.spans);
  const std::int64_t permutation = permuted_.is_needed() ? permuted_.permutation_of(task.part) : 0;
  const std::int64_t row = permutation * call.num_rows() + task.rows.begin;
  const Int16Rows& rows = context_.memory.int16_rows;
  const std::int64_t spans = span_count(weight.quantization, weight.k);
  context_.kernels.int16_gemm({.call = gemm_call(weight, task, rows.row(row), rows.stride()),
                               .a_scales = rows.scales() + row * spans,
                               .a_sums = rows.sums() + row * spans,
                               .spans = spans,
                               .quantization = weight.quantization});
}

void BaseProduct::multiply_int8(const LinearCall& /*call*/, const TileTask& task,
                                const ExpansionPlace& /*place*/) const {
  const PanelMatrix& weight = spec_.parts[task.part].weight;
  prefetch(task.upcoming.spans);
  const std::int64_t row = task.rows.begin;
  const StepMemory& memory = context_.memory;
  context_.kernels.int8_gemm({.call = gemm_call(weight, task, memory.int8_row(row), memory.int8_stride),
                              .a_scales = memory.int8_scales() + row});
}

void BaseProduct::multiply_w4a8(const LinearCall& /*call*/, const TileTask& task,
                                const ExpansionPlace& /*place*/) const {
  const PanelMatrix& weight = spec_.parts[task.part].weight;
  prefetch(task.upcoming.spans);
  const std::int64_t row = task.rows.begin;
  const StepMemory& memory = context_.memory;
  context_.kernels.w4a8_gemm({.call = gemm_call(weight, task, memory.int8_row(row), memory.int8_stride),
                              .a_scales = memory.int8_scales() + row,
                              .a_sums = memory.int8_sums() + row * group_count(weight.quantization, weight.k),
                              .quantization = weight.quantization});
}

std::size_t linear_scratch_floats(const Program& program, const KernelTable& kernels) {
  std::size_t bytes = 0;
  const DType activations = activation_dtype(program.dtype);
  const auto gathers_whole = [&](DType weights) {
    return kernels.gathered_gemm[static_cast<std::size_t>(weights)] == nullptr;
  };
  const Tiling tiling = tiling_of(program, kernels, activations, {});
  const std::int64_t rows = std::min(tiling.block_rows, most_linear_rows(program));
  for_each_member<LinearPart>(program, [&](const LinearPart& part) {
    const PanelMatrix& weight = part.weight;
    // The last panel may be narrower than the others. Either kind may be expanded without the other.
    const std::int64_t last = std::max<std::int64_t>(0, panel_count(weight.n) - 1);
    const bool is_gathered = weight.has_rows && gathers_whole(weight.dtype);
    if (is_gathered || is_expanded(weight, 0, rows, activations, kernels) ||
        is_expanded(weight, last, rows, activations, kernels)) {
      bytes = std::max(bytes, expanded_bytes(activations, weight.k));
    }
  });
  for (const Op& op : program.body) {
    const auto* linear = std::get_if<LinearOp>(&op);
    if (linear == nullptr || linear->neurons.is_empty() || !gathers_whole(program.dtype)) continue;
    bytes = std::max(bytes, expanded_bytes(activations, linear->parts[0].weight.k));
  }
  return static_cast<std::size_t>(tiling.scratch_floats()) + kPartsInTurn * (bytes / sizeof(float));
}

PackedRowsSize packed_rows_size(const Program& program, const KernelTable& kernels) {
  if (kernels.pack_rows == nullptr) return {};
  if (activation_dtype(program.dtype) != DType::kBFloat16) return {};
  return {.steps = most_packed_steps(program), .step_bytes = packed_step_bytes(most_linear_rows(program))};
}

std::int64_t most_summed_groups(const Program& program, const KernelTable& kernels) {
  return most_groups(program, [&](const Quantization& how) {
    return how.needs_group_sums() && !multiplies_int16(how, activation_dtype(program.dtype), kernels);
  });
}

Int16RowSize int16_row_size(const Program& program, const KernelTable& kernels) {
  constexpr std::int64_t kLineInputs = 32;
  Int16RowSize size;
  for_each_member<LinearPart>(program, [&](const LinearPart& part) {
    const PanelMatrix& weight = part.weight;
    if (!multiplies_int16(weight.quantization, activation_dtype(program.dtype), kernels)) return;
    size.inputs = std::max(size.inputs, padded_int16_inputs(weight.k));
    size.spans = std::max(size.spans, span_count(weight.quantization, weight.k));
  });
  // The number of cache lines is odd, because rows a power of two apart would conflict in the cache.
  if (size.inputs > 0) size.inputs |= kLineInputs;
  return size;
}

std::int64_t most_w4a8_groups(const Program& program) {
  return most_groups(program, [](const Quantization& how) { return how.algo == QuantAlgo::kW4A8; });
}

std::int64_t int8_row_bytes(const Program& program) {
  constexpr std::int64_t kAlignment = 64;
  std::int64_t widest = 0;
  for_each_member<LinearPart>(program, [&](const LinearPart& part) {
    const PanelMatrix& weight = part.weight;
    if (!rounds_activations(weight.quantization.algo)) return;
    // Kernels of kW4A8 read a whole cache line, beginning at any group.
    const std::int64_t behind = weight.quantization.algo == QuantAlgo::kW4A8 ? kAlignment : 0;
    widest = std::max(widest, weight.k + behind);
  });
  // The number of cache lines is odd, because rows a power of two apart would conflict in the cache.
  return widest == 0 ? 0 : ((widest + kAlignment - 1) / kAlignment * kAlignment) | kAlignment;
}

}  // namespace adaptrt
