// Validates ops of latent attention.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "validator.h"

namespace adaptrt {

bool Validator::check_latent_shape(const LatentShape& shape) {
  Problems found;
  const RangeCheck check_size{&found};
  check_size("num_heads", shape.num_heads, 1, 1 << 16);
  check_size("latent_dim", shape.latent_dim, 1, 1 << 12);
  check_size("rotary_dim", shape.rotary_dim, 2, 1 << 12);
  check_size("plain_dim", shape.plain_dim, 1, 1 << 12);
  check_size("value_dim", shape.value_dim, 1, 1 << 12);
  problems_.add_all(where_ + ": ", found);
  return found.empty();
}

void Validator::check_head_parts(std::string_view name, const std::vector<LinearPart>& parts,
                                 std::int64_t num_heads, ModuleSizes sizes, std::int32_t first_site) {
  if (static_cast<std::int64_t>(parts.size()) != num_heads) {
    add(where_ + ": there are " + std::to_string(parts.size()) + " " + std::string(name) + " for " +
        text(num_heads) + " heads; there must be one for each");
    return;
  }
  check_expert_parts(name, parts, sizes);
  for (std::size_t head = 0; head < parts.size(); ++head) {
    if (parts[head].bias.size != 0) add(where_ + ": one of its " + std::string(name) + " has a bias");
    if (first_site >= 0) {
      check_site(first_site + static_cast<std::int32_t>(head), std::span(parts).subspan(head, 1));
    }
  }
}

void Validator::check(const LatentQueriesOp& op) {
  const auto* queries = operand("queries", op.queries, program_.stored_type(), rows_);
  const auto* rows = operand("rows", op.rows, program_.stored_type(), rows_);
  const auto* output = operand("output", op.output, program_.stored_type(), rows_);
  if (rows_ != RowKind::kTokens) add(where_ + ": belongs in the body");
  if (op.output == op.queries || op.output == op.rows) add(where_ + ": the output is one of the inputs");
  check_finite("epsilon", op.epsilon, 0.0F);
  const LatentShape& shape = op.shape;
  if (!check_latent_shape(shape)) return;
  check_width("queries", queries, shape.num_heads * (shape.plain_dim + shape.rotary_dim));
  check_width("rows", rows, shape.key_dim());
  check_width("output", output, (shape.num_heads + 1) * shape.key_dim());
  check_vector("norm", op.norm, shape.latent_dim);
  check_head_parts("keys", op.keys, shape.num_heads, {shape.plain_dim, shape.latent_dim}, op.lora_site);
}

void Validator::check(const LatentValuesOp& op) {
  const auto* input = operand("input", op.input, program_.activation_type(), rows_);
  const auto* output = operand("output", op.output, program_.activation_type(), rows_);
  if (rows_ != RowKind::kTokens) add(where_ + ": belongs in the body");
  if (op.output == op.input) add(where_ + ": input and output are one buffer");
  const LatentShape& shape = op.shape;
  if (!check_latent_shape(shape)) return;
  check_width("input", input, shape.num_heads * shape.key_dim());
  check_width("output", output, shape.num_heads * shape.value_dim);
  check_head_parts("values", op.values, shape.num_heads, {shape.latent_dim, shape.value_dim}, op.lora_site);
}

}  // namespace adaptrt
