#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace adaptrt {

/// The modules that an adapter can change. Values are TensorRT-LLM's module ids; from kLmHead on they are
/// AdaptRT's own.
enum class LoraModule : std::int32_t {
  kAttnQkv = 0,
  kAttnQ = 1,
  kAttnK = 2,
  kAttnV = 3,
  kAttnDense = 4,
  kMlpHTo4H = 5,
  kMlp4HToH = 6,
  kMlpGate = 7,
  kCrossAttnQkv = 8,
  kCrossAttnQ = 9,
  kCrossAttnK = 10,
  kCrossAttnV = 11,
  kCrossAttnDense = 12,
  kMoeHTo4H = 13,
  kMoe4HToH = 14,
  kMoeGate = 15,
  kMoeRouter = 16,
  kMlpRouter = 17,
  kMlpGateUp = 18,
  kSharedExpertHTo4H = 19,
  kSharedExpert4HToH = 20,
  kSharedExpertGate = 21,
  kMambaInProj = 22,
  kMambaOutProj = 23,
  kMoeLatentFc1 = 24,
  kMoeLatentFc2 = 25,
  kLmHead = 26,
  kEmbedding = 27,
  kNewTokens = 28,
  kRotaryScaling = 29,
  kAbsentTokens = 30,
  kNorm = 31,
  // Layers that TensorRT-LLM does not have.
  kAttnGate = 32,
  kAttnQGate = 33,
  kLinearAttnQkv = 34,
  kLinearAttnZ = 35,
  kLinearAttnQkvz = 36,
  kLinearAttnB = 37,
  kLinearAttnA = 38,
  kLinearAttnBa = 39,
  kLinearAttnDense = 40,
  kConvIn = 41,
  kConvOut = 42,
  // Latent attention. No row has kAttnKvB, the layer of Hugging Face's models: conversion makes rows of the
  // last two from it, which have a part for each head, like rows of experts.
  kAttnQA = 43,
  kAttnQB = 44,
  kAttnKvA = 45,
  kAttnKvB = 46,
  kAttnKvBKey = 47,
  kAttnKvBValue = 48,
  // Embeddings of each layer (Gemma 4). The last module belongs to the whole model; its row has layer 0.
  kPerLayerInputGate = 49,
  kPerLayerProjection = 50,
  kPerLayerModelProjection = 51,
};
/// Number of module ids in the plugins' adapter tables. The tables exclude modules that TensorRT engines
/// refuse: kNewTokens, kNorm, and those of gated attention, linear and latent attention, convolutions, and
/// embeddings of each layer. They exclude settings too.
inline constexpr std::int32_t kNumLoraModules = static_cast<std::int32_t>(LoraModule::kEmbedding) + 1;

/// Split of a module under tensor parallelism: column splits the outputs (B, magnitude), row splits the
/// inputs (A).
enum class TensorParallelSplit : std::uint8_t { kNone, kColumn, kRow };

struct LoraModuleInfo {
  LoraModule module;
  std::string_view name;
  TensorParallelSplit split;
  /// True if current networks have it; other modules are only known by name and refused.
  bool is_served;
};

/// Widths of A's input and B's output, per expert for a module of experts.
struct ModuleSizes {
  std::int64_t in = 0;
  std::int64_t out = 0;
  std::int64_t experts = 1;

  /// Number of elements of A and B, over all experts, per unit of LoRA rank.
  [[nodiscard]] std::int64_t a_per_rank() const { return experts * in; }
  [[nodiscard]] std::int64_t b_per_rank() const { return experts * out; }
  /// Number of elements of a magnitude or shift: one per output.
  [[nodiscard]] std::int64_t vector() const { return experts * out; }
};

/// Every module, in the order of its id.
[[nodiscard]] std::span<const LoraModuleInfo> lora_modules();

/// Number of tokens in a row of a module that is as wide as the vocabulary; the last row has the remaining
/// tokens. Without slices such a module would determine the width of every row and the size of every page.
inline constexpr std::int64_t kVocabularySlice = 16384;

/// True if a module is as wide as the vocabulary: lm_head by its outputs, or the embedding by its inputs (it
/// is a linear layer in which each token is one input). Its rows have the slice's number in place of a layer
/// number.
[[nodiscard]] constexpr bool is_of_vocabulary(LoraModule module) {
  return module == LoraModule::kLmHead || module == LoraModule::kEmbedding;
}

/// True if a module holds values of tokens: lm_head, the embedding, or kNewTokens, the rows that an adapter
/// brings for tokens beyond the vocabulary. The rank of kNewTokens is the number of these tokens; its
/// A[tokens, hidden] belongs to lm_head and its B[hidden, tokens] to the embedding.
[[nodiscard]] constexpr bool is_of_tokens(LoraModule module) {
  return is_of_vocabulary(module) || module == LoraModule::kNewTokens;
}

/// True if a module is not a layer but a setting for the requests that use the adapter. Its row has no
/// weights, and a number in place of the rank. For kRotaryScaling it is the divisor of rotary positions. For
/// kAbsentTokens it is the number of tokens at the end of the vocabulary that the adapter's model does not
/// have.
[[nodiscard]] constexpr bool is_setting(LoraModule module) {
  return module == LoraModule::kRotaryScaling || module == LoraModule::kAbsentTokens;
}

/// True if a module is a norm with a bias, of which an adapter changes only the shift. Its row has rank 1,
/// with A[1, 1] and B[out, 1] of zeros. It has the norm's number, in the order of execution, in place of a
/// layer number.
[[nodiscard]] constexpr bool is_norm(LoraModule module) {
  return module == LoraModule::kNorm;
}

/// Returns nullptr if no module has this id or name.
[[nodiscard]] const LoraModuleInfo* find_lora_module(std::int64_t id);
[[nodiscard]] const LoraModuleInfo* find_lora_module(std::string_view name);

[[nodiscard]] const LoraModuleInfo& info_of(LoraModule module);

/// Returns the modules that form a module's output, in the order of B's rows: three for attn_qkv, two for
/// mlp_gate_up (Hugging Face's [up_proj; gate_proj]), attn_q_gate, linear_attn_qkvz and linear_attn_ba, the
/// module itself otherwise.
[[nodiscard]] std::span<const LoraModule> parts_of(LoraModule module);

}  // namespace adaptrt
