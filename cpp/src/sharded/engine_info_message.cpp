#include "engine_info_message.h"

#include <span>
#include <string>
#include <type_traits>
#include <vector>

namespace adaptrt {
namespace {

// Both processes run the same build, so data without pointers is sent as raw bytes.
static_assert(std::is_trivially_copyable_v<LoraPart>);

/// Calls add(member) for each numeric member.
template <class Info, class Add>
void for_each_number(Info& info, const Add& add) {
  add(info.dtype);
  add(info.vocab_size);
  add(info.num_layers);
  add(info.max_batch_size);
  add(info.max_num_tokens);
  add(info.max_input_len);
  add(info.max_seq_len);
  add(info.max_beam_width);
  add(info.tokens_per_block);
  add(info.kv_block_bytes);
  add(info.max_reusable_prompt_len);
  add(info.num_stages);
  add(info.has_adapters_from);
  add(info.max_encoder_input_len);
  add(info.encoder_hidden_size);
  add(info.cross_kv_block_bytes);
  add(info.hidden_size);
  add(info.has_logits);
  add(info.has_kv_cache);
  add(info.num_token_types);
  add(info.lora.dtype);
  add(info.lora.num_layers);
  add(info.lora.max_rank);
  add(info.lora.dora_enabled);
  add(info.lora.matrix_layout);
  add(info.lora.shifts_enabled);
  add(info.lora.num_stages);
  add(info.lora.stage);
  add(info.lora.max_extra_tokens);
  add(info.lora.max_base_positions);
  add(info.lora.num_encoder_layers);
}

template <class Site, class Add>
void for_each_number_of_site(Site& site, const Add& add) {
  add(site.layer);
  add(site.in_size);
  add(site.expert);
  add(site.first_input);
  add(site.inputs_elsewhere);
  add(site.adds_shifts);
  add(site.experts_for_each);
  add(site.num_shares);
  add(site.share);
}

}  // namespace

void add_info(const EngineInfo& info, MessageWriter* message) {
  const auto add = [&](const auto& number) { message->add(number); };
  for_each_number(info, add);
  message->add_list(std::span<const char>(info.kernels));
  message->add_list(std::span<const std::int32_t>(info.attention_windows));
  message->add_list(std::span<const LoraModule>(info.lora.target_modules));
  message->add_list(std::span<const std::int32_t>(info.lora.rotary_factors));
  message->add(static_cast<std::uint64_t>(info.lora.sites.size()));
  for (const LoraSite& site : info.lora.sites) {
    for_each_number_of_site(site, add);
    message->add_list(std::span<const LoraPart>(site.parts));
  }
}

EngineInfo read_info(MessageReader* message) {
  EngineInfo info;
  const auto read = [&](auto& number) { number = message->number<std::decay_t<decltype(number)>>(); };
  for_each_number(info, read);
  const std::vector<char> kernels = message->list<char>();
  info.kernels.assign(kernels.begin(), kernels.end());
  info.attention_windows = message->list<std::int32_t>();
  info.lora.target_modules = message->list<LoraModule>();
  info.lora.rotary_factors = message->list<std::int32_t>();
  const auto num_sites = message->number<std::uint64_t>();
  for (std::uint64_t i = 0; i < num_sites; ++i) {
    LoraSite& site = info.lora.sites.emplace_back();
    for_each_number_of_site(site, read);
    site.parts = message->list<LoraPart>();
  }
  return info;
}

}  // namespace adaptrt
