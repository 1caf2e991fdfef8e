#include "adaptrt/gpu/gpu_model_description.h"

#include <algorithm>
#include <cstddef>
#include <string>

#include "adaptrt/lora/pack_adapter.h"

namespace adaptrt {
namespace {

class Checker {
 public:
  void positive(const std::string& name, std::int64_t value) {
    if (value < 1) problems_.add(name + " is " + std::to_string(value) + "; it must be at least 1");
  }
  void at_least(const std::string& name, std::int64_t value, const std::string& least_name,
                std::int64_t least) {
    if (value < least) {
      problems_.add(name + " is " + std::to_string(value) + ", less than " + least_name + " " +
                    std::to_string(least));
    }
  }
  void add(std::string problem) { problems_.add(std::move(problem)); }
  [[nodiscard]] Problems& problems() { return problems_; }

 private:
  Problems problems_;
};

void check_lora(const GpuModelDescription& model, Checker& check) {
  const LoraLayout& lora = model.lora;
  if (lora.sites.empty()) {
    if (model.num_adapter_slots != 0) check.add("there are adapter slots, but no LoRA sites");
    return;
  }
  // A step can have an adapter per sequence.
  check.at_least("num_adapter_slots", model.num_adapter_slots, "max_batch_size", model.max_batch_size);
  if (lora.dtype != model.dtype) check.add("the LoRA layout has another type than the model");
  if (lora.num_layers != model.num_layers) {
    check.add("the LoRA layout has " + std::to_string(lora.num_layers) + " layers, the model " +
              std::to_string(model.num_layers));
  }
  for (const LoraSite& site : lora.sites) {
    if (site.layer < 0 || (site.is_of_layer() && site.layer >= lora.num_layers)) {
      check.add("a LoRA site is of layer " + std::to_string(site.layer));
    }
  }
  try {
    static_cast<void>(SiteIndex(lora));
  } catch (const EngineError& error) {
    check.add(error.what());
  }
}

}  // namespace

Problems GpuModelDescription::validate() const {
  Checker check;
  if (dtype != DType::kFloat16 && dtype != DType::kBFloat16) {
    check.add("dtype is " + std::string(name_of(dtype)) + "; accepted: float16, bfloat16");
  }
  check.positive("vocab_size", vocab_size);
  check.positive("num_layers", num_layers);
  if (attention.size() != static_cast<std::size_t>(std::max(0, num_layers))) {
    check.add("attention has " + std::to_string(attention.size()) + " layers, the model " +
              std::to_string(num_layers));
  }
  for (const AttentionShape& shape : attention) {
    if (shape == AttentionShape{}) continue;
    check.positive("num_key_value_heads", shape.num_key_value_heads);
    check.positive("head_dim", shape.head_dim);
  }
  check.positive("max_batch_size", max_batch_size);
  check.positive("max_beam_width", max_beam_width);
  check.positive("max_num_tokens", max_num_tokens);
  check.positive("max_input_len", max_input_len);
  check.positive("max_seq_len", max_seq_len);
  check.positive("max_reusable_prompt_len", max_reusable_prompt_len);
  check.positive("tokens_per_block", tokens_per_block);
  check.positive("max_kv_blocks", max_kv_blocks);
  check.at_least("max_num_tokens", max_num_tokens, "max_batch_size", max_batch_size);
  check.at_least("prefill.max_tokens", prefill.max_tokens, "max_num_tokens", max_num_tokens);
  check.at_least("prefill.max_sequences", prefill.max_sequences, "max_batch_size", max_batch_size);
  check.positive("prefill.max_logit_rows", prefill.max_logit_rows);
  check.at_least("decode.max_tokens", decode.max_tokens, "max_batch_size", max_batch_size);
  check.at_least("decode.max_sequences", decode.max_sequences, "max_batch_size", max_batch_size);
  check.at_least("decode.max_logit_rows", decode.max_logit_rows, "max_batch_size", max_batch_size);
  check_lora(*this, check);
  return check.problems();
}

EngineInfo GpuModelDescription::engine_info(std::size_t kv_block_bytes) const {
  EngineInfo info{.dtype = dtype,
                  .vocab_size = vocab_size,
                  .num_layers = num_layers,
                  .max_batch_size = max_batch_size,
                  .max_num_tokens = max_num_tokens,
                  .max_input_len = max_input_len,
                  .max_seq_len = max_seq_len,
                  .max_beam_width = max_beam_width,
                  .tokens_per_block = tokens_per_block,
                  .kv_block_bytes = kv_block_bytes,
                  .max_reusable_prompt_len = max_reusable_prompt_len,
                  .lora = lora,
                  .state_bytes = state_bytes,
                  .finds_best_tokens = finds_best_tokens,
                  .finds_highest_logits = finds_highest_logits};
  info.has_adapter_start_positions = has_adapter_start_positions;
  info.lora.matrix_layout = MatrixLayout::kRows;
  info.lora.shifts_enabled = adds_shifts;
  return info;
}

}  // namespace adaptrt
