#include "adaptrt/lora/modules.h"

#include <algorithm>
#include <array>
#include <cstddef>

namespace adaptrt {
namespace {

using enum TensorParallelSplit;
using enum LoraModule;

constexpr std::array<LoraModuleInfo, 19> kModules{{
    {kAttnQkv, "attn_qkv", kColumn, true},
    {kAttnQ, "attn_q", kColumn, true},
    {kAttnK, "attn_k", kColumn, true},
    {kAttnV, "attn_v", kColumn, true},
    {kAttnDense, "attn_dense", kRow, true},
    {kMlpHTo4H, "mlp_h_to_4h", kColumn, true},
    {kMlp4HToH, "mlp_4h_to_h", kRow, true},
    {kMlpGate, "mlp_gate", kColumn, true},
    {kCrossAttnQkv, "cross_attn_qkv", kColumn, false},
    {kCrossAttnQ, "cross_attn_q", kColumn, false},
    {kCrossAttnK, "cross_attn_k", kColumn, false},
    {kCrossAttnV, "cross_attn_v", kColumn, false},
    {kCrossAttnDense, "cross_attn_dense", kRow, false},
    {kMoeHTo4H, "moe_h_to_4h", kColumn, false},
    {kMoe4HToH, "moe_4h_to_h", kRow, false},
    {kMoeGate, "moe_gate", kColumn, false},
    {kMoeRouter, "moe_router", kNone, false},
    {kMlpRouter, "mlp_router", kNone, false},
    {kMlpGateUp, "mlp_gate_up", kColumn, true},
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

std::optional<ModuleSizes> module_sizes(LoraModule module, const ModelShape& shape) {
  switch (module) {
    case kAttnQkv:
      return ModuleSizes{shape.hidden_size, shape.query_size() + 2 * shape.key_value_size()};
    case kAttnQ:
      return ModuleSizes{shape.hidden_size, shape.query_size()};
    case kAttnK:
    case kAttnV:
      return ModuleSizes{shape.hidden_size, shape.key_value_size()};
    case kAttnDense:
      return ModuleSizes{shape.query_size(), shape.hidden_size};
    case kMlpHTo4H:
    case kMlpGate:
      return ModuleSizes{shape.hidden_size, shape.intermediate_size};
    case kMlp4HToH:
      return ModuleSizes{shape.intermediate_size, shape.hidden_size};
    case kMlpGateUp:
      return ModuleSizes{shape.hidden_size, 2 * shape.intermediate_size};
    default:
      return std::nullopt;
  }
}

std::span<const LoraModule> parts_of(LoraModule module) {
  static constexpr std::array kQkvParts{kAttnQ, kAttnK, kAttnV};
  static constexpr std::array kGateUpParts{kMlpGate, kMlpHTo4H};
  switch (module) {
    case kAttnQkv:
      return kQkvParts;
    case kMlpGateUp:
      return kGateUpParts;
    default:
      return {&info_of(module).module, 1};
  }
}

}  // namespace adaptrt
