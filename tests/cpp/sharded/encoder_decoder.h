#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include "cpu/random_model.h"
#include "sharded/stage_programs.h"

namespace adaptrt::testing {

/// Width of the encoder's output.
inline constexpr std::int64_t kEncodedSize = 48;

/// A random decoder whose layers attend to a random encoder with as many layers.
class EncoderDecoder {
 public:
  /// If `max_rank` is not 0, adapters act on the decoder's own layers.
  EncoderDecoder(std::int32_t num_layers, DType dtype, std::int32_t max_rank = 0)
      : decoder_({.dtype = dtype, .num_layers = num_layers, .max_rank = max_rank}),
        encoder_({.dtype = dtype, .num_layers = num_layers, .seed = 2, .keep_logit_rows = false}),
        program(decoder_.program) {
    program.num_encoder_layers = num_layers;
    program.max_encoder_input_len = 100;
    if (max_rank > 0) {
      program.lora.num_layers = 2 * num_layers;
      program.lora.num_encoder_layers = num_layers;
    }
    add_encoder();
    add_cross_attention();
  }

  /// Returns one stage; there are as many stages as layers.
  [[nodiscard]] Program stage(std::int32_t number) const {
    Program made = of_stage(program, number);
    made.num_encoder_layers = 1;
    made.encoder = between_stages(ops_of_layer(layers_, number), stream_, number, program.num_layers);
    made.encoder.push_back(BroadcastOp{program.encoder_output});
    for (std::size_t i = 0; i < 2; ++i)
      made.encoder.push_back(cross_keys_[2 * static_cast<std::size_t>(number) + i]);
    std::get<CrossKeysOp>(made.encoder.back()).layer = 0;
    return made;
  }

 private:
  static constexpr AttentionShape kHeads{4, 2, 12};

  BufferId buffer(RowKind rows, std::int64_t width, DType dtype) {
    program.buffers.push_back(
        {"b" + std::to_string(program.buffers.size()), dtype, rows, width, program.arena_bytes});
    program.arena_bytes += static_cast<std::size_t>(program.max_num_tokens * width * 4 + 63) / 64 * 64;
    return static_cast<BufferId>(program.buffers.size()) - 1;
  }

  LinearOp linear(BufferId input, std::int64_t inputs, BufferId output, std::int64_t outputs,
                  LinearEpilogue epilogue) {
    LinearOp op{.input = input, .output = output, .epilogue = epilogue, .parts = {}};
    const float bound = std::sqrt(3.0F / static_cast<float>(inputs));
    op.parts.push_back(
        {.weight = decoder_.storage().matrix(program.dtype, outputs, inputs, bound, &random_), .bias = {}});
    return op;
  }

  void add_encoder() {
    const auto first = static_cast<BufferId>(program.buffers.size());
    for (Buffer made : encoder_.program.buffers) {
      made.offset += program.arena_bytes;
      if (made.rows == RowKind::kTokens) made.rows = RowKind::kEncoderTokens;
      program.buffers.push_back(made);
    }
    program.arena_bytes += encoder_.program.arena_bytes;
    layers_ = encoder_.program.body;
    for (Op& op : layers_) std::visit([&](auto& found) { move_buffers(found, first); }, op);
    stream_ = std::get<EmbeddingOp>(layers_.front()).output;
    program.encoder_output = buffer(RowKind::kEncoderTokens, kEncodedSize, activation_dtype(program.dtype));
    layers_.push_back(RmsNormOp{.input = stream_,
                                .output = program.encoder_output,
                                .weight = decoder_.storage().vector(kEncodedSize, 0.5F, 1.5F, &random_),
                                .epsilon = 1e-5F});
    const std::int64_t width = 2 * kHeads.key_value_size();
    const BufferId kv = buffer(RowKind::kEncoderTokens, width, DType::kFloat32);
    for (std::int32_t layer = 0; layer < program.num_layers; ++layer) {
      cross_keys_.push_back(linear(program.encoder_output, kEncodedSize, kv, width, LinearEpilogue::kStore));
      cross_keys_.push_back(CrossKeysOp{.layer = layer, .shape = kHeads, .kv = kv});
    }
    program.encoder = layers_;
    program.encoder.insert(program.encoder.end(), cross_keys_.begin(), cross_keys_.end());
  }

  template <class Kind>
  static void move_buffers(Kind& op, BufferId by) {
    if constexpr (requires { op.input; }) op.input += by;
    if constexpr (requires { op.output; }) op.output += by;
    if constexpr (requires { op.cosine; }) op.cosine += by;
    if constexpr (requires { op.sine; }) op.sine += by;
    if constexpr (std::is_same_v<Kind, AttentionOp>) {
      op.qkv += by;
      op.kind = AttentionKind::kBidirectional;
    }
  }

  /// Adds cross-attention after each layer's self-attention, with the op that projects its keys and values.
  void add_cross_attention() {
    const std::int64_t width = kHeads.query_size();
    const BufferId q = buffer(RowKind::kTokens, width, DType::kFloat32);
    const BufferId attended = buffer(RowKind::kTokens, width, activation_dtype(program.dtype));
    const BufferId stream = std::get<EmbeddingOp>(program.body.front()).output;
    std::vector<Op> body;
    BufferId normed = kNoBuffer;
    for (const Op& op : program.body) {
      body.push_back(op);
      if (const auto* norm = std::get_if<RmsNormOp>(&op)) normed = norm->output;
      const auto* attention = std::get_if<AttentionOp>(&op);
      if (attention == nullptr) continue;
      body.push_back(linear(normed, kEncodedSize, q, width, LinearEpilogue::kStore));
      body.push_back(CrossAttentionOp{
          .layer = attention->layer, .shape = kHeads, .q = q, .output = attended, .scale = 0.3F});
      body.push_back(linear(attended, width, stream, kEncodedSize, LinearEpilogue::kAdd));
    }
    program.body = std::move(body);
  }

  RandomModel decoder_;
  RandomModel encoder_;
  Random random_{5};
  std::vector<Op> layers_;  // of the encoder, followed by its norm
  std::vector<Op> cross_keys_;
  BufferId stream_ = kNoBuffer;

 public:
  Program program;
};

}  // namespace adaptrt::testing
