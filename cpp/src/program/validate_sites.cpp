// Validates the sites where adapters apply.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "validator.h"

namespace adaptrt {

const LoraSite* Validator::used_site(std::int32_t index) {
  if (index == -1) return nullptr;
  const auto& sites = program_.lora.sites;
  if (index < 0 || static_cast<std::size_t>(index) >= sites.size()) {
    add(where_ + ": lora_site is " + text(index) + " of " + std::to_string(sites.size()));
    return nullptr;
  }
  ++site_users_[static_cast<std::size_t>(index)];
  return &sites[static_cast<std::size_t>(index)];
}

void Validator::check_site(std::int32_t index, std::span<const LinearPart> parts) {
  const LoraSite* found = used_site(index);
  if (found == nullptr) return;
  const LoraSite& site = *found;
  if (site.parts.size() != parts.size()) {
    add(where_ + ": has " + std::to_string(parts.size()) + " parts, its lora_site " +
        std::to_string(site.parts.size()));
    return;
  }
  for (std::size_t i = 0; i < site.parts.size(); ++i) {
    if (site.parts[i].out_size != parts[i].weight.n || site.in_size != parts[i].weight.k) {
      add(where_ + ": part " + std::to_string(i) + " and its lora_site differ in size");
    }
  }
}

void Validator::check_norm_site(std::int32_t index, std::int64_t width) {
  const LoraSite* site = used_site(index);
  if (site == nullptr) return;
  if (!site->is_norm() || site->in_size != 1 || site->parts[0].out_size != width) {
    add(where_ + ": its lora_site " + text(index) + " is not that of a norm with a bias of " + text(width));
  }
}

void Validator::check_slices(std::int32_t index, LoraModule module, ModuleSizes sizes) {
  const auto& sites = program_.lora.sites;
  const bool is_lm_head = module == LoraModule::kLmHead;
  const std::int64_t tokens = is_lm_head ? sizes.out : sizes.in;
  const std::int64_t slices =
      (std::clamp<std::int64_t>(tokens, 0, kSizeLimit) + kVocabularySlice - 1) / kVocabularySlice;
  if (index < 0 || index + slices > std::ssize(sites)) {
    add(where_ + ": lora_site is " + text(index) + " and " + text(slices) + " slices of " +
        std::to_string(sites.size()) + " sites");
    return;
  }
  for (std::int64_t slice = 0; slice < slices; ++slice) {
    const auto at = static_cast<std::size_t>(index + slice);
    const LoraSite& site = sites[at];
    const std::int64_t count = std::min(kVocabularySlice, tokens - slice * kVocabularySlice);
    ++site_users_[at];
    const bool fits = site.parts.size() == 1 && site.parts[0].module == module && site.layer == slice &&
                      site.in_size == (is_lm_head ? sizes.in : count) &&
                      site.parts[0].out_size == (is_lm_head ? count : sizes.out);
    if (!fits) {
      add(where_ + ": lora site " + std::to_string(at) + " is not slice " + text(slice) + " of its " +
          std::string(info_of(module).name));
    }
  }
}

void Validator::check_new_tokens(std::int64_t hidden_size) {
  const std::int32_t site = new_tokens_site(program_.lora);
  if (site < 0 || program_.lora_site(site).in_size == hidden_size) return;
  add(where_ + ": the lora site of new tokens is of a hidden size " + text(program_.lora_site(site).in_size) +
      ", the layer of " + text(hidden_size));
}

}  // namespace adaptrt
