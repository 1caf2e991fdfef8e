// Validates linear layers, and experts, which consist of them.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "validator.h"

namespace adaptrt {

void Validator::check(const LinearOp& op) {
  const auto* input = operand("input", op.input, program_.activation_type(), rows_);
  const bool gated = is_gated(op.epilogue);
  const bool activated = is_activated(op.epilogue);
  if (op.epilogue > kLastLinearEpilogue) add(where_ + ": the epilogue is unknown");
  const bool stores = op.epilogue == LinearEpilogue::kStore && op.output != program_.logits;
  const DType output_type = activated                            ? program_.activation_type()
                            : stores && keeps_float32(op.output) ? DType::kFloat32
                            : stores                             ? program_.stored_type()
                                                                 : DType::kFloat32;
  const auto* output = operand("output", op.output, output_type, rows_);
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
  if (op.input == op.output) add(where_ + ": input and output are one buffer");
}

bool Validator::keeps_float32(BufferId output) const {
  return program_.matrix_layout == MatrixLayout::kRows && output >= 0 &&
         std::cmp_less(output, program_.buffers.size()) &&
         program_.buffers[static_cast<std::size_t>(output)].dtype == DType::kFloat32;
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

void Validator::check(const ExpertsOp& op) {
  const auto* input = operand("input", op.input, program_.activation_type(), RowKind::kTokens);
  const auto* logits = operand("router_logits", op.router_logits, DType::kFloat32, RowKind::kTokens);
  const auto* output = operand("output", op.output, DType::kFloat32, RowKind::kTokens);
  if (rows_ != RowKind::kTokens) add(where_ + ": belongs in the body");
  check_range_(where_ + ": number of experts", op.num_experts(), 1, 1 << 16);
  if (op.num_remote_experts != 0) {
    check_ranks();
    if (!op.stores)
      add(where_ + ": other ranks have experts, and the sum of those here is added to the output");
  }
  check_range_(where_ + ": num_remote_experts", op.num_remote_experts, 0, 1 << 16);
  check_range_(where_ + ": first_expert", op.first_expert, 0, std::max(0, op.num_remote_experts));
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
}

void Validator::check_routing(const Routing& routing, std::int64_t num_experts) {
  if (routing.scores > RouterScores::kSoftmaxOfChosen) add(where_ + ": the kind of scores is unknown");
  check_range_(where_ + ": num_groups", routing.num_groups, 1, std::max<std::int64_t>(1, num_experts));
  check_range_(where_ + ": topk_groups", routing.topk_groups, 1, std::max(1, routing.num_groups));
  const std::int64_t groups = std::max(1, routing.num_groups);
  if (num_experts % groups != 0) {
    add(where_ + ": " + text(num_experts) + " experts cannot stand in " + text(groups) + " equal groups");
  }
  check_range_(where_ + ": top_k", routing.top_k, 1,
               std::max<std::int64_t>(1, num_experts / groups * routing.topk_groups));
  check_finite("scale", routing.scale, 0.0F);
  check_optional_vector("the routing's bias", routing.bias, num_experts);
  check_optional_vector("the routing's expert_scale", routing.expert_scale, num_experts);
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

}  // namespace adaptrt
