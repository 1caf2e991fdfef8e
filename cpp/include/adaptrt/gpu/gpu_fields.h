#pragma once

#include "adaptrt/core/fields.h"
#include "adaptrt/gpu/gpu_model_description.h"

namespace adaptrt {

constexpr auto fields_of(const GpuStepLimits* /*type*/) {
  using C = GpuStepLimits;
  return FieldList{
      RequiredField{"max_tokens", &C::max_tokens, "Maximum number of tokens in a step."},
      RequiredField{"max_sequences", &C::max_sequences, "Maximum number of sequences in a step."},
      RequiredField{"max_logit_rows", &C::max_logit_rows, "Maximum number of rows of logits of a step."}};
}
static_assert(lists_every_member<GpuStepLimits>());

constexpr auto fields_of(const GpuModelDescription* /*type*/) {
  using C = GpuModelDescription;
  return FieldList{
      RequiredField{"dtype", &C::dtype, "Type of the activations and of the KV pools."},
      Field{"int8_kv_cache", &C::int8_kv_cache, "True if the KV pools are int8."},
      RequiredField{"vocab_size", &C::vocab_size, "Number of tokens of the base model."},
      RequiredField{"num_layers", &C::num_layers, "Number of layers."},
      RequiredField{"attention", &C::attention, "Heads of each layer's attention."},
      RequiredField{"max_batch_size", &C::max_batch_size, "Maximum number of sequences in a step."},
      RequiredField{"max_num_tokens", &C::max_num_tokens, "Maximum number of tokens in a step."},
      RequiredField{"max_input_len", &C::max_input_len, "Maximum number of tokens in a prompt."},
      RequiredField{"max_seq_len", &C::max_seq_len,
                    "Maximum number of tokens in a sequence, new ones included."},
      Field{"max_beam_width", &C::max_beam_width, "Maximum beam width of a request."},
      RequiredField{"tokens_per_block", &C::tokens_per_block, "Number of tokens in a KV block."},
      RequiredField{"max_reusable_prompt_len", &C::max_reusable_prompt_len,
                    "Maximum length of a prompt whose KV blocks other requests may reuse."},
      RequiredField{"has_prompt_lengths", &C::has_prompt_lengths,
                    "True if the model reads the length of each sequence's prompt."},
      RequiredField{"max_kv_blocks", &C::max_kv_blocks,
                    "Maximum number of KV blocks that the model accepts."},
      RequiredField{"num_adapter_slots", &C::num_adapter_slots,
                    "Number of rows of the adapter tables; 0 without LoRA."},
      RequiredField{"prefill", &C::prefill, "Limits of any step."},
      RequiredField{"decode", &C::decode, "Limits of steps with one token per sequence."},
      RequiredField{"lora", &C::lora, "Adapters that the engine accepts."},
      Field{"finds_best_tokens", &C::finds_best_tokens,
            "True if the model finds the largest logit of each row on the device."},
      Field{"finds_highest_logits", &C::finds_highest_logits,
            "True if the model finds the highest logits of rows on the device."},
      Field{"skips_unused_adapters", &C::skips_unused_adapters,
            "True if the model does less work in steps without adapters."},
      Field{"has_adapter_start_positions", &C::has_adapter_start_positions,
            "True if adapters may begin at a position of a sequence."},
      Field{"adds_shifts", &C::adds_shifts,
            "True if adapters may have shifts: values that are added to outputs."},
      Field{"state_bytes", &C::state_bytes, "Bytes of the states that a sequence keeps, over all layers."}};
}
static_assert(lists_every_member<GpuModelDescription>());

}  // namespace adaptrt
