// Minimum bytes and multiplications of each op: the formulas for OpCost.

#include <algorithm>
#include <set>
#include <span>
#include <utility>
#include <variant>

#include "adaptrt/lora/stored_matrix.h"
#include "measure/step_recorder.h"

namespace adaptrt {
namespace {

std::int64_t as_count(std::size_t bytes) {
  return static_cast<std::int64_t>(bytes);
}

std::int64_t num_bytes(const VectorView& vector) {
  return vector.size * static_cast<std::int64_t>(sizeof(float));
}

/// Bytes of a buffer's rows in the current section.
std::int64_t num_bytes(BufferId id, const CpuContext& context, const Step& step) {
  const Buffer& buffer = context.buffer(id);
  return step.rows * buffer.width * as_count(size_of(buffer.dtype));
}

OpCost cost_of(const RmsNormOp& op, const CpuContext& context, const Step& step) {
  const Buffer& input = context.buffer(op.input);
  return {.weight_bytes = num_bytes(op.weight) + num_bytes(op.sum_scale),
          .activation_bytes = step.rows * input.width * as_count(size_of(input.dtype)) +
                              (op.add ? 2 : 1) * num_bytes(op.output, context, step)};
}

OpCost cost_of(const LayerNormOp& op, const CpuContext& context, const Step& step) {
  OpCost cost{.weight_bytes = num_bytes(op.weight) + num_bytes(op.bias),
              .activation_bytes = num_bytes(op.input, context, step) + num_bytes(op.output, context, step)};
  if (op.lora_site < 0) return cost;
  std::set<const DeviceAdapter*> read;
  for (const auto& group : step.groups) {
    const DeviceSite& site = group.adapter->sites[static_cast<std::size_t>(op.lora_site)];
    if (site.total_rank > 0 && read.insert(group.adapter).second) cost.adapter_bytes += num_bytes(op.bias);
  }
  return cost;
}

OpCost cost_of(const CastOp& op, const CpuContext& context, const Step& step) {
  return {.activation_bytes = num_bytes(op.input, context, step) + num_bytes(op.output, context, step)};
}

OpCost cost_of(const RopeTableOp& op, const CpuContext& context, const Step& step) {
  return {.weight_bytes = num_bytes(op.inverse_frequencies),
          .activation_bytes = num_bytes(op.cosine, context, step) + num_bytes(op.sine, context, step)};
}

OpCost cost_of(const AttentionOp& op, const CpuContext& context, const Step& step) {
  const bool is_causal = op.kind == AttentionKind::kCausal;
  const auto first_visible = [&](std::int64_t position) {
    if (op.chunk != 0) return position - position % op.chunk;
    return op.sliding_window == 0 ? 0 : std::max<std::int64_t>(0, position + 1 - op.sliding_window);
  };
  std::int64_t keys_to_read = 0;
  std::int64_t keys_to_score = 0;
  for (std::int64_t sequence = 0; sequence < step.num_sequences(); ++sequence) {
    const auto* offsets = step.input.sequence_offsets.data() + sequence;
    const auto* positions = step.input.positions.data();
    if (offsets[0] == offsets[1]) continue;
    if (!is_causal) {
      const std::int64_t tokens = offsets[1] - offsets[0];
      const std::int64_t most = op.sliding_window == 0 ? tokens : 2 * op.sliding_window - 1;
      keys_to_read += tokens;
      keys_to_score += tokens * std::min(tokens, most);
      continue;
    }
    keys_to_read += positions[offsets[1] - 1] + 1 - first_visible(positions[offsets[0]]);
    for (auto token = offsets[0]; token < offsets[1]; ++token) {
      keys_to_score += positions[token] + 1 - first_visible(positions[token]);
    }
  }
  const KvLayer& layer =
      is_causal ? context.kv_pool.layer(op.kv_layer()) : context.step_local_kv.layer_like(op.shape);
  const std::int64_t key_and_value_bytes = as_count(layer.token_bytes);
  const std::int64_t keys_to_write = op.shared_layer < 0 ? step.num_tokens() : 0;
  return {.weight_bytes = num_bytes(op.query_norm) + num_bytes(op.key_norm) + num_bytes(op.value_norm) +
                          num_bytes(op.position_bias) + num_bytes(op.sinks),
          .kv_bytes = (keys_to_read + keys_to_write) * key_and_value_bytes,
          .activation_bytes = num_bytes(op.qkv, context, step) + num_bytes(op.cosine, context, step) +
                              num_bytes(op.sine, context, step) + num_bytes(op.output, context, step),
          .flops = keys_to_score * 4 * op.shape.query_size()};
}

OpCost cost_of(const AllReduceOp& op, const CpuContext& context, const Step& step) {
  const std::int64_t times_output = op.add ? 2 : 1;
  return {.activation_bytes =
              num_bytes(op.input, context, step) + times_output * num_bytes(op.output, context, step)};
}

OpCost cost_of(const AllHeadsNormOp& op, const CpuContext& /*context*/, const Step& step) {
  const std::int64_t normed = op.query_norm.size + op.key_norm.size;
  return {.weight_bytes = num_bytes(op.query_norm) + num_bytes(op.key_norm),
          .activation_bytes = 2 * step.rows * normed * static_cast<std::int64_t>(sizeof(float))};
}

OpCost cost_of(const GatherOp& op, const CpuContext& context, const Step& step) {
  return {.activation_bytes = num_bytes(op.input, context, step) + num_bytes(op.output, context, step)};
}

OpCost cost_of(const ReceiveOp& op, const CpuContext& context, const Step& step) {
  return {.activation_bytes = num_bytes(op.output, context, step)};
}

OpCost cost_of(const SendOp& op, const CpuContext& context, const Step& step) {
  return {.activation_bytes = num_bytes(op.input, context, step)};
}

OpCost cost_of(const BroadcastOp& op, const CpuContext& context, const Step& step) {
  return {.activation_bytes = num_bytes(op.buffer, context, step)};
}

/// Called after the op, when the step has only the rows that the op kept.
OpCost cost_of(const KeepLogitRowsOp& op, const CpuContext& context, const Step& step) {
  OpCost cost;
  for (const BufferId id : op.buffers) cost.activation_bytes += 2 * num_bytes(id, context, step);
  return cost;
}

/// Adds the bytes of an adapter's site in the linear layer with these parts.
void add_adapter_bytes(std::span<const LinearPart> parts, const DeviceSite& site, const LoraSite& place,
                       DType dtype, OpCost* cost) {
  const auto add = [&](const StoredMatrix& matrix) { cost->adapter_bytes += as_count(matrix.bytes()); };
  add({site.a, site.a_storage, dtype, place.rows_of_a(site.total_rank).count, parts[0].weight.k});
  if (site.rank_scales != nullptr) cost->adapter_bytes += site.total_rank * as_count(sizeof(float));
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const DevicePart& part = site.parts[i];
    if (part.rank == 0) continue;
    const std::int64_t out_size = parts[i].weight.n;
    add({part.b, part.b_storage, dtype, place.rows_of_b(out_size).count, part.rank});
    for (const float* vector : {part.magnitude, part.shift}) {
      if (vector != nullptr) cost->adapter_bytes += out_size * static_cast<std::int64_t>(sizeof(float));
    }
  }
}

/// Adds the adapter's products for `rows` rows.
void add_adapter_flops(std::span<const LinearPart> parts, const DeviceSite& site, const LoraSite& place,
                       std::int64_t rows, OpCost* cost) {
  std::int64_t multiply_adds = place.rows_of_a(site.total_rank).count * parts[0].weight.k;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    multiply_adds += site.parts[i].rank * place.rows_of_b(parts[i].weight.n).count;
  }
  cost->adapter_flops += 2 * rows * multiply_adds;
}

/// Adds the cost of lm_head's product with the rows of adapters' new tokens.
void add_new_tokens(const CpuContext& context, const Step& step, OpCost* cost) {
  const std::int32_t number = new_tokens_site(context.program.lora);
  if (number < 0) return;
  const std::int64_t inputs = context.program.lora_site(number).in_size;
  std::set<const DeviceAdapter*> read;
  for (const auto& group : step.groups) {
    const DeviceSite& site = group.adapter->sites[static_cast<std::size_t>(number)];
    if (read.insert(group.adapter).second) {
      cost->adapter_bytes += as_count(panel_bytes(context.program.lora.dtype, site.total_rank, inputs));
    }
    cost->adapter_flops += 2 * (group.end - group.begin) * site.total_rank * inputs;
  }
}

/// Adds the cost of a linear layer's weights, for `rows` rows.
void add_weights(std::span<const LinearPart> parts, std::int64_t rows, OpCost* cost) {
  for (const LinearPart& part : parts) {
    // Rows or columns after the panels are read instead of the panels.
    cost->weight_bytes +=
        as_count(part.weight.bytes()) / (part.weight.is_stored_twice() ? 2 : 1) + num_bytes(part.bias);
    cost->flops += 2 * rows * part.weight.n * part.weight.k;
  }
}

/// Subtracts the weights of the gate and the last part that a sparse layer did not read. They are known only
/// after the op.
void take_off_unread(const LinearOp& op, const CpuContext& context, const Step& step, OpCost* cost) {
  const LinearScratch& scratch = context.memory.linear;
  const PanelMatrix& weight = op.parts.back().weight;
  const std::int64_t outputs = scratch.outputs_read.value_or(weight.n);
  const std::int64_t inputs = scratch.inputs_read.value_or(weight.k);
  const std::int64_t of_gate = (weight.n - scratch.gates_read.value_or(weight.n)) * weight.k;
  const std::int64_t unread = weight.n * weight.k - outputs * inputs + of_gate;
  cost->weight_bytes -= unread * as_count(size_of(weight.dtype));
  cost->flops -= 2 * step.rows * unread;
}

OpCost cost_of(const EmbeddingOp& op, const CpuContext& context, const Step& step) {
  const auto row_bytes_of = [](const PanelMatrix& table) {
    return table.n == 0 ? 0 : as_count(table.bytes()) / table.n;
  };
  OpCost cost{.weight_bytes =
                  step.rows * (row_bytes_of(op.table) + row_bytes_of(op.positions) + row_bytes_of(op.types)),
              .activation_bytes = num_bytes(op.output, context, step)};
  if (op.lora_site < 0) return cost;
  const LinearPart whole{.weight = {.n = op.table.k, .k = 1}, .bias = {}};  // A: one column per token
  const std::int64_t row_bytes = row_bytes_of(op.table);
  std::set<const DeviceSite*> read;
  for (const auto& group : step.groups) {
    for (std::int64_t row = group.begin; row < group.end; ++row) {
      const std::int64_t token = step.input.token_ids[static_cast<std::size_t>(row)];
      if (token >= op.table.n) {  // a token that the adapter adds
        cost.weight_bytes -= row_bytes;
        cost.adapter_bytes += row_bytes;
        continue;
      }
      const std::int64_t slice = token / kVocabularySlice;
      const DeviceSite& site = group.adapter->sites[static_cast<std::size_t>(op.lora_site + slice)];
      if (site.total_rank == 0) continue;
      cost.adapter_flops += 2 * op.table.k * site.total_rank;
      if (read.insert(&site).second) {
        add_adapter_bytes({&whole, 1}, site, context.program.lora_site(op.lora_site), op.table.dtype, &cost);
      } else {
        cost.adapter_bytes += site.total_rank * as_count(size_of(op.table.dtype));
      }
    }
  }
  return cost;
}

OpCost cost_of(const LinearOp& op, const CpuContext& context, const Step& step) {
  OpCost cost;
  add_weights(op.parts, step.rows, &cost);
  take_off_unread(op, context, step, &cost);
  const std::int64_t times_output = op.epilogue == LinearEpilogue::kAdd ? 2 : 1;
  cost.activation_bytes =
      num_bytes(op.input, context, step) + times_output * num_bytes(op.output, context, step);
  if (op.scores != kNoBuffer) cost.activation_bytes += num_bytes(op.scores, context, step);
  if (op.output == context.program.logits) add_new_tokens(context, step, &cost);
  if (op.lora_site < 0) return cost;
  std::set<const DeviceAdapter*> read;
  const LoraSite& place = context.program.lora_site(op.lora_site);
  for (const auto& group : step.groups) {
    const DeviceSite& site = group.adapter->sites[static_cast<std::size_t>(op.lora_site)];
    if (site.total_rank == 0) continue;
    if (read.insert(group.adapter).second) {
      add_adapter_bytes(op.parts, site, place, context.program.lora.dtype, &cost);
    }
    add_adapter_flops(op.parts, site, place, group.end - group.begin, &cost);
  }
  return cost;
}

/// Cost of the experts that the op's rows chose. They are known only after the op.
OpCost cost_of(const ExpertsOp& op, const CpuContext& context, const Step& step) {
  OpCost cost{.activation_bytes = num_bytes(op.input, context, step) +
                                  num_bytes(op.router_logits, context, step) +
                                  2 * num_bytes(op.output, context, step)};
  const TakenExperts& taken = context.memory.experts.taken;
  const auto gate_up_of = [&](std::size_t expert) { return std::span(op.gate_up).subspan(2 * expert, 2); };
  const auto down_of = [&](std::size_t expert) { return std::span(op.down).subspan(expert, 1); };
  for (std::size_t expert = 0; expert < taken.rows.size(); ++expert) {
    if (taken.rows[expert] == 0) continue;
    add_weights(gate_up_of(expert), taken.rows[expert], &cost);
    add_weights(down_of(expert), taken.rows[expert], &cost);
  }
  std::set<std::pair<std::size_t, const DeviceAdapter*>> read;
  for (const TakenExperts::Adapted& adapted : taken.adapted) {
    const bool is_first = read.insert({adapted.expert, adapted.adapter}).second;
    const auto add = [&](std::span<const LinearPart> parts, std::int32_t first_site) {
      const DeviceSite& site = adapted.adapter->sites[static_cast<std::size_t>(first_site) + adapted.expert];
      if (site.total_rank == 0) return;
      const LoraSite& place = context.program.lora_site(first_site);
      if (is_first) add_adapter_bytes(parts, site, place, context.program.lora.dtype, &cost);
      add_adapter_flops(parts, site, place, adapted.rows, &cost);
    };
    add(gate_up_of(adapted.expert), op.gate_up_site);
    add(down_of(adapted.expert), op.down_site);
  }
  return cost;
}

OpCost cost_of(const CrossKeysOp& op, const CpuContext& context, const Step& step) {
  return {.kv_bytes = step.rows * as_count(context.cross_pool.layer(op.layer).token_bytes),
          .activation_bytes = num_bytes(op.kv, context, step)};
}

OpCost cost_of(const CrossAttentionOp& op, const CpuContext& context, const Step& step) {
  std::int64_t keys_to_read = 0;
  std::int64_t keys_to_score = 0;
  for (std::int64_t sequence = 0; sequence < step.num_sequences(); ++sequence) {
    const auto* offsets = step.input.sequence_offsets.data() + sequence;
    const std::int64_t keys = step.input.encoder_lengths[static_cast<std::size_t>(sequence)];
    keys_to_read += keys;
    keys_to_score += (offsets[1] - offsets[0]) * keys;
  }
  return {.kv_bytes = keys_to_read * as_count(context.cross_pool.layer(op.layer).token_bytes),
          .activation_bytes = num_bytes(op.q, context, step) + num_bytes(op.output, context, step),
          .flops = keys_to_score * 4 * op.shape.query_size()};
}

OpCost cost_of(const SigmoidGateOp& op, const CpuContext& context, const Step& step) {
  const std::int64_t gates =
      step.rows * context.buffer(op.output).width * static_cast<std::int64_t>(sizeof(float));
  return {.activation_bytes = gates + 2 * num_bytes(op.output, context, step)};
}

OpCost cost_of(const GatedColumnsOp& op, const CpuContext& context, const Step& step) {
  return {.activation_bytes = 2 * num_bytes(op.gate, context, step) + num_bytes(op.output, context, step)};
}

OpCost cost_of(const AddGivenColumnsOp& op, const CpuContext& context, const Step& step) {
  const auto given = static_cast<std::int64_t>(step.input.prompt_embedding_rows.size());
  return {.activation_bytes = 3 * given * context.buffer(op.output).width * as_count(sizeof(float))};
}

OpCost cost_of(const JoinNeighboursOp& op, const CpuContext& context, const Step& step) {
  return {.activation_bytes = num_bytes(op.input, context, step) + num_bytes(op.output, context, step)};
}

OpCost cost_of(const JoinColumnsOp& op, const CpuContext& context, const Step& step) {
  return {.activation_bytes = 2 * num_bytes(op.output, context, step)};
}

OpCost cost_of(const GatedRmsNormOp& op, const CpuContext& context, const Step& step) {
  return {.weight_bytes = num_bytes(op.weight),
          .activation_bytes = 2 * num_bytes(op.input, context, step) + num_bytes(op.output, context, step)};
}

OpCost cost_of(const CausalConvolutionOp& op, const CpuContext& /*context*/, const Step& step) {
  const std::int64_t floats = step.rows * op.width() + step.num_sequences() * op.state_size();
  return {.weight_bytes = num_bytes(op.weight),
          .activation_bytes = 2 * floats * static_cast<std::int64_t>(sizeof(float)),
          .flops = 2 * step.rows * op.weight.size};
}

OpCost cost_of(const SelectiveScanOp& op, const CpuContext& context, const Step& step) {
  const std::int64_t state = op.shape.state_size();
  const std::int64_t state_bytes =
      2 * step.num_sequences() * state * static_cast<std::int64_t>(sizeof(float));
  const std::int64_t inputs = step.rows *
                              (op.shape.value_size() + 2 * op.shape.group_size() + op.shape.num_heads) *
                              static_cast<std::int64_t>(sizeof(float));
  return {.weight_bytes = num_bytes(op.log_decay) + num_bytes(op.time_bias) + num_bytes(op.skip),
          .activation_bytes = state_bytes + inputs + num_bytes(op.output, context, step),
          .flops = 5 * step.rows * state};
}

OpCost cost_of(const XieluOp& op, const CpuContext& context, const Step& step) {
  return {.activation_bytes = num_bytes(op.input, context, step) + num_bytes(op.output, context, step)};
}

OpCost cost_of(const GatedConvolutionOp& op, const CpuContext& context, const Step& step) {
  const std::int64_t state_bytes =
      2 * step.num_sequences() * op.state_size() * static_cast<std::int64_t>(sizeof(float));
  return {.weight_bytes = num_bytes(op.weight) + num_bytes(op.bias),
          .activation_bytes =
              state_bytes + num_bytes(op.input, context, step) + num_bytes(op.output, context, step),
          .flops = 2 * step.rows * (op.weight.size + op.width())};
}

OpCost cost_of(const GatedDeltaOp& op, const CpuContext& context, const Step& step) {
  const std::int64_t state = op.shape.state_size();
  const std::int64_t state_bytes =
      2 * step.num_sequences() * state * static_cast<std::int64_t>(sizeof(float));
  const std::int64_t inputs = step.rows * (2 * op.shape.key_size() + op.shape.value_size()) *
                              static_cast<std::int64_t>(sizeof(float));
  return {.weight_bytes = num_bytes(op.log_decay) + num_bytes(op.time_bias),
          .activation_bytes =
              state_bytes + inputs + num_bytes(op.gates, context, step) + num_bytes(op.output, context, step),
          .flops = 7 * step.rows * state};
}

/// Cost of each head's product, and of what adapters add to it.
OpCost cost_of_heads(const std::vector<LinearPart>& heads, std::int32_t first_site, const CpuContext& context,
                     const Step& step) {
  OpCost cost;
  add_weights(heads, step.rows, &cost);
  if (first_site < 0) return cost;
  const LoraSite& place = context.program.lora_site(first_site);
  std::set<const DeviceAdapter*> read;
  for (const auto& group : step.groups) {
    const bool is_first = read.insert(group.adapter).second;
    for (std::size_t head = 0; head < heads.size(); ++head) {
      const DeviceSite& site = group.adapter->sites[static_cast<std::size_t>(first_site) + head];
      if (site.total_rank == 0) continue;
      const auto part = std::span(heads).subspan(head, 1);
      if (is_first) add_adapter_bytes(part, site, place, context.program.lora.dtype, &cost);
      add_adapter_flops(part, site, place, group.end - group.begin, &cost);
    }
  }
  return cost;
}

OpCost cost_of(const LatentQueriesOp& op, const CpuContext& context, const Step& step) {
  OpCost cost = cost_of_heads(op.keys, op.lora_site, context, step);
  cost.weight_bytes += num_bytes(op.norm);
  cost.activation_bytes = num_bytes(op.queries, context, step) + num_bytes(op.rows, context, step) +
                          num_bytes(op.output, context, step);
  return cost;
}

OpCost cost_of(const LatentValuesOp& op, const CpuContext& context, const Step& step) {
  OpCost cost = cost_of_heads(op.values, op.lora_site, context, step);
  cost.activation_bytes = num_bytes(op.input, context, step) + num_bytes(op.output, context, step);
  return cost;
}

OpCost cost_of(const GatedAddOp& op, const CpuContext& context, const Step& step) {
  return {.activation_bytes = num_bytes(op.input, context, step) + num_bytes(op.gate, context, step) +
                              2 * num_bytes(op.output, context, step)};
}

}  // namespace

OpCost cost_of(const Op& op, const CpuContext& context, const Step& step) {
  return std::visit([&](const auto& found) { return cost_of(found, context, step); }, op);
}

}  // namespace adaptrt
