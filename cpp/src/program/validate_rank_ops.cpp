// Validates ops that exchange data between ranks.

#include <cstddef>
#include <cstdint>

#include "validator.h"

namespace adaptrt {

void Validator::check_ranks() {
  if (program_.ranks_per_stage() < 2) add(where_ + ": the program has one rank");
}

void Validator::check(const AllReduceOp& op) {
  check_ranks();
  const auto* input = operand("input", op.input, DType::kFloat32, rows_);
  const auto* output = operand("output", op.output, DType::kFloat32, rows_);
  if (input != nullptr) check_width("output", output, input->width);
  if (op.input == op.output) add(where_ + ": input and output are one buffer");
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
}

void Validator::check(const ReceiveOp& op) {
  all_tokens_only();
  if (program_.stage() == 0) add(where_ + ": there is no stage before the first");
  if (rows_ == RowKind::kEncoderTokens && num_broadcasts_ > 0) add(where_ + ": belongs before the broadcast");
  operand("output", op.output, DType::kFloat32, rows_);
}

void Validator::check(const SendOp& op) {
  all_tokens_only();
  if (program_.is_last_stage()) add(where_ + ": there is no stage behind the last");
  if (rows_ == RowKind::kEncoderTokens && num_broadcasts_ > 0) add(where_ + ": belongs before the broadcast");
  operand("input", op.input, DType::kFloat32, rows_);
}

void Validator::check(const BroadcastOp& op) {
  ++num_broadcasts_;
  if (rows_ != RowKind::kEncoderTokens) add(where_ + ": belongs in the encoder");
  if (op.buffer != program_.encoder_output) add(where_ + ": the buffer is not encoder_output");
  if (!live_.holds(op.buffer)) return;  // which check_encoder_output() says
  lost_.assign(lost_.size(), true);
  lost_[static_cast<std::size_t>(op.buffer)] = false;
}

}  // namespace adaptrt
