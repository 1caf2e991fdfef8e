// Validates ops of linear attention, which keep states, and the gates of attention.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "validator.h"

namespace adaptrt {

void Validator::check_state(std::optional<std::size_t> num_bytes) {
  all_tokens_only();
  if (rows_ == RowKind::kEncoderTokens) add(where_ + ": belongs in the body");
  std::size_t sum = 0;
  const bool fits = num_bytes && state_bytes_ && !__builtin_add_overflow(*state_bytes_, *num_bytes, &sum);
  state_bytes_ = fits ? std::optional(sum) : std::nullopt;
}

std::int64_t Validator::check_taps(const VectorView& weight, std::int64_t num_taps) {
  check_range_(where_ + ": taps", num_taps, 1, kSizeLimit - 1);
  const std::int64_t taps = std::max<std::int64_t>(1, num_taps);
  const std::int64_t width = weight.size / taps;
  check_state(product({taps, width, static_cast<std::int64_t>(sizeof(float))}));
  if (width >= 1 && width < kSizeLimit && width * taps == weight.size && weight.data != nullptr) return width;
  add(where_ + ": the weight has " + text(weight.size) + " elements; it must have some for each of " +
      text(num_taps) + " taps");
  return 0;
}

void Validator::check(const CausalConvolutionOp& op) {
  const Buffer* values = operand("values", op.values, DType::kFloat32, rows_);
  use_layer(op.layer, &convolution_users_);
  const std::int64_t width = check_taps(op.weight, op.taps);
  if (width == 0) return;
  check_at_least("values", values, width);
  check_optional_vector("the bias", op.bias, width);
}

void Validator::check(const GatedConvolutionOp& op) {
  sees_before_ = true;
  use_layer(op.layer, &layer_users_);
  const Buffer* input = operand("input", op.input, DType::kFloat32, rows_);
  const Buffer* output = operand("output", op.output, program_.activation_type(), rows_);
  const std::int64_t width = check_taps(op.weight, op.taps);
  if (width == 0) return;
  check_width("input", input, 3 * width);
  check_width("output", output, width);
  check_optional_vector("the bias", op.bias, width);
}

void Validator::check(const GatedDeltaOp& op) {
  const DeltaShape& shape = op.shape;
  sees_before_ = true;
  use_layer(op.layer, &layer_users_);
  const Buffer* qkv = operand("qkv", op.qkv, DType::kFloat32, rows_);
  const Buffer* gates = operand("gates", op.gates, DType::kFloat32, rows_);
  const Buffer* output = operand("output", op.output, DType::kFloat32, rows_);
  Problems of_shape;
  const RangeCheck check_size{&of_shape};
  check_size("num_key_heads", shape.num_key_heads, 1, kSizeLimit - 1);
  check_size("num_value_heads", shape.num_value_heads, 1, kSizeLimit - 1);
  check_size("key_dim", shape.key_dim, 1, kSizeLimit - 1);
  check_size("value_dim", shape.value_dim, 1, kSizeLimit - 1);
  problems_.add_all(where_ + ": ", of_shape);
  if (!of_shape.empty()) return;
  if (shape.num_value_heads % shape.num_key_heads != 0) {
    add(where_ + ": num_value_heads is " + text(shape.num_value_heads) + "; expected a multiple of " +
        text(shape.num_key_heads) + " key heads");
  }
  check_state(product(
      {shape.num_value_heads, shape.key_dim, shape.value_dim, static_cast<std::int64_t>(sizeof(float))}));
  check_at_least("qkv", qkv, 2 * shape.key_size() + shape.value_size());
  check_width("gates", gates, 2 * shape.num_value_heads);
  check_width("output", output, shape.value_size());
  check_vector("log_decay", op.log_decay, shape.num_value_heads);
  check_vector("time_bias", op.time_bias, shape.num_value_heads);
  check_finite("update_scale", op.update_scale, 0.0F);
}

void Validator::check(const SelectiveScanOp& op) {
  const ScanShape& shape = op.shape;
  sees_before_ = true;
  use_layer(op.layer, &scan_users_);
  const Buffer* values = operand("values", op.values, DType::kFloat32, rows_);
  const Buffer* output = operand("output", op.output, DType::kFloat32, rows_);
  Problems of_shape;
  const RangeCheck check_size{&of_shape};
  check_size("num_heads", shape.num_heads, 1, kSizeLimit - 1);
  check_size("head_dim", shape.head_dim, 1, kSizeLimit - 1);
  check_size("num_groups", shape.num_groups, 1, kSizeLimit - 1);
  check_size("state_dim", shape.state_dim, 1, kSizeLimit - 1);
  problems_.add_all(where_ + ": ", of_shape);
  if (!of_shape.empty()) return;
  if (shape.num_heads % shape.num_groups != 0) {
    add(where_ + ": num_heads is " + text(shape.num_heads) + "; expected a multiple of " +
        text(shape.num_groups) + " groups");
  }
  check_state(
      product({shape.num_heads, shape.head_dim, shape.state_dim, static_cast<std::int64_t>(sizeof(float))}));
  check_at_least("values", values, shape.value_size() + 2 * shape.group_size() + shape.num_heads);
  check_width("output", output, shape.value_size());
  check_vector("log_decay", op.log_decay, shape.num_heads);
  check_vector("time_bias", op.time_bias, shape.num_heads);
  check_vector("skip", op.skip, shape.num_heads);
  check_finite("time_min", op.time_min, 0.0F);
  check_finite("time_max", op.time_max, op.time_min);
}

void Validator::check(const GatedRmsNormOp& op) {
  const Buffer* input = operand("input", op.input, DType::kFloat32, rows_);
  const Buffer* gate = operand("gate", op.gate, DType::kFloat32, rows_);
  const Buffer* output = operand("output", op.output, program_.activation_type(), rows_);
  if (input != nullptr) {
    check_at_least("gate", gate, input->width);
    check_width("output", output, input->width);
    if (op.weight.size < 1 || op.weight.data == nullptr || input->width % op.weight.size != 0) {
      add(where_ + ": the weight has " + text(op.weight.size) + " elements; it must have a divisor of " +
          text(input->width));
    }
  }
  check_range_(where_ + ": num_groups", op.num_groups, 1, kSizeLimit - 1);
  if (op.num_groups >= 1 && op.weight.size % op.num_groups != 0) {
    add(where_ + ": num_groups " + text(op.num_groups) + " does not divide a weight of " +
        text(op.weight.size) + " elements");
  }
  const std::int32_t ranks = program_.ranks_per_stage();
  check_range_(where_ + ": group_ranks", op.group_ranks, 1, std::max(1, ranks));
  if (op.group_ranks > 1 && (ranks % op.group_ranks != 0 || op.num_groups != 1 ||
                             (input != nullptr && input->width != op.weight.size))) {
    add(where_ + ": group_ranks is " + text(op.group_ranks) + "; expected a divisor of " + text(ranks) +
        " ranks and one group as wide as the input");
  }
  if (op.output == op.input || op.output == op.gate) add(where_ + ": the output is one of the inputs");
  check_finite("epsilon", op.epsilon, 0.0F);
}

void Validator::check(const XieluOp& op) {
  const Buffer* input = operand("input", op.input, program_.stored_type(), rows_);
  const Buffer* output = operand("output", op.output, program_.activation_type(), rows_);
  if (input != nullptr) check_width("output", output, input->width);
  check_vector("parameters", op.parameters, 4);
  if (op.input == op.output) add(where_ + ": input and output are one buffer");
}

void Validator::check(const GatedColumnsOp& op) {
  const Buffer* gate = operand("gate", op.gate, program_.stored_type(), rows_);
  const Buffer* values = operand("values", op.values, DType::kFloat32, rows_);
  const Buffer* output = operand("output", op.output, program_.activation_type(), rows_);
  check_range_(where_ + ": first_column", op.first_column, 0, kSizeLimit - 1);
  if (gate != nullptr) {
    check_width("output", output, gate->width);
    check_at_least("values", values, std::clamp<std::int64_t>(op.first_column, 0, kSizeLimit) + gate->width);
  }
  if (!is_gated(op.activation) || is_relu_gated(op.activation)) {
    add(where_ + ": the activation is not a gated one without a threshold");
  }
  if (op.output == op.gate || op.output == op.values) add(where_ + ": the output is one of the inputs");
}

void Validator::check(const SigmoidGateOp& op) {
  const Buffer* gate = operand("gate", op.gate, program_.stored_type(), rows_);
  const Buffer* output = operand("output", op.output, program_.activation_type(), rows_);
  if (output != nullptr) check_at_least("gate", gate, output->width);
  if (op.output == op.gate) add(where_ + ": gate and output are one buffer");
}

}  // namespace adaptrt
