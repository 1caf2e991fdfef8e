#include "ops/linear/packed_places.h"

#include <algorithm>
#include <span>
#include <variant>

#include "adaptrt/program/op_buffers.h"
#include "op_members.h"
#include "op_sizes.h"
#include "ops/linear/linear_spec.h"

namespace adaptrt {
namespace {

std::int64_t packed_steps_of(std::int64_t inputs) {
  return PackedSteps::steps_of(inputs * static_cast<std::int64_t>(size_of(DType::kBFloat16)));
}

/// Returns the linear layer after op `number` that reads `output`; nullptr if another op comes next.
const LinearOp* reader_of(BufferId output, std::span<const Op> ops, std::size_t number) {
  const auto* next = number + 1 < ops.size() ? std::get_if<LinearOp>(&ops[number + 1]) : nullptr;
  return next != nullptr && next->input == output ? next : nullptr;
}

/// True if an op after the first reader of op `number`'s output reads the output too.
bool is_read_again(BufferId output, const Program& program, std::span<const Op> ops, std::size_t number) {
  for (const Op& op : ops.subspan(number + 2)) {
    const OpBuffers buffers = buffers_of(op, program);
    if (buffers.does_read(output)) return true;
    if (buffers.does_write(output)) return false;
  }
  return false;
}

/// True if a layer reads only the packed rows of its input, with any adapters.
bool reads_packed_rows_alone(const LinearOp& linear) {
  return reads_only_packed_rows(linear.parts[0].weight.quantization) && !linear.has_sparse_input;
}

/// Returns the layer that reads the activated output of op `number`, if it reads only packed rows.
const LinearOp* packed_reader_of(const Program& program, std::span<const Op> ops, std::size_t number) {
  const auto* linear = std::get_if<LinearOp>(&ops[number]);
  if (linear == nullptr || !is_activated(linear->epilogue)) return nullptr;
  const BufferId output = linear->output;
  if (output == program.hidden || output == program.encoder_output) return nullptr;
  const LinearOp* reader = reader_of(output, ops, number);
  if (reader == nullptr || !reads_packed_rows_alone(*reader)) return nullptr;
  return is_read_again(output, program, ops, number) ? nullptr : reader;
}

/// Returns the layer that reads a norm's output, if it packs its input without changes.
const LinearOp* reader_after_norm(std::span<const Op> ops, std::size_t number) {
  BufferId output = kNoBuffer;
  if (const auto* norm = std::get_if<RmsNormOp>(&ops[number])) output = norm->output;
  if (const auto* norm = std::get_if<LayerNormOp>(&ops[number])) output = norm->output;
  const LinearOp* reader = output == kNoBuffer ? nullptr : reader_of(output, ops, number);
  if (reader == nullptr) return nullptr;
  const Quantization& how = reader->parts[0].weight.quantization;
  return rounds_activations(how.algo) || how.act_order ? nullptr : reader;
}

}  // namespace

std::vector<PackedPlace> find_packed_places(const std::vector<Op>& ops, const CpuContext& context) {
  std::vector<PackedPlace> places(ops.size());
  std::byte* memory = context.memory.packed.data();
  const auto place_for = [&](const LinearOp& reader, std::int64_t first_step) {
    const Quantization& quantization = reader.parts[0].weight.quantization;
    return PackedPlace{memory, first_step, unpacked_rows(quantization, context.kernels)};
  };
  bool is_packed_instead = false;  // the previous op writes only packed rows
  for (std::size_t i = 0; i < ops.size(); ++i) {
    // The op's own packed input would be overwritten.
    const bool may_pack_instead = !is_packed_instead;
    is_packed_instead = false;
    if (const LinearOp* after_norm = reader_after_norm(ops, i); after_norm != nullptr) {
      places[i] = place_for(*after_norm, 0);
      continue;
    }
    const LinearOp* reader = may_pack_instead ? packed_reader_of(context.program, ops, i) : nullptr;
    if (reader == nullptr) continue;
    is_packed_instead = true;
    // Layers whose weights are loaded when they are used may read plain rows.
    if (context.weights != nullptr) continue;
    // The op's own input comes first.
    places[i] = place_for(*reader, packed_steps_of(std::get<LinearOp>(ops[i]).parts[0].weight.k));
  }
  return places;
}

std::int64_t most_packed_steps(const Program& program) {
  std::int64_t most = 0;
  for_each_member<LinearPart>(
      program, [&](const LinearPart& part) { most = std::max(most, packed_steps_of(part.weight.k)); });
  for (const auto* ops : program.sections()) {
    for (std::size_t i = 0; i < ops->size(); ++i) {
      const LinearOp* reader = packed_reader_of(program, *ops, i);
      if (reader == nullptr) continue;
      most = std::max(most, packed_steps_of(std::get<LinearOp>((*ops)[i]).parts[0].weight.k) +
                                packed_steps_of(reader->parts[0].weight.k));
    }
  }
  return most;
}

}  // namespace adaptrt
