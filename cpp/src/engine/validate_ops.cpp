// What each kind of op must be.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "adaptrt/kernels/attention_tile.h"
#include "matrix_storage.h"
#include "validator.h"

namespace adaptrt {

void Validator::check_vector(std::string_view name, const VectorView& vector, std::int64_t size) {
  if (vector.size != size || (size > 0 && vector.data == nullptr)) {
    add(where_ + ": " + std::string(name) + " has " + text(vector.size) + " elements; it must have " +
        text(size));
  }
}

void Validator::check_optional_vector(std::string_view name, const VectorView& vector, std::int64_t size) {
  if (vector.size != 0) check_vector(name, vector, size);
}

void Validator::check_matrix(std::string_view name, const PanelMatrix& matrix, std::int64_t n, std::int64_t k,
                             MatrixAccess access) {
  if (matrix.dtype != program_.dtype) {
    add(where_ + ": " + std::string(name) + " is " + std::string(name_of(matrix.dtype)) + ", the program " +
        std::string(name_of(program_.dtype)));
  }
  if (matrix.n != n || matrix.k != k) {
    add(where_ + ": " + std::string(name) + " is [" + text(matrix.n) + ", " + text(matrix.k) +
        "]; it must be [" + text(n) + ", " + text(k) + "]");
  }
  if (matrix.data == nullptr) add(where_ + ": " + std::string(name) + " has no data");
  if (matrix.has_rows && access != MatrixAccess::kSomeOutputs) {
    add(where_ + ": " + std::string(name) + " has rows, which only what a ReLU gates can have");
  }
  if (matrix.has_columns && access != MatrixAccess::kSomeInputs) {
    add(where_ + ": " + std::string(name) + " has columns, which only one layer of a sparse input can have");
  }
  for (std::string& problem : problems_of_storage(matrix)) {
    add(where_ + ": " + std::string(name) + " " + std::move(problem));
  }
}

void Validator::check_finite(std::string_view name, float value, float low) {
  if (!std::isfinite(value) || value < low) {
    add(where_ + ": " + std::string(name) + " is " + std::to_string(value) +
        "; it must be finite and at least " + std::to_string(low));
  }
}

void Validator::all_tokens_only() {
  if (rows_ == RowKind::kLogits) add(where_ + ": belongs in the body");
  if (has_logit_rows_) add(where_ + ": belongs before the op that keeps rows of logits alone");
}

void Validator::check(const EmbeddingOp& op) {
  all_tokens_only();
  const Buffer* output = operand("output", op.output, DType::kFloat32, rows_);
  const std::int64_t width = op.table.k;
  check_matrix("the table", op.table, program_.vocab_size, width);
  if (op.table.quantization.algo != QuantAlgo::kNone || op.table.is_compressed()) {
    add(where_ + ": the table is quantised or compressed, which only linear layers can be");
  }
  check_width("output", output, width);
  check_finite("scale", op.scale, 0.0F);
  if (op.positions.n != 0 || op.positions.data != nullptr) {
    check_matrix("the positions' table", op.positions, op.positions.n, width);
    const bool is_encoder = rows_ == RowKind::kEncoderTokens;
    check_range_(where_ + ": learned positions", op.positions.n,
                 is_encoder ? program_.max_encoder_input_len : program_.max_seq_len, kSizeLimit - 1);
    if (op.positions.quantization.algo != QuantAlgo::kNone || op.positions.is_compressed()) {
      add(where_ + ": the positions' table is quantised or compressed, which only linear layers can be");
    }
  }
  if (op.types.n != 0 || op.types.data != nullptr) {
    check_matrix("the token types' table", op.types, op.types.n, width);
    check_range_(where_ + ": token types", op.types.n, 1, kSizeLimit - 1);
    if (op.types.quantization.algo != QuantAlgo::kNone || op.types.is_compressed()) {
      add(where_ + ": the token types' table is quantised or compressed, which only linear layers can be");
    }
  }
  if (op.lora_site != -1) check_slices(op.lora_site, LoraModule::kEmbedding, {op.table.n, op.table.k});
  check_new_tokens(width);
  write(op.output);
}

void Validator::check(const RopeTableOp& op) {
  all_tokens_only();
  const std::int64_t half = op.inverse_frequencies.size;
  if (op.inverse_frequencies.data == nullptr || half < 1 || half >= kSizeLimit) {
    add(where_ + ": there are " + text(half) + " inverse_frequencies; there must be at least one");
  }
  check_finite("attention_scaling", op.attention_scaling, 0.0F);
  if (op.kind == RopeKind::kDynamic) {
    check_finite("base", op.base, 1.0F);
    check_finite("factor", op.factor, 1.0F);
    if (half < 2) add(where_ + ": dynamic frequencies need at least two of them");
    check_range_(where_ + ": original_max_position", op.original_max_position, 1, 1 << 30);
  } else if (op.kind == RopeKind::kLong) {
    check_vector("long_inverse_frequencies", op.long_inverse_frequencies, half);
    check_range_(where_ + ": original_max_position", op.original_max_position, 1, 1 << 30);
  } else if (op.kind != RopeKind::kStatic) {
    add(where_ + ": the kind is unknown");
  }
  check_width("cosine", operand("cosine", op.cosine, DType::kFloat32, rows_), half);
  check_width("sine", operand("sine", op.sine, DType::kFloat32, rows_), half);
  if (op.cosine == op.sine) add(where_ + ": cosine and sine are one buffer");
  write(op.cosine);
  write(op.sine);
}

void Validator::check(const RmsNormOp& op) {
  if (op.gather_logit_rows && rows_ != RowKind::kLogits)
    add(where_ + ": gathers logit rows outside the head");
  const RowKind input_rows = op.gather_logit_rows ? RowKind::kTokens : rows_;
  const auto* input = operand("input", op.input, DType::kFloat32, input_rows);
  const DType output_type = op.add ? DType::kFloat32 : activation_dtype(program_.dtype);
  const auto* output = operand("output", op.output, output_type, rows_);
  if (input != nullptr) {
    check_width("output", output, input->width);
    check_vector("the weight", op.weight, input->width);
  }
  if (op.add && (op.gather_logit_rows || rows_ == RowKind::kLogits)) add(where_ + ": adds outside the body");
  if (op.add && op.input == op.output) add(where_ + ": input and output are one buffer");
  check_finite("epsilon", op.epsilon, 0.0F);
  read(op.input);
  if (op.add) {
    read(op.output);
  } else {
    write(op.output);
  }
}

void Validator::check(const AttentionOp& op) {
  all_tokens_only();
  const AttentionShape& shape = op.shape;
  if (op.kind > AttentionKind::kBidirectional) add(where_ + ": the kind is unknown");
  const bool is_encoder = rows_ == RowKind::kEncoderTokens;
  if (is_encoder && op.kind != AttentionKind::kBidirectional) {
    add(where_ + ": an encoder's attention is bidirectional");
  }
  if (!is_encoder) (op.kind == AttentionKind::kBidirectional ? sees_behind_ : sees_before_) = true;
  use_layer(op.layer, is_encoder ? &encoder_layer_users_ : &layer_users_);
  const auto* qkv = operand("qkv", op.qkv, DType::kFloat32, rows_);
  const auto* cosine = operand("cosine", op.cosine, DType::kFloat32, rows_);
  const auto* sine = operand("sine", op.sine, DType::kFloat32, rows_);
  const auto* output = operand("output", op.output, activation_dtype(program_.dtype), rows_);
  const Problems of_shape = problems_of_shape(shape);
  problems_.add_all(where_ + ": ", of_shape);
  if (of_shape.empty()) {
    if (op.kind == AttentionKind::kCausal) add_kv_bytes(shape);
    check_width("qkv", qkv, shape.query_size() + 2 * shape.key_value_size());
    check_width("output", output, shape.query_size());
    const bool of_heads = op.query_norm.size == shape.head_dim || op.key_norm.size == shape.head_dim;
    // Of each head or of all together; where there is one key-value head, its norm is both.
    const auto check_norm = [&](std::string_view name, const VectorView& norm, std::int64_t all) {
      check_optional_vector(name, norm, norm.size == shape.head_dim ? norm.size : all);
    };
    check_norm("query_norm", op.query_norm, shape.query_size());
    check_norm("key_norm", op.key_norm, shape.key_value_size());
    check_optional_vector("sinks", op.sinks, shape.num_attention_heads);
    if (op.interleaved && of_heads) add(where_ + ": interleaved heads have a norm of their own");
    const std::int64_t biases = op.position_bias.size / shape.num_attention_heads;
    if (op.position_bias.size != 0 && (biases % 2 == 0 || op.position_bias.data == nullptr ||
                                       biases * shape.num_attention_heads != op.position_bias.size)) {
      add(where_ + ": position_bias has " + text(op.position_bias.size) +
          " elements; it must have an odd number for each of " + text(shape.num_attention_heads) + " heads");
    }
  }
  if (cosine != nullptr) {
    check_width("sine", sine, cosine->width);
    if (cosine->width > shape.head_dim / 2) add(where_ + ": cosine is wider than head_dim / 2");
  }
  check_finite("norm_epsilon", op.norm_epsilon, 0.0F);
  check_finite("scale", op.scale, 0.0F);
  check_range_(where_ + ": sliding_window", op.sliding_window, 0, kSizeLimit - 1);
  check_finite("softcap", op.softcap, 0.0F);
  read(op.qkv);
  read(op.cosine);
  read(op.sine);
  write(op.output);
}

void Validator::add_kv_bytes(const AttentionShape& shape) {
  // No element takes more than a float32, with its share of the scales.
  const auto layer = product({2, whole_groups(program_.tokens_per_block), shape.num_key_value_heads,
                              whole_groups(shape.head_dim), 4});
  std::size_t sum = 0;
  const bool fits = layer && kv_block_bytes_ && !__builtin_add_overflow(*kv_block_bytes_, *layer, &sum);
  kv_block_bytes_ = fits ? std::optional(sum) : std::nullopt;
}

void Validator::check_scores(const LinearOp& op) {
  const Buffer* scores = operand("scores", op.scores, DType::kFloat32, rows_);
  if (!has_relu(op.epilogue)) {
    add(where_ + ": has scores without a ReLU");
  } else if (!op.parts.empty()) {
    check_width("scores", scores, op.parts[0].weight.n);
  }
  if (op.scale != 1.0F || op.softcap != 0.0F) add(where_ + ": has scores, and a scale or a softcap");
  if (!std::isfinite(op.least_score)) add(where_ + ": least_score is not finite");
  if (op.scores == op.output) add(where_ + ": scores and output are one buffer");
}

void Validator::check_neurons(const LinearOp& op) {
  const NeuronTable& neurons = op.neurons;
  const bool is_gated = is_relu_gated(op.epilogue);
  if (rows_ != RowKind::kTokens) add(where_ + ": has neurons outside the body");
  if (!is_gated && !op.has_sparse_input) {
    add(where_ + ": has neurons, and neither a ReLU's gate nor a sparse input");
  }
  if (op.scores != kNoBuffer) add(where_ + ": has both neurons and scores");
  if (op.scale != 1.0F || op.softcap != 0.0F) add(where_ + ": has neurons, and a scale or a softcap");
  if (neurons.data == nullptr) add(where_ + ": its neurons have no data");
  if (neurons.dtype != program_.dtype) {
    add(where_ + ": its neurons are " + std::string(name_of(neurons.dtype)) + ", the program " +
        std::string(name_of(program_.dtype)));
  }
  if (op.parts.empty()) return;
  const PanelMatrix& weight = op.parts.back().weight;
  const std::int64_t count = is_gated ? weight.n : weight.k;
  const std::int64_t size = is_gated ? weight.k : weight.n;
  if (op.parts.size() != (is_gated ? 2U : 1U) || neurons.count != count || neurons.size != size) {
    add(where_ + ": has " + text(neurons.count) + " neurons of " + text(neurons.size) + "; there must be " +
        text(count) + " of " + text(size) + ", of one layer");
  }
  if (!can_have_neurons(neurons.dtype, neurons.count, neurons.size)) {
    add(where_ + ": has neurons, which layers of " + text(neurons.count) + " and " + text(neurons.size) +
        " of " + std::string(name_of(neurons.dtype)) + " cannot have");
  }
  for (const LinearPart& part : op.parts) {
    if (!part.weight.is_plain()) add(where_ + ": has neurons, and a weight quantised or compressed");
    if (part.weight.has_rows) add(where_ + ": has both neurons and rows");
    if (part.weight.has_columns) add(where_ + ": has both neurons and columns");
  }
}

void Validator::check(const LinearOp& op) {
  const auto* input = operand("input", op.input, activation_dtype(program_.dtype), rows_);
  const bool gated = is_gated(op.epilogue);
  const bool activated = is_activated(op.epilogue);
  if (op.epilogue > LinearEpilogue::kClampedSiluMul) add(where_ + ": the epilogue is unknown");
  const auto* output =
      operand("output", op.output, activated ? activation_dtype(program_.dtype) : DType::kFloat32, rows_);
  check_finite("scale", op.scale, 0.0F);
  check_finite("softcap", op.softcap, 0.0F);
  check_finite("threshold", op.threshold, 0.0F);
  if (op.threshold != 0.0F && !is_relu_gated(op.epilogue))
    add(where_ + ": has a threshold without a ReLU's gate");
  if (op.scores != kNoBuffer) check_scores(op);
  if (!op.neurons.is_empty() || op.neurons.data != nullptr) check_neurons(op);
  check_range_(where_ + ": number of parts", static_cast<std::int64_t>(op.parts.size()), gated ? 2 : 1,
               gated ? 2 : static_cast<std::int64_t>(kMaxPartsPerSite));
  std::int64_t width = 0;
  for (const auto& part : op.parts) {
    check_range_(where_ + ": outputs of a part", part.weight.n, 1, kSizeLimit - 1);
    const bool is_factor = is_relu_gated(op.epilogue) && &part == &op.parts.back();
    const bool has_some_outputs = is_factor || (has_relu(op.epilogue) && op.scores != kNoBuffer);
    const bool has_some_inputs = op.has_sparse_input && !activated && op.parts.size() == 1;
    check_matrix("a weight", part.weight, part.weight.n, input != nullptr ? input->width : part.weight.k,
                 has_some_outputs  ? MatrixAccess::kSomeOutputs
                 : has_some_inputs ? MatrixAccess::kSomeInputs
                                   : MatrixAccess::kAll);
    if (part.weight.has_rows && (op.scale != 1.0F || op.softcap != 0.0F)) {
      add(where_ + ": a weight has rows, where the layer has a scale or a softcap");
    }
    if (op.has_sparse_input && !part.weight.is_plain()) {
      add(where_ + ": the input is sparse, and a weight quantised or compressed");
    }
    if (!(part.weight.quantization == op.parts[0].weight.quantization)) {
      add(where_ + ": its weights are quantised in different ways");
    }
    check_optional_vector("a bias", part.bias, part.weight.n);
    width += std::clamp<std::int64_t>(part.weight.n, 0, kSizeLimit);
    if (gated && part.weight.n != op.parts[0].weight.n) add(where_ + ": the two parts differ in width");
  }
  if (op.output == program_.logits && new_tokens_site(program_.lora) >= 0 && input != nullptr) {
    width += program_.lora.max_extra_tokens;
    ++site_users_[static_cast<std::size_t>(new_tokens_site(program_.lora))];
    check_new_tokens(input->width);
  }
  check_width("output", output, gated && !op.parts.empty() ? op.parts[0].weight.n : width);
  if (rows_ != RowKind::kLogits) {
    check_site(op.lora_site, op.parts);
  } else if (op.lora_site != -1 && !op.parts.empty()) {
    const PanelMatrix& weight = op.parts.front().weight;
    if (op.parts.size() != 1) add(where_ + ": adapters act on one part alone in the head");
    check_slices(op.lora_site, LoraModule::kLmHead, {weight.k, weight.n});
  }
  read(op.input);
  if (op.scores != kNoBuffer) read(op.scores);
  if (op.epilogue == LinearEpilogue::kAdd) {
    read(op.output);
  } else {
    write(op.output);
  }
  if (op.input == op.output) add(where_ + ": input and output are one buffer");
}

DType Validator::norm_type(BufferId output) const {
  const bool is_stream =
      live_.holds(output) && program_.buffers[static_cast<std::size_t>(output)].dtype == DType::kFloat32;
  return is_stream ? DType::kFloat32 : activation_dtype(program_.dtype);
}

void Validator::check(const LayerNormOp& op) {
  if (op.gather_logit_rows && rows_ != RowKind::kLogits) {
    add(where_ + ": gathers logit rows outside the head");
  }
  const RowKind input_rows = op.gather_logit_rows ? RowKind::kTokens : rows_;
  const auto* input = operand("input", op.input, DType::kFloat32, input_rows);
  const auto* output = operand("output", op.output, norm_type(op.output), rows_);
  if (input != nullptr) {
    check_width("output", output, input->width);
    check_vector("the weight", op.weight, input->width);
    check_optional_vector("the bias", op.bias, input->width);
    check_norm_site(op.lora_site, op.bias.size);
  }
  check_finite("epsilon", op.epsilon, 0.0F);
  read(op.input);
  write(op.output);
}

void Validator::check(const CastOp& op) {
  const auto* input = operand("input", op.input, DType::kFloat32, rows_);
  const auto* output = operand("output", op.output, activation_dtype(program_.dtype), rows_);
  if (input != nullptr) check_width("output", output, input->width);
  if (op.input == op.output) add(where_ + ": input and output are one buffer");
  read(op.input);
  write(op.output);
}

void Validator::use_layer(std::int32_t layer, std::vector<std::int32_t>* users) {
  const auto count = static_cast<std::int64_t>(users->size());
  check_range_(where_ + ": layer", layer, 0, std::max<std::int64_t>(1, count) - 1);
  if (layer >= 0 && layer < count) ++(*users)[static_cast<std::size_t>(layer)];
}

void Validator::check(const CrossKeysOp& op) {
  if (rows_ != RowKind::kEncoderTokens) add(where_ + ": belongs in the encoder");
  use_layer(op.layer, &cross_keys_users_);
  const auto* kv = operand("kv", op.kv, DType::kFloat32, RowKind::kEncoderTokens);
  const Problems of_shape = problems_of_shape(op.shape);
  problems_.add_all(where_ + ": ", of_shape);
  if (of_shape.empty()) {
    add_kv_bytes(op.shape);
    check_width("kv", kv, 2 * op.shape.key_value_size());
  }
  const auto layer = static_cast<std::size_t>(std::max(0, op.layer));
  if (layer < cross_shapes_.size()) cross_shapes_[layer] = op.shape;
  read(op.kv);
}

void Validator::check(const CrossAttentionOp& op) {
  all_tokens_only();
  if (rows_ != RowKind::kTokens) add(where_ + ": belongs in the body");
  if (!program_.has_encoder()) add(where_ + ": there is no encoder");
  use_layer(op.layer, &cross_attention_users_);
  const auto layer = static_cast<std::size_t>(std::max(0, op.layer));
  if (layer < cross_shapes_.size() && !(cross_shapes_[layer] == op.shape)) {
    add(where_ + ": has other heads than the keys that the encoder makes for it");
  }
  const auto* q = operand("q", op.q, DType::kFloat32, RowKind::kTokens);
  const auto* output = operand("output", op.output, activation_dtype(program_.dtype), RowKind::kTokens);
  if (problems_of_shape(op.shape).empty()) {
    check_width("q", q, op.shape.query_size());
    check_width("output", output, op.shape.query_size());
  }
  check_finite("scale", op.scale, 0.0F);
  read(op.q);
  write(op.output);
}

void Validator::check(const KeepLogitRowsOp& op) {
  all_tokens_only();
  if (rows_ != RowKind::kTokens) add(where_ + ": belongs in the body");
  has_logit_rows_ = true;
  lost_.assign(lost_.size(), true);
  for (const BufferId id : op.buffers) {
    if (!live_.holds(id)) {
      add(where_ + ": names buffer " + text(id) + " of " + std::to_string(program_.buffers.size()));
      continue;
    }
    const Buffer& buffer = program_.buffers[static_cast<std::size_t>(id)];
    if (buffer.rows != RowKind::kTokens) add(where_ + ": '" + buffer.name + "' has a row a row of logits");
    if (!lost_[static_cast<std::size_t>(id)]) add(where_ + ": names '" + buffer.name + "' twice");
    lost_[static_cast<std::size_t>(id)] = false;
    read(id);
  }
}

void Validator::check(const ExpertsOp& op) {
  const auto* input = operand("input", op.input, activation_dtype(program_.dtype), RowKind::kTokens);
  const auto* logits = operand("router_logits", op.router_logits, DType::kFloat32, RowKind::kTokens);
  const auto* output = operand("output", op.output, DType::kFloat32, RowKind::kTokens);
  if (rows_ != RowKind::kTokens) add(where_ + ": belongs in the body");
  check_range_(where_ + ": number of experts", op.num_experts(), 1, 1 << 16);
  if (op.experts_elsewhere != 0) {
    check_ranks();
    if (!op.stores)
      add(where_ + ": other ranks have experts, and the sum of those here is added to the output");
  }
  check_range_(where_ + ": experts_elsewhere", op.experts_elsewhere, 0, 1 << 16);
  check_range_(where_ + ": first_expert", op.first_expert, 0, std::max(0, op.experts_elsewhere));
  if (!is_gated(op.activation)) add(where_ + ": the activation is not a gated one");
  check_routing(op.routing, op.num_experts());
  check_width("router_logits", logits, op.num_experts());
  if (op.down.empty()) return;
  const std::int64_t inner = op.down.front().weight.k;
  if (op.gate_up.size() != 2 * op.down.size()) {
    add(where_ + ": there are " + std::to_string(op.gate_up.size()) + " gate and up weights for " +
        text(op.num_experts_here()) + " experts; there must be two for each");
    return;
  }
  check_range_(where_ + ": width between the layers", inner, 1, kSizeLimit - 1);
  if (input != nullptr) {
    check_expert_parts("gate_up", op.gate_up, {input->width, inner});
    check_expert_parts("down", op.down, {inner, input->width});
    check_width("output", output, input->width);
  }
  if ((op.gate_up_site < 0) != (op.down_site < 0)) add(where_ + ": adapters act on one of its layers only");
  for (std::int64_t expert = 0; expert < op.num_experts_here() && op.gate_up_site >= 0; ++expert) {
    const auto at = static_cast<std::size_t>(expert);
    check_site(op.gate_up_site + static_cast<std::int32_t>(expert), std::span(op.gate_up).subspan(2 * at, 2));
    check_site(op.down_site + static_cast<std::int32_t>(expert), std::span(op.down).subspan(at, 1));
  }
  read(op.input);
  read(op.router_logits);
  if (op.stores) {
    write(op.output);
  } else {
    read(op.output);
  }
}

void Validator::check_routing(const Routing& routing, std::int64_t num_experts) {
  if (routing.scores > RouterScores::kSoftmaxOfChosen) add(where_ + ": the kind of scores is unknown");
  check_range_(where_ + ": num_groups", routing.num_groups, 1, std::max<std::int64_t>(1, num_experts));
  check_range_(where_ + ": groups_taken", routing.groups_taken, 1, std::max(1, routing.num_groups));
  const std::int64_t groups = std::max(1, routing.num_groups);
  if (num_experts % groups != 0) {
    add(where_ + ": " + text(num_experts) + " experts cannot stand in " + text(groups) + " equal groups");
  }
  check_range_(where_ + ": top_k", routing.top_k, 1,
               std::max<std::int64_t>(1, num_experts / groups * routing.groups_taken));
  check_finite("scale", routing.scale, 0.0F);
  check_optional_vector("the routing's bias", routing.bias, num_experts);
}

void Validator::check_expert_parts(std::string_view name, const std::vector<LinearPart>& parts,
                                   ModuleSizes sizes) {
  for (const LinearPart& part : parts) {
    check_matrix(name, part.weight, sizes.out, sizes.in);
    if (!(part.weight.quantization == parts.front().weight.quantization)) {
      add(where_ + ": weights of its " + std::string(name) + " are quantised in different ways");
    }
    check_optional_vector("a bias", part.bias, sizes.out);
  }
}

void Validator::check(const GatedAddOp& op) {
  const auto* input = operand("input", op.input, DType::kFloat32, rows_);
  const auto* output = operand("output", op.output, DType::kFloat32, rows_);
  check_width("gate", operand("gate", op.gate, DType::kFloat32, rows_), 1);
  if (input != nullptr) check_width("output", output, input->width);
  if (op.input == op.output) add(where_ + ": input and output are one buffer");
  read(op.input);
  read(op.gate);
  read(op.output);
}

void Validator::check_ranks() {
  if (program_.ranks_per_stage() < 2) add(where_ + ": the program has one rank");
}

void Validator::check(const AllReduceOp& op) {
  check_ranks();
  const auto* input = operand("input", op.input, DType::kFloat32, rows_);
  const auto* output = operand("output", op.output, DType::kFloat32, rows_);
  if (input != nullptr) check_width("output", output, input->width);
  if (op.input == op.output) add(where_ + ": input and output are one buffer");
  read(op.input);
  if (live_.holds(op.input)) used_up_[static_cast<std::size_t>(op.input)] = true;
  if (op.add) {
    read(op.output);
  } else {
    write(op.output);
  }
}

void Validator::check(const AllHeadsNormOp& op) {
  check_ranks();
  all_tokens_only();
  if (rows_ != RowKind::kTokens) add(where_ + ": belongs in the body");
  const auto* qkv = operand("qkv", op.qkv, DType::kFloat32, RowKind::kTokens);
  check_range_(where_ + ": query_norm's size", op.query_norm.size, 1, kSizeLimit - 1);
  check_range_(where_ + ": key_norm's size", op.key_norm.size, 1, kSizeLimit - 1);
  check_vector("query_norm", op.query_norm, op.query_norm.size);
  check_vector("key_norm", op.key_norm, op.key_norm.size);
  check_range_(where_ + ": whole_query_size", op.whole_query_size, op.query_norm.size, kSizeLimit - 1);
  check_range_(where_ + ": whole_key_size", op.whole_key_size, op.key_norm.size, kSizeLimit - 1);
  if (qkv != nullptr) check_width("qkv", qkv, op.query_norm.size + 2 * op.key_norm.size);
  check_finite("epsilon", op.epsilon, 0.0F);
  read(op.qkv);
}

void Validator::check(const GatherOp& op) {
  check_ranks();
  const std::int64_t ranks = program_.ranks_per_stage();
  const auto* input = operand("input", op.input, DType::kFloat32, rows_);
  const auto* output = operand("output", op.output, DType::kFloat32, rows_);
  if (input != nullptr && output != nullptr &&
      (output->width > input->width * ranks || output->width <= input->width * (ranks - 1))) {
    add(where_ + ": output is " + text(output->width) + " wide, " + text(ranks) + " inputs of " +
        text(input->width) + " are not");
  }
  read(op.input);
  write(op.output);
}

void Validator::check(const ReceiveOp& op) {
  all_tokens_only();
  if (program_.stage() == 0) add(where_ + ": there is no stage before the first");
  if (rows_ == RowKind::kEncoderTokens && num_broadcasts_ > 0) add(where_ + ": belongs before the broadcast");
  operand("output", op.output, DType::kFloat32, rows_);
  write(op.output);
}

void Validator::check(const SendOp& op) {
  all_tokens_only();
  if (program_.is_last_stage()) add(where_ + ": there is no stage behind the last");
  if (rows_ == RowKind::kEncoderTokens && num_broadcasts_ > 0) add(where_ + ": belongs before the broadcast");
  operand("input", op.input, DType::kFloat32, rows_);
  read(op.input);
}

void Validator::check(const BroadcastOp& op) {
  ++num_broadcasts_;
  if (rows_ != RowKind::kEncoderTokens) add(where_ + ": belongs in the encoder");
  if (op.buffer != program_.encoder_output) add(where_ + ": the buffer is not encoder_output");
  if (!live_.holds(op.buffer)) return;  // which check_encoder_output() says
  if (program_.is_last_stage()) {
    read(op.buffer);
  } else {
    write(op.buffer);
  }
  lost_.assign(lost_.size(), true);
  lost_[static_cast<std::size_t>(op.buffer)] = false;
}

void Validator::check_slices(std::int32_t index, LoraModule module, ModuleSizes sizes) {
  const auto& sites = program_.lora.sites;
  const bool is_lm_head = module == LoraModule::kLmHead;
  const std::int64_t tokens = is_lm_head ? sizes.out : sizes.in;
  const std::int64_t slices =
      (std::clamp<std::int64_t>(tokens, 0, kSizeLimit) + kVocabularySlice - 1) / kVocabularySlice;
  if (index < 0 || index + slices > std::ssize(sites)) {
    add(where_ + ": lora_site is " + text(index) + " and " + text(slices) + " slices of " +
        std::to_string(sites.size()) + " sites");
    return;
  }
  for (std::int64_t slice = 0; slice < slices; ++slice) {
    const auto at = static_cast<std::size_t>(index + slice);
    const LoraSite& site = sites[at];
    const std::int64_t count = std::min(kVocabularySlice, tokens - slice * kVocabularySlice);
    ++site_users_[at];
    const bool fits = site.parts.size() == 1 && site.parts[0].module == module && site.layer == slice &&
                      site.in_size == (is_lm_head ? sizes.in : count) &&
                      site.parts[0].out_size == (is_lm_head ? count : sizes.out);
    if (!fits) {
      add(where_ + ": lora site " + std::to_string(at) + " is not slice " + text(slice) + " of its " +
          std::string(info_of(module).name));
    }
  }
}

void Validator::check_new_tokens(std::int64_t hidden_size) {
  const std::int32_t site = new_tokens_site(program_.lora);
  if (site < 0 || program_.lora_site(site).in_size == hidden_size) return;
  add(where_ + ": the lora site of new tokens is of a hidden size " + text(program_.lora_site(site).in_size) +
      ", the layer of " + text(hidden_size));
}

const LoraSite* Validator::used_site(std::int32_t index) {
  if (index == -1) return nullptr;
  const auto& sites = program_.lora.sites;
  if (index < 0 || static_cast<std::size_t>(index) >= sites.size()) {
    add(where_ + ": lora_site is " + text(index) + " of " + std::to_string(sites.size()));
    return nullptr;
  }
  ++site_users_[static_cast<std::size_t>(index)];
  return &sites[static_cast<std::size_t>(index)];
}

void Validator::check_norm_site(std::int32_t index, std::int64_t width) {
  const LoraSite* site = used_site(index);
  if (site == nullptr) return;
  if (!site->is_norm() || site->in_size != 1 || site->parts[0].out_size != width) {
    add(where_ + ": its lora_site " + text(index) + " is not that of a norm with a bias of " + text(width));
  }
}

void Validator::check_site(std::int32_t index, std::span<const LinearPart> parts) {
  const LoraSite* found = used_site(index);
  if (found == nullptr) return;
  const LoraSite& site = *found;
  if (site.parts.size() != parts.size()) {
    add(where_ + ": has " + std::to_string(parts.size()) + " parts, its lora_site " +
        std::to_string(site.parts.size()));
    return;
  }
  for (std::size_t i = 0; i < site.parts.size(); ++i) {
    if (site.parts[i].out_size != parts[i].weight.n || site.in_size != parts[i].weight.k) {
      add(where_ + ": part " + std::to_string(i) + " and its lora_site differ in size");
    }
  }
}

}  // namespace adaptrt
