#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace adaptrt {

/// The linear layers that an adapter can change; the values are TensorRT-LLM's module ids.
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
};

/// How tensor parallelism cuts a module: column splits the outputs (B, magnitude), row splits the inputs (A).
enum class TensorParallelSplit : std::uint8_t { kNone, kColumn, kRow };

/// The sizes that a module's widths follow from.
struct ModelShape {
  std::int64_t hidden_size = 0;
  std::int64_t num_attention_heads = 0;
  std::int64_t num_key_value_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t intermediate_size = 0;

  [[nodiscard]] std::int64_t query_size() const { return num_attention_heads * head_dim; }
  [[nodiscard]] std::int64_t key_value_size() const { return num_key_value_heads * head_dim; }
};

struct LoraModuleInfo {
  LoraModule module;
  std::string_view name;
  TensorParallelSplit split;
  /// Part of the decoder layers that engines have today; the others are known by name and refused.
  bool in_decoder_layer;
};

struct ModuleSizes {
  std::int64_t in = 0;
  std::int64_t out = 0;
};

/// Every module, in the order of its id.
[[nodiscard]] std::span<const LoraModuleInfo> lora_modules();

/// nullptr when there is no module of that id or name.
[[nodiscard]] const LoraModuleInfo* find_lora_module(std::int64_t id);
[[nodiscard]] const LoraModuleInfo* find_lora_module(std::string_view name);

[[nodiscard]] const LoraModuleInfo& info_of(LoraModule module);

/// Widths of A's input and B's output; nullopt for a module that decoder layers do not have. attn_qkv's
/// output is [q; k; v], mlp_gate_up's is [mlp_gate; mlp_h_to_4h] (that is Hugging Face's [up_proj;
/// gate_proj]).
[[nodiscard]] std::optional<ModuleSizes> module_sizes(LoraModule module, const ModelShape& shape);

/// The modules that a module's output consists of, in the order of B's rows: three for attn_qkv, two for
/// mlp_gate_up, itself for every other.
[[nodiscard]] std::span<const LoraModule> parts_of(LoraModule module);

}  // namespace adaptrt
