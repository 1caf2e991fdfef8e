// What each op must move and multiply at least: the formulas behind OpCost.

#include <algorithm>
#include <set>
#include <variant>

#include "step_recorder.h"

namespace adaptrt {
namespace {

std::int64_t as_count(std::size_t bytes) {
  return static_cast<std::int64_t>(bytes);
}

std::int64_t bytes_of(const VectorView& vector) {
  return vector.size * static_cast<std::int64_t>(sizeof(float));
}

/// Of the rows of the section that runs.
std::int64_t bytes_of(BufferId id, const Step& step) {
  const Buffer& buffer = step.buffer(id);
  return step.rows * buffer.width * as_count(size_of(buffer.dtype));
}

OpCost cost_of(const EmbeddingOp& op, const Step& step) {
  const std::int64_t position_bytes =
      op.positions.n == 0 ? 0 : as_count(op.positions.bytes()) / op.positions.n;
  return {.weight_bytes = step.rows * (as_count(op.table.bytes()) / op.table.n + position_bytes),
          .activation_bytes = bytes_of(op.output, step)};
}

OpCost cost_of(const RmsNormOp& op, const Step& step) {
  const Buffer& input = step.buffer(op.input);
  return {.weight_bytes = bytes_of(op.weight),
          .activation_bytes = step.rows * input.width * as_count(size_of(input.dtype)) +
                              (op.add ? 2 : 1) * bytes_of(op.output, step)};
}

OpCost cost_of(const LayerNormOp& op, const Step& step) {
  return {.weight_bytes = bytes_of(op.weight) + bytes_of(op.bias),
          .activation_bytes = bytes_of(op.input, step) + bytes_of(op.output, step)};
}

OpCost cost_of(const CastOp& op, const Step& step) {
  return {.activation_bytes = bytes_of(op.input, step) + bytes_of(op.output, step)};
}

OpCost cost_of(const RopeTableOp& op, const Step& step) {
  return {.weight_bytes = bytes_of(op.inverse_frequencies),
          .activation_bytes = bytes_of(op.cosine, step) + bytes_of(op.sine, step)};
}

OpCost cost_of(const AttentionOp& op, const Step& step) {
  const ModelShape& shape = step.program.shape;
  const auto first_visible = [&](std::int64_t position) {
    return op.sliding_window == 0 ? 0 : std::max<std::int64_t>(0, position + 1 - op.sliding_window);
  };
  std::int64_t keys_to_read = 0;
  std::int64_t keys_to_score = 0;
  for (std::int64_t sequence = 0; sequence < step.num_sequences(); ++sequence) {
    const auto* offsets = step.input.sequence_offsets.data() + sequence;
    const auto* positions = step.input.positions.data();
    if (offsets[0] == offsets[1]) continue;
    keys_to_read += positions[offsets[1] - 1] + 1 - first_visible(positions[offsets[0]]);
    for (auto token = offsets[0]; token < offsets[1]; ++token) {
      keys_to_score += positions[token] + 1 - first_visible(positions[token]);
    }
  }
  const std::int64_t key_and_value_bytes = as_count(step.kv_pool.token_bytes());
  return {.weight_bytes = bytes_of(op.query_norm) + bytes_of(op.key_norm),
          .kv_bytes = (keys_to_read + step.num_tokens()) * key_and_value_bytes,
          .activation_bytes = bytes_of(op.qkv, step) + bytes_of(op.cosine, step) + bytes_of(op.sine, step) +
                              bytes_of(op.output, step),
          .flops = keys_to_score * 4 * shape.query_size()};
}

/// After the op: the step has the rows that it kept.
OpCost cost_of(const KeepLogitRowsOp& op, const Step& step) {
  OpCost cost;
  for (const BufferId id : op.buffers) cost.activation_bytes += 2 * bytes_of(id, step);
  return cost;
}

/// Adds what a site of an adapter costs: its bytes, and its products for `rows` rows.
void add_adapter_bytes(const LinearOp& op, const DeviceSite& site, std::int64_t in_size, DType dtype,
                       OpCost* cost) {
  cost->adapter_bytes += as_count(panel_bytes(dtype, site.total_rank, in_size));
  for (std::size_t i = 0; i < op.parts.size(); ++i) {
    const DevicePart& part = site.parts[i];
    if (part.rank == 0) continue;
    const std::int64_t out_size = op.parts[i].weight.n;
    cost->adapter_bytes += as_count(panel_bytes(dtype, out_size, part.rank));
    if (part.magnitude != nullptr) cost->adapter_bytes += out_size * static_cast<std::int64_t>(sizeof(float));
  }
}

void add_adapter_flops(const LinearOp& op, const DeviceSite& site, std::int64_t in_size, std::int64_t rows,
                       OpCost* cost) {
  std::int64_t multiply_adds = site.total_rank * in_size;
  for (std::size_t i = 0; i < op.parts.size(); ++i)
    multiply_adds += site.parts[i].rank * op.parts[i].weight.n;
  cost->adapter_flops += 2 * rows * multiply_adds;
}

OpCost cost_of(const LinearOp& op, const Step& step) {
  OpCost cost;
  std::int64_t weights = 0;
  for (const auto& part : op.parts) {
    cost.weight_bytes += as_count(part.weight.bytes()) + bytes_of(part.bias);
    weights += part.weight.n * part.weight.k;
  }
  cost.flops = 2 * step.rows * weights;
  const std::int64_t times_output = op.epilogue == LinearEpilogue::kAdd ? 2 : 1;
  cost.activation_bytes = bytes_of(op.input, step) + times_output * bytes_of(op.output, step);
  if (op.lora_site < 0) return cost;
  const std::int64_t in_size = step.buffer(op.input).width;
  std::set<const DeviceAdapter*> read;
  for (const auto& group : step.groups) {
    const DeviceSite& site = group.adapter->sites[static_cast<std::size_t>(op.lora_site)];
    if (site.total_rank == 0) continue;
    if (read.insert(group.adapter).second) {
      add_adapter_bytes(op, site, in_size, step.program.lora.dtype, &cost);
    }
    add_adapter_flops(op, site, in_size, group.end - group.begin, &cost);
  }
  return cost;
}

}  // namespace

OpCost cost_of(const Op& op, const Step& step) {
  return std::visit([&](const auto& found) { return cost_of(found, step); }, op);
}

}  // namespace adaptrt
