#include "draft_target.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "active_sequence.h"
#include "adapter_admissions.h"
#include "adaptrt/core/error.h"
#include "pools.h"

namespace adaptrt {
namespace {

/// The draft engine's KV pool gets 1 / kShareOfMemory of the free memory if its size is not configured.
constexpr std::size_t kShareOfMemory = 8;

/// Makes the cache without load workers: no request waits for drafts, and they are only made if their adapter
/// is already loaded.
std::unique_ptr<LoraCache> make_draft_cache(const PeftCacheConfig& config, Engine& engine,
                                            std::int32_t max_batch_size, std::size_t& available_memory) {
  if (engine.info().lora.sites.empty()) return nullptr;
  return make_lora_cache(config, engine, max_batch_size, available_memory, 0, {});
}

std::int32_t count_blocks(const DraftTargetDecodingConfig& config, Engine& engine,
                          std::int32_t max_batch_size, std::size_t& available_memory) {
  const EngineInfo& info = engine.info();
  const auto on_device = engine.free_device_memory();
  const std::size_t per_sequence =
      static_cast<std::size_t>((info.max_seq_len + info.tokens_per_block - 1) / info.tokens_per_block);
  std::size_t num_blocks =
      per_sequence * static_cast<std::size_t>(std::min(max_batch_size, info.max_batch_size));
  if (config.kv_cache_size) {
    num_blocks = *config.kv_cache_size / info.kv_block_bytes;
  } else {
    const std::size_t affordable =
        on_device.value_or(available_memory) / kShareOfMemory / info.kv_block_bytes;
    num_blocks = std::max(std::size_t{1}, std::min(num_blocks, affordable));
  }
  num_blocks = std::min(num_blocks, static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max()));
  if (!on_device) available_memory -= std::min(available_memory, num_blocks * info.kv_block_bytes);
  return static_cast<std::int32_t>(num_blocks);
}

}  // namespace

DraftTarget::DraftTarget(const DraftTargetDecodingConfig& config, std::shared_ptr<Engine> engine,
                         std::int32_t max_batch_size, std::size_t& available_memory)
    : engine_(std::move(engine)),
      max_draft_len_(config.max_draft_len),
      lora_cache_(make_draft_cache(config.peft_cache_config, *engine_, max_batch_size, available_memory)),
      num_kv_blocks_(count_blocks(config, *engine_, max_batch_size, available_memory)),
      draft_engine_(*engine_, lora_cache_.get(), num_kv_blocks_, max_draft_len_) {
  tasks_.reserve(static_cast<std::size_t>(max_batch_size));
}

void DraftTarget::allocate_kv_blocks() {
  engine_->allocate_kv_blocks(num_kv_blocks_);
}

std::size_t DraftTarget::reserved_device_memory() const {
  return has_device_memory() ? static_cast<std::size_t>(num_kv_blocks_) * engine_->info().kv_block_bytes : 0;
}

std::shared_ptr<const HostAdapter> DraftTarget::admit(const Request& request, AdapterAdmissions* admissions) {
  if (!request.draft_lora_config) return nullptr;
  if (admissions == nullptr) {
    throw AdapterError(std::string("draft_lora_config is given; accepted: None, ") + kWithoutLora);
  }
  try {
    return admissions->admit(*request.draft_lora_config);
  } catch (const LoraCacheFullError&) {
    return nullptr;
  }
}

void DraftTarget::draft(std::span<Sequence* const> running, std::int32_t max_rows_with_drafts) {
  tasks_.clear();
  for (Sequence* const sequence : running) {
    auto& active = static_cast<ActiveSequence&>(*sequence);
    if (active.num_drafts_wanted() == 0 || !active.is_decoding()) continue;
    tasks_.push_back({.sequence = &active.draft_sequence(),
                      .text = active.tokens,
                      .prompt_length = active.prompt_length,
                      .most = active.num_drafts_wanted(),
                      .drafts = &active.drafts});
  }
  const auto num_rows = static_cast<std::int32_t>(max_rows_with_drafts - std::ssize(running));
  if (tasks_.empty() || num_rows < 1) return;
  // One draft of each sequence in turn, as in the scheduler; drafts that it would not take are not made.
  const auto num_tasks = std::min(tasks_.size(), static_cast<std::size_t>(num_rows));
  tasks_.resize(num_tasks);
  const std::int32_t most =
      (num_rows + static_cast<std::int32_t>(num_tasks) - 1) / static_cast<std::int32_t>(num_tasks);
  for (DraftTask& task : tasks_) task.most = std::min(task.most, most);
  draft_engine_.draft(tasks_);
  for (Sequence* const sequence : running) {
    auto& active = static_cast<ActiveSequence&>(*sequence);
    if (active.num_drafts_wanted() > 0 && !active.drafts.empty()) active.take_drafts_of_engine();
  }
}

void DraftTarget::release(Sequence& sequence) {
  draft_engine_.release(static_cast<ActiveSequence&>(sequence).draft_sequence());
}

void check_draft_target(const DraftTargetDecodingConfig& config, const EngineInfo& target,
                        const EngineInfo& draft) {
  config.validate(target, draft).throw_if_any<ConfigError>("ExecutorConfig: draft_target_decoding_config");
}

std::unique_ptr<DraftTarget> make_draft_target(const ExecutorConfig& config, const EngineInfo& target,
                                               std::shared_ptr<Engine> engine,
                                               std::size_t& available_memory) {
  const auto& draft = config.draft_target_decoding_config;
  if (!draft && engine == nullptr) return nullptr;
  if (!draft || engine == nullptr) {
    throw ConfigError(draft
                          ? "draft_target_decoding_config is given; accepted: None, there is no draft engine"
                          : "draft_target_decoding_config is None; accepted: that of the draft engine");
  }
  check_draft_target(*draft, target, engine->info());
  return std::make_unique<DraftTarget>(
      *draft, std::move(engine), config.max_batch_size.value_or(target.max_batch_size), available_memory);
}

}  // namespace adaptrt
