#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "adaptrt/core/compressed_matrix.h"
#include "adaptrt/core/dtype.h"
#include "adaptrt/core/int8_matrix.h"
#include "adaptrt/engine/engine.h"
#include "adaptrt/program/program.h"
#include "cpu/random_storage.h"

namespace adaptrt::testing {

struct ModelShape {
  std::int64_t hidden_size = 0;
  AttentionShape attention;
};

struct ModelOptions {
  DType dtype = DType::kFloat32;
  std::int64_t vocab_size = 61;
  std::int32_t num_layers = 2;
  ModelShape shape{.hidden_size = 48, .attention = {4, 2, 12}};
  /// Attention of layers 1, 3, 5, ...; nullopt: that of `shape`.
  std::optional<AttentionShape> other_attention = std::nullopt;
  std::int64_t intermediate_size = 37;
  /// 0: no experts; otherwise each layer has experts of intermediate_size instead of one MLP.
  std::int32_t num_experts = 0;
  Routing routing = {};
  bool biases = false;
  /// Activation of the MLP; without a gate the layer has no second part.
  LinearEpilogue activation = LinearEpilogue::kSiluMul;
  float threshold = 0.0F;
  /// Added to the biases of the layer before the activation.
  float gate_bias = 0.0F;
  /// True if ReLU-gated layers have rows, and the layers that read their output use its zeros.
  bool is_sparse = false;
  /// True if ReLU-gated layers and the layers that read their output have neurons, and no rows.
  bool has_neurons = false;
  /// Rank of predictors that close gates with scores below least_score; 0 for no predictors.
  std::int64_t predictor_rank = 0;
  float least_score = 0.0F;
  bool head_norms = false;
  std::int32_t sliding_window = 0;
  std::int32_t chunk = 0;
  std::int32_t max_batch_size = 8;
  std::int32_t max_num_tokens = 256;
  std::int32_t max_seq_len = 300;
  std::int32_t tokens_per_block = 16;
  /// 0 for no adapters.
  std::int32_t max_rank = 0;
  std::uint64_t seed = 1;
  /// Quantisation of the linear layers; lm_head is then a separate W8A16 matrix.
  Quantization quantization = {};
  bool int8_kv_cache = false;
  bool keep_logit_rows = true;
};

/// A Llama-like program with random weights.
class RandomModel {
 public:
  explicit RandomModel(const ModelOptions& options) : options_(options), random_(options.seed) {
    program.dtype = options.dtype;
    program.vocab_size = options.vocab_size;
    program.num_layers = options.num_layers;
    program.max_batch_size = options.max_batch_size;
    program.max_num_tokens = options.max_num_tokens;
    program.max_input_len = options.max_seq_len;
    program.max_seq_len = options.max_seq_len;
    program.tokens_per_block = options.tokens_per_block;
    program.int8_kv_cache = options.int8_kv_cache;
    if (options.max_rank > 0) {
      program.lora = {.dtype = options.dtype,
                      .num_layers = options.num_layers,
                      .max_rank = options.max_rank,
                      .dora_enabled = true,
                      .target_modules = {LoraModule::kAttnQ, LoraModule::kAttnK, LoraModule::kAttnV,
                                         LoraModule::kAttnDense, LoraModule::kMlpHTo4H, LoraModule::kMlp4HToH,
                                         LoraModule::kMlpGate},
                      .sites = {}};
      if (options.num_experts > 0) {
        program.lora.target_modules = {LoraModule::kAttnQ,     LoraModule::kAttnK,    LoraModule::kAttnV,
                                       LoraModule::kAttnDense, LoraModule::kMoeHTo4H, LoraModule::kMoe4HToH,
                                       LoraModule::kMoeGate,   LoraModule::kMoeRouter};
      }
    }
    build();
  }

  Program program;

  /// Makes an adapter on every site except some parts, with ranks from 1 to max_rank; if `rank` is given, all
  /// parts have that rank.
  DeviceAdapter adapter(std::uint64_t seed, bool dora, std::int32_t rank = 0, bool shift = false) {
    Random random(seed);
    DeviceAdapter result{.task_id = seed, .sites = {}};
    for (const auto& site : program.lora.sites) {
      DeviceSite made;
      for (std::size_t i = 0; i < site.parts.size(); ++i) {
        auto& part = made.parts[i];
        part.rank = rank > 0 ? rank : static_cast<std::int32_t>(random.below(program.lora.max_rank + 1));
        if (part.rank == 0) continue;
        part.rank_offset = made.total_rank;
        made.total_rank += part.rank;
        part.b = storage_.matrix(options_.dtype, site.parts[i].out_size, part.rank, 0.3F, &random).data;
        if (shift) part.shift = storage_.vector(site.parts[i].out_size, -0.5F, 0.5F, &random).data;
        if (dora) part.magnitude = storage_.vector(site.parts[i].out_size, 0.5F, 1.5F, &random).data;
      }
      if (made.total_rank > 0) {
        made.a = storage_.matrix(options_.dtype, made.total_rank, site.in_size, 0.1F, &random).data;
      }
      result.sites.push_back(made);
    }
    return result;
  }

  /// Compresses the matrices of an adapter whose values fit. Returns their number.
  int compress(DeviceAdapter* adapter) {
    int compressed = 0;
    const auto store = [&](const std::byte** matrix, LoraStorage* storage, std::int64_t n, std::int64_t k) {
      std::vector<std::byte> bytes(panel_bytes(options_.dtype, n, k));
      if (compress_matrix(*matrix, n, k, bytes.data()) == 0) return;
      *matrix = compressed_.emplace_back(std::move(bytes)).data();
      *storage = LoraStorage::kCompressed;
      ++compressed;
    };
    for (std::size_t i = 0; i < adapter->sites.size(); ++i) {
      const LoraSite& place = program.lora.sites[i];
      DeviceSite& site = adapter->sites[i];
      if (site.total_rank > 0) store(&site.a, &site.a_storage, site.total_rank, place.in_size);
      for (std::size_t p = 0; p < place.parts.size(); ++p) {
        DevicePart& part = site.parts[p];
        if (part.rank > 0) store(&part.b, &part.b_storage, place.parts[p].out_size, part.rank);
      }
    }
    return compressed;
  }

  /// Rounds the matrices of an adapter to int8, each rank with scales of its own for A and B.
  void round_to_int8(DeviceAdapter* adapter) {
    const auto round = [&](const std::byte** matrix, std::int64_t n, std::int64_t k, ScaleAxis axis) {
      std::vector<float> scales(static_cast<std::size_t>(axis == ScaleAxis::kOutputs ? n : k));
      raise_maxima(*matrix, options_.dtype, n, k, axis, scales);
      for (float& scale : scales) scale = int8_scale(scale);
      std::vector<std::byte> rounded(int8_matrix_bytes(n, k));
      adaptrt::round_to_int8(*matrix, options_.dtype, n, k, axis, scales, rounded.data());
      *matrix = compressed_.emplace_back(std::move(rounded)).data();
      return scales;
    };
    for (std::size_t i = 0; i < adapter->sites.size(); ++i) {
      const LoraSite& place = program.lora.sites[i];
      DeviceSite& site = adapter->sites[i];
      if (site.total_rank == 0) continue;
      auto& scales =
          rank_scales_.emplace_back(round(&site.a, site.total_rank, place.in_size, ScaleAxis::kOutputs));
      site.a_storage = LoraStorage::kInt8;
      site.rank_scales = scales.data();
      for (std::size_t p = 0; p < place.parts.size(); ++p) {
        DevicePart& part = site.parts[p];
        if (part.rank == 0) continue;
        const auto of_part = round(&part.b, place.parts[p].out_size, part.rank, ScaleAxis::kInputs);
        part.b_storage = LoraStorage::kInt8;
        for (std::size_t r = 0; r < of_part.size(); ++r) {
          scales[static_cast<std::size_t>(part.rank_offset) + r] *= of_part[r];
        }
      }
    }
  }

  Storage& storage() { return storage_; }

 private:
  BufferId buffer(const char* name, DType dtype, RowKind rows, std::int64_t width) {
    const std::int64_t count = rows == RowKind::kTokens ? options_.max_num_tokens : options_.max_batch_size;
    program.buffers.push_back({name, dtype, rows, width, program.arena_bytes});
    program.arena_bytes += (static_cast<std::size_t>(count * width) * size_of(dtype) + 63) / 64 * 64;
    return static_cast<BufferId>(program.buffers.size()) - 1;
  }

  PanelMatrix weight(const Quantization& how, std::int64_t n, std::int64_t k, float bound) {
    if (how.algo == QuantAlgo::kNone) return storage_.matrix(options_.dtype, n, k, bound, &random_);
    return storage_.quantized(how, options_.dtype, n, k, bound, &random_);
  }

  LinearPart part(std::int64_t n, std::int64_t k) {
    const float bound = std::sqrt(3.0F / static_cast<float>(k));
    LinearPart made{.weight = weight(options_.quantization, n, k, bound), .bias = {}};
    if (options_.biases) made.bias = storage_.vector(n, -0.5F, 0.5F, &random_);
    return made;
  }

  VectorView norm(std::int64_t size) { return storage_.vector(size, 0.5F, 1.5F, &random_); }

  LinearOp linear(BufferId input, BufferId output, LinearEpilogue epilogue, std::int32_t layer,
                  std::vector<LoraPart> parts, std::int64_t k) {
    LinearOp op{.input = input, .output = output, .epilogue = epilogue, .parts = {}};
    for (const auto& made : parts) op.parts.push_back(part(made.out_size, k));
    if (options_.max_rank > 0) {
      op.lora_site = static_cast<std::int32_t>(program.lora.sites.size());
      program.lora.sites.push_back({layer, k, std::move(parts)});
    }
    return op;
  }

  std::vector<LinearPart> expert_parts(std::int64_t per_expert, std::int64_t n, std::int64_t k) {
    std::vector<LinearPart> parts;
    for (std::int64_t i = 0; i < per_expert * options_.num_experts; ++i) parts.push_back(part(n, k));
    return parts;
  }

  /// Adds the sites of all experts of a layer; returns the first one.
  std::int32_t expert_sites(std::int32_t layer, const std::vector<LoraPart>& parts, std::int64_t k) {
    if (options_.max_rank == 0) return -1;
    const auto first = static_cast<std::int32_t>(program.lora.sites.size());
    for (std::int32_t expert = 0; expert < options_.num_experts; ++expert) {
      program.lora.sites.push_back({layer, k, parts, expert});
    }
    return first;
  }

  void add_experts(std::int32_t layer, BufferId normed, BufferId router_logits, BufferId hidden) {
    const std::int64_t outer = options_.shape.hidden_size;
    const std::int64_t inner = options_.intermediate_size;
    const Quantization quantization = std::exchange(options_.quantization, {});  // routers stay exact
    program.body.push_back(linear(normed, router_logits, LinearEpilogue::kStore, layer,
                                  {{LoraModule::kMoeRouter, options_.num_experts}}, outer));
    options_.quantization = quantization;
    ExpertsOp op{.input = normed,
                 .router_logits = router_logits,
                 .output = hidden,
                 .routing = options_.routing,
                 .gate_up = {},
                 .down = {}};
    op.gate_up = expert_parts(2, inner, outer);
    op.down = expert_parts(1, outer, inner);
    op.gate_up_site =
        expert_sites(layer, {{LoraModule::kMoeHTo4H, inner}, {LoraModule::kMoeGate, inner}}, outer);
    op.down_site = expert_sites(layer, {{LoraModule::kMoe4HToH, outer}}, inner);
    program.body.push_back(std::move(op));
  }

  /// Adds the predictor of a gated layer, whose norm reads `hidden`.
  void add_predictor(BufferId hidden, LinearOp* gated) {
    const std::int64_t inner = gated->parts[0].weight.n;
    if (predictor_.scores == kNoBuffer) {
      const DType activation = activation_dtype(options_.dtype);
      predictor_ = {buffer("predictor.input", activation, RowKind::kTokens, options_.shape.hidden_size),
                    buffer("predictor.inner", activation, RowKind::kTokens, options_.predictor_rank),
                    buffer("predictor.scores", DType::kFloat32, RowKind::kTokens, inner)};
    }
    const bool has_biases = std::exchange(options_.biases, false);
    program.body.push_back(CastOp{.input = hidden, .output = predictor_.input});
    program.body.push_back(LinearOp{.input = predictor_.input,
                                    .output = predictor_.inner,
                                    .epilogue = LinearEpilogue::kRelu,
                                    .parts = {part(options_.predictor_rank, options_.shape.hidden_size)}});
    program.body.push_back(LinearOp{.input = predictor_.inner,
                                    .output = predictor_.scores,
                                    .parts = {part(inner, options_.predictor_rank)}});
    options_.biases = has_biases;
    gated->scores = predictor_.scores;
    gated->least_score = options_.least_score;
  }

  void add_mlp(std::int32_t layer, BufferId normed, BufferId gated, BufferId hidden) {
    const std::int64_t outer = options_.shape.hidden_size;
    const std::int64_t inner = options_.intermediate_size;
    std::vector<LoraPart> parts{{LoraModule::kMlpHTo4H, inner}};
    if (is_gated(options_.activation)) parts.push_back({LoraModule::kMlpGate, inner});
    LinearOp first = linear(normed, gated, options_.activation, layer, std::move(parts), outer);
    first.threshold = options_.threshold;
    if (options_.gate_bias != 0.0F) {
      std::vector<float> biases(first.parts[0].bias.data,
                                first.parts[0].bias.data + first.parts[0].bias.size);
      biases.resize(static_cast<std::size_t>(inner));
      for (float& bias : biases) bias += options_.gate_bias;
      first.parts[0].bias = storage_.vector(std::move(biases));
    }
    LinearOp second =
        linear(gated, hidden, LinearEpilogue::kAdd, layer, {{LoraModule::kMlp4HToH, outer}}, inner);
    if (options_.predictor_rank > 0) add_predictor(hidden, &first);
    if (options_.is_sparse) {
      second.has_sparse_input = true;
      if (options_.has_neurons) {
        first.neurons = second.neurons = storage_.neurons(first.parts[1].weight, second.parts[0].weight);
      } else if (is_relu_gated(options_.activation)) {
        first.parts[1].weight = storage_.with_rows(first.parts[1].weight);
      }
      PanelMatrix& down = second.parts[0].weight;
      if (!options_.has_neurons && can_have_columns(down.dtype, down.n, down.k)) {
        down = storage_.with_columns(down);
      }
      if (first.scores != kNoBuffer) first.parts[0].weight = storage_.with_rows(first.parts[0].weight);
    }
    program.body.push_back(std::move(first));
    program.body.push_back(std::move(second));
  }

  struct AttentionBuffers {
    BufferId qkv;
    BufferId attended;
  };

  AttentionBuffers attention_buffers(const AttentionShape& heads) {
    const std::int64_t width = heads.query_size() + 2 * heads.key_value_size();
    const BufferId qkv = buffer("qkv", DType::kFloat32, RowKind::kTokens, width);
    return {qkv, buffer("attended", activation_dtype(options_.dtype), RowKind::kTokens, heads.query_size())};
  }

  void build() {
    const ModelShape& shape = options_.shape;
    const DType activation = activation_dtype(options_.dtype);
    const BufferId hidden = buffer("hidden", DType::kFloat32, RowKind::kTokens, shape.hidden_size);
    const BufferId normed = buffer("normed", activation, RowKind::kTokens, shape.hidden_size);
    const AttentionBuffers usual = attention_buffers(shape.attention);
    const BufferId gated = buffer("gated", activation, RowKind::kTokens, options_.intermediate_size);
    const AttentionShape other_shape = options_.other_attention.value_or(shape.attention);
    // Number of rotated pairs, which the heads of all layers have.
    const std::int64_t half = std::min(shape.attention.head_dim, other_shape.head_dim) / 2;
    const BufferId cosine = buffer("cosine", DType::kFloat32, RowKind::kTokens, half);
    const BufferId sine = buffer("sine", DType::kFloat32, RowKind::kTokens, half);
    const BufferId last = buffer("last", activation, RowKind::kLogits, shape.hidden_size);
    program.hidden = last;
    program.logits = buffer("logits", DType::kFloat32, RowKind::kLogits, options_.vocab_size);
    BufferId router_logits = kNoBuffer;
    if (options_.num_experts > 0) {
      router_logits = buffer("router_logits", DType::kFloat32, RowKind::kTokens, options_.num_experts);
    }

    const AttentionBuffers others = options_.other_attention ? attention_buffers(other_shape) : usual;
    const auto table =
        storage_.matrix(options_.dtype, options_.vocab_size, shape.hidden_size, 1.0F, &random_);
    program.body.push_back(EmbeddingOp{.table = table, .output = hidden});
    std::vector<float> frequencies;
    for (std::int64_t i = 0; i < half; ++i) {
      frequencies.push_back(
          static_cast<float>(std::pow(10000.0, -static_cast<double>(i) / static_cast<double>(half))));
    }
    program.body.push_back(
        RopeTableOp{.inverse_frequencies = storage_.vector(frequencies), .cosine = cosine, .sine = sine});
    for (std::int32_t layer = 0; layer < options_.num_layers; ++layer) {
      const AttentionShape& heads = layer % 2 == 0 ? shape.attention : other_shape;
      const auto [qkv, attended] = layer % 2 == 0 ? usual : others;
      const std::int64_t query = heads.query_size();
      const std::int64_t key = heads.key_value_size();
      program.body.push_back(
          RmsNormOp{.input = hidden, .output = normed, .weight = norm(shape.hidden_size), .epsilon = 1e-5F});
      program.body.push_back(
          linear(normed, qkv, LinearEpilogue::kStore, layer,
                 {{LoraModule::kAttnQ, query}, {LoraModule::kAttnK, key}, {LoraModule::kAttnV, key}},
                 shape.hidden_size));
      AttentionOp attention;
      attention.layer = layer;
      attention.shape = heads;
      attention.qkv = qkv;
      attention.cosine = cosine;
      attention.sine = sine;
      attention.output = attended;
      if (options_.head_norms) {
        attention.query_norm = norm(heads.head_dim);
        attention.key_norm = norm(heads.head_dim);
      }
      attention.norm_epsilon = 1e-5F;
      attention.scale = 1.0F / std::sqrt(static_cast<float>(heads.head_dim));
      attention.sliding_window = options_.sliding_window;
      attention.chunk = options_.chunk;
      program.body.push_back(attention);
      if (layer + 1 == options_.num_layers && options_.keep_logit_rows) {
        program.body.push_back(KeepLogitRowsOp{{attended, hidden}});
      }
      program.body.push_back(linear(attended, hidden, LinearEpilogue::kAdd, layer,
                                    {{LoraModule::kAttnDense, shape.hidden_size}}, query));
      program.body.push_back(
          RmsNormOp{.input = hidden, .output = normed, .weight = norm(shape.hidden_size), .epsilon = 1e-5F});
      if (options_.num_experts > 0) {
        add_experts(layer, normed, router_logits, hidden);
        continue;
      }
      add_mlp(layer, normed, gated, hidden);
    }
    program.head.push_back(RmsNormOp{.input = hidden,
                                     .output = last,
                                     .weight = norm(shape.hidden_size),
                                     .epsilon = 1e-5F,
                                     .gather_logit_rows = true});
    LinearOp logits{.input = last, .output = program.logits, .parts = {}};
    const bool tied = options_.quantization.algo == QuantAlgo::kNone;
    logits.parts.push_back(
        {.weight =
             tied ? table : weight({.algo = QuantAlgo::kW8A16}, options_.vocab_size, shape.hidden_size, 1.0F),
         .bias = {}});
    program.head.push_back(logits);
  }

  struct Predictor {
    BufferId input = kNoBuffer;
    BufferId inner = kNoBuffer;
    BufferId scores = kNoBuffer;
  };

  ModelOptions options_;
  Random random_;
  std::list<std::vector<std::byte>> compressed_;
  std::list<std::vector<float>> rank_scales_;
  Storage storage_;
  Predictor predictor_;
};

}  // namespace adaptrt::testing
