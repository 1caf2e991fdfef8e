#include "adaptrt/lora/modules.h"

#include <algorithm>
#include <array>
#include <cstddef>

namespace adaptrt {
namespace {

using enum TensorParallelSplit;
using enum LoraModule;

constexpr std::array<LoraModuleInfo, 52> kModules{{
    {kAttnQkv, "attn_qkv", kColumn, true},
    {kAttnQ, "attn_q", kColumn, true},
    {kAttnK, "attn_k", kColumn, true},
    {kAttnV, "attn_v", kColumn, true},
    {kAttnDense, "attn_dense", kRow, true},
    {kMlpHTo4H, "mlp_h_to_4h", kColumn, true},
    {kMlp4HToH, "mlp_4h_to_h", kRow, true},
    {kMlpGate, "mlp_gate", kColumn, true},
    {kCrossAttnQkv, "cross_attn_qkv", kColumn, false},
    {kCrossAttnQ, "cross_attn_q", kColumn, true},
    {kCrossAttnK, "cross_attn_k", kColumn, true},
    {kCrossAttnV, "cross_attn_v", kColumn, true},
    {kCrossAttnDense, "cross_attn_dense", kRow, true},
    {kMoeHTo4H, "moe_h_to_4h", kColumn, true},
    {kMoe4HToH, "moe_4h_to_h", kRow, true},
    {kMoeGate, "moe_gate", kColumn, true},
    {kMoeRouter, "moe_router", kNone, true},
    {kMlpRouter, "mlp_router", kNone, true},
    {kMlpGateUp, "mlp_gate_up", kColumn, true},
    {kSharedExpertHTo4H, "shared_expert_h_to_4h", kColumn, true},
    {kSharedExpert4HToH, "shared_expert_4h_to_h", kRow, true},
    {kSharedExpertGate, "shared_expert_gate", kColumn, true},
    {kMambaInProj, "mamba_in_proj", kColumn, true},
    {kMambaOutProj, "mamba_out_proj", kRow, true},
    {kMoeLatentFc1, "moe_latent_fc1", kNone, false},
    {kMoeLatentFc2, "moe_latent_fc2", kNone, false},
    {kLmHead, "lm_head", kColumn, true},
    {kEmbedding, "embedding", kNone, true},
    {kNewTokens, "new_tokens", kNone, true},
    {kRotaryScaling, "rotary_scaling", kNone, true},
    {kAbsentTokens, "absent_tokens", kNone, true},
    {kNorm, "norm", kNone, true},
    {kAttnGate, "attn_gate", kColumn, true},
    {kAttnQGate, "attn_q_gate", kColumn, true},
    {kLinearAttnQkv, "linear_attn_qkv", kColumn, true},
    {kLinearAttnZ, "linear_attn_z", kColumn, true},
    {kLinearAttnQkvz, "linear_attn_qkvz", kColumn, true},
    {kLinearAttnB, "linear_attn_b", kColumn, true},
    {kLinearAttnA, "linear_attn_a", kColumn, true},
    {kLinearAttnBa, "linear_attn_ba", kColumn, true},
    {kLinearAttnDense, "linear_attn_dense", kRow, true},
    {kConvIn, "conv_in", kColumn, true},
    {kConvOut, "conv_out", kRow, true},
    {kAttnQA, "attn_q_a", kNone, true},
    {kAttnQB, "attn_q_b", kColumn, true},
    {kAttnKvA, "attn_kv_a", kNone, true},
    {kAttnKvB, "attn_kv_b", kNone, false},
    {kAttnKvBKey, "attn_kv_b_key", kNone, true},
    {kAttnKvBValue, "attn_kv_b_value", kNone, true},
    {kPerLayerInputGate, "per_layer_input_gate", kNone, true},
    {kPerLayerProjection, "per_layer_projection", kNone, true},
    {kPerLayerModelProjection, "per_layer_model_projection", kNone, true},
}};

constexpr bool ids_are_positions() {
  for (std::size_t i = 0; i < kModules.size(); ++i) {
    if (static_cast<std::size_t>(kModules[i].module) != i) return false;
  }
  return true;
}
static_assert(ids_are_positions());

}  // namespace

std::span<const LoraModuleInfo> lora_modules() {
  return kModules;
}

const LoraModuleInfo* find_lora_module(std::int64_t id) {
  if (id < 0 || id >= static_cast<std::int64_t>(kModules.size())) return nullptr;
  return &kModules[static_cast<std::size_t>(id)];
}

const LoraModuleInfo* find_lora_module(std::string_view name) {
  const auto* found = std::ranges::find(kModules, name, &LoraModuleInfo::name);
  return found == kModules.end() ? nullptr : found;
}

const LoraModuleInfo& info_of(LoraModule module) {
  return kModules[static_cast<std::size_t>(module)];
}

std::span<const LoraModule> parts_of(LoraModule module) {
  static constexpr std::array kQkvParts{kAttnQ, kAttnK, kAttnV};
  static constexpr std::array kGateUpParts{kMlpGate, kMlpHTo4H};
  static constexpr std::array kQGateParts{kAttnQ, kAttnGate};
  static constexpr std::array kLinearQkvzParts{kLinearAttnQkv, kLinearAttnZ};
  static constexpr std::array kLinearBaParts{kLinearAttnB, kLinearAttnA};
  switch (module) {
    case kAttnQGate:
      return kQGateParts;
    case kLinearAttnQkvz:
      return kLinearQkvzParts;
    case kLinearAttnBa:
      return kLinearBaParts;
    case kAttnQkv:
      return kQkvParts;
    case kMlpGateUp:
      return kGateUpParts;
    default:
      return {&info_of(module).module, 1};
  }
}

}  // namespace adaptrt
