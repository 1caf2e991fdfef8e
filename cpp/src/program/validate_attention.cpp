// Validates attention and its KV cache.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "adaptrt/cpu/attention_tile.h"
#include "validator.h"

namespace adaptrt {
namespace {

bool has_equal_elements(const VectorView& vector) {
  if (vector.data == nullptr) return true;
  const std::span<const float> elements(vector.data, static_cast<std::size_t>(vector.size));
  return std::ranges::adjacent_find(elements, std::ranges::not_equal_to{}) == elements.end();
}

}  // namespace

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
  const auto* qkv = operand("qkv", op.qkv, program_.stored_type(), rows_);
  const auto* cosine = operand("cosine", op.cosine, DType::kFloat32, rows_);
  const auto* sine = operand("sine", op.sine, DType::kFloat32, rows_);
  const auto* output = operand("output", op.output, program_.activation_type(), rows_);
  const Problems of_shape = problems_of_shape(shape);
  problems_.add_all(where_ + ": ", of_shape);
  if (of_shape.empty()) {
    check_shared_layer(op);
    if (op.kind == AttentionKind::kCausal && op.shared_layer < 0) add_kv_bytes(shape);
    check_at_least("qkv", qkv, op.qkv_size());
    check_width("output", output, shape.query_size());
    const bool of_heads = op.query_norm.size == shape.head_dim || op.key_norm.size == shape.head_dim;
    // A norm for each head, or one for all heads together; with one key-value head, both are the same.
    const auto check_norm = [&](std::string_view name, const VectorView& norm, std::int64_t all) {
      check_optional_vector(name, norm, norm.size == shape.head_dim ? norm.size : all);
    };
    check_norm("query_norm", op.query_norm, shape.query_size());
    check_norm("key_norm", op.key_norm, shape.key_value_size());
    check_optional_vector("value_norm", op.value_norm, shape.head_dim);
    check_optional_vector("sinks", op.sinks, shape.num_attention_heads);
    const auto is_plain = [&](const VectorView& norm) {
      return norm.size == 0 || (norm.size == shape.head_dim && has_equal_elements(norm));
    };
    if (op.interleaved && of_heads &&
        !(op.norms_after_rotation && is_plain(op.query_norm) && is_plain(op.key_norm))) {
      add(where_ +
          ": interleaved heads have a norm of their own, before the rotation or with different weights");
    }
    const bool of_all = !of_heads && (op.query_norm.size != 0 || op.key_norm.size != 0);
    if (op.norms_after_rotation && of_all) {
      add(where_ + ": norms after the rotation must be of each head");
    }
    if (shape.values_are_keys) check_keys_as_values(op);
    if (op.values_from_keys && (of_all || op.interleaved || op.shared_layer >= 0)) {
      add(where_ +
          ": its values come from its keys, and keys are interleaved, shared or normalized together");
    }
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
  if (op.window_column != -1) {
    check_coordinate("window_column", op.window_column);
    if (op.kind != AttentionKind::kBidirectional || op.sliding_window != 0) {
      add(where_ + ": window_column is given, and it is causal or has a sliding window");
    }
  }
  if (op.joint_column != -1) {
    check_coordinate("joint_column", op.joint_column);
    if (op.kind != AttentionKind::kCausal) add(where_ + ": joint_column is given, and it is not causal");
  }
  check_range_(where_ + ": chunk", op.chunk, 0, kSizeLimit - 1);
  if (op.chunk != 0 &&
      (op.kind != AttentionKind::kCausal || op.sliding_window != 0 || op.joint_column != -1)) {
    add(where_ + ": chunk is given, and it is not causal, or has a sliding window or a joint_column");
  }
  check_finite("norm_epsilon", op.norm_epsilon, 0.0F);
  check_finite("scale", op.scale, 0.0F);
  check_range_(where_ + ": sliding_window", op.sliding_window, 0, kSizeLimit - 1);
  check_finite("softcap", op.softcap, 0.0F);
  check_finite("query_scaling_beta", op.query_scaling_beta, 0.0F);
  check_range_(where_ + ": query_scaling_length", op.query_scaling_length, 1, kSizeLimit - 1);
  check_range_(where_ + ": query_scaling_offset", op.query_scaling_offset, 0, kSizeLimit - 1);
}

void Validator::check_shared_layer(const AttentionOp& op) {
  const auto layers = static_cast<std::int64_t>(kv_shapes_.size());
  const bool is_own = op.shared_layer == -1;
  if (is_own || rows_ != RowKind::kTokens) {
    if (!is_own) add(where_ + ": shared_layer is given in an encoder");
    const bool stores = rows_ == RowKind::kTokens && op.kind == AttentionKind::kCausal;
    if (stores && op.layer >= 0 && op.layer < layers)
      kv_shapes_[static_cast<std::size_t>(op.layer)] = op.shape;
    return;
  }
  if (op.kind != AttentionKind::kCausal) add(where_ + ": shared_layer is given, and it is not causal");
  if (op.shape.values_are_keys) add(where_ + ": shared_layer is given, and its values are keys");
  const bool exists = op.shared_layer >= 0 && op.shared_layer < layers;
  const AttentionShape found =
      exists ? kv_shapes_[static_cast<std::size_t>(op.shared_layer)] : AttentionShape{};
  if (found.num_key_value_heads != op.shape.num_key_value_heads || found.head_dim != op.shape.head_dim ||
      found.values_are_keys) {
    add(where_ + ": shared_layer is " + text(op.shared_layer) +
        "; expected an earlier layer that has stored " + text(op.shape.num_key_value_heads) + " heads of " +
        text(op.shape.head_dim));
  }
}

void Validator::check_keys_as_values(const AttentionOp& op) {
  if (op.values_from_keys || op.value_norm.size != 0) add(where_ + ": its values are keys, and have a norm");
  if (op.shape.num_key_value_heads != 1) {
    add(where_ + ": its values are keys, and there are " + text(op.shape.num_key_value_heads) +
        " key-value heads; expected 1");
  }
  if (op.kind != AttentionKind::kCausal) add(where_ + ": its values are keys, and it is not causal");
  if (program_.int8_kv_cache) add(where_ + ": its values are keys, and int8_kv_cache is given");
}

void Validator::check(const CrossKeysOp& op) {
  if (rows_ != RowKind::kEncoderTokens) add(where_ + ": belongs in the encoder");
  use_layer(op.layer, &cross_keys_users_);
  const auto* kv = operand("kv", op.kv, DType::kFloat32, RowKind::kEncoderTokens);
  const Problems of_shape = problems_of_shape(op.shape);
  problems_.add_all(where_ + ": ", of_shape);
  if (op.shape.values_are_keys) add(where_ + ": its values are keys");
  if (of_shape.empty()) {
    add_kv_bytes(op.shape);
    check_width("kv", kv, 2 * op.shape.key_value_size());
  }
  const auto layer = static_cast<std::size_t>(std::max(0, op.layer));
  if (layer < cross_shapes_.size()) cross_shapes_[layer] = op.shape;
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
  const auto* output = operand("output", op.output, program_.activation_type(), RowKind::kTokens);
  if (problems_of_shape(op.shape).empty()) {
    check_width("q", q, op.shape.query_size());
    check_width("output", output, op.shape.query_size());
  }
  check_finite("scale", op.scale, 0.0F);
}

void Validator::use_layer(std::int32_t layer, std::vector<std::int32_t>* users) {
  const auto count = static_cast<std::int64_t>(users->size());
  check_range_(where_ + ": layer", layer, 0, std::max<std::int64_t>(1, count) - 1);
  if (layer >= 0 && layer < count) ++(*users)[static_cast<std::size_t>(layer)];
}

void Validator::add_kv_bytes(const AttentionShape& shape) {
  // No element has more bytes than a float32, including its share of the scales.
  const auto layer = product({2, whole_groups(program_.tokens_per_block), shape.num_key_value_heads,
                              whole_groups(shape.head_dim), 4});
  std::size_t sum = 0;
  const bool fits = layer && kv_block_bytes_ && !__builtin_add_overflow(*kv_block_bytes_, *layer, &sum);
  kv_block_bytes_ = fits ? std::optional(sum) : std::nullopt;
}

}  // namespace adaptrt
