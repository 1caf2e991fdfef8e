#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "adaptrt/draft_engine/draft_engine.h"
#include "adaptrt/engine/engine.h"
#include "adaptrt/exec/config.h"
#include "adaptrt/exec/request.h"
#include "adaptrt/lora/lora_cache.h"
#include "adaptrt/sched/scheduler.h"

namespace adaptrt {

class AdapterAdmissions;

/// The draft engine of an executor, its adapters, and its part in each step.
class DraftTarget {
 public:
  /// Takes what it and allocate_kv_blocks() allocate on the host from `available_memory`. Throws ConfigError.
  DraftTarget(const DraftTargetDecodingConfig& config, std::shared_ptr<Engine> engine,
              std::int32_t max_batch_size, std::size_t& available_memory);

  /// Once, before the first draft(). Throws ConfigError when memory is refused.
  void allocate_kv_blocks();
  /// Bytes that allocate_kv_blocks() will take on a device; 0 if the engine's memory is the host's.
  [[nodiscard]] std::size_t reserved_device_memory() const;

  [[nodiscard]] std::int32_t max_draft_len() const { return max_draft_len_; }
  /// For any thread: the request's adapter for the draft engine, admitted to its cache; nullptr when it has
  /// none, or when there is no room for it, which costs the request its adapter's drafts. `admissions` is
  /// that of the request's list over lora_cache(), nullptr where there is no such cache. Throws AdapterError.
  [[nodiscard]] static std::shared_ptr<const HostAdapter> admit(const Request& request,
                                                                AdapterAdmissions* admissions);
  /// The draft engine's adapters; nullptr for an engine without LoRA.
  [[nodiscard]] LoraCache* lora_cache() const { return lora_cache_.get(); }

  /// Has drafts made for those of the running sequences that want some, as many as a step has room for.
  void draft(std::span<Sequence* const> running, std::int32_t max_rows_with_drafts);
  /// Of a sequence that does not run any more.
  void release(Sequence& sequence);
  [[nodiscard]] DraftEngine& engine() { return draft_engine_; }
  /// When no step follows.
  void end_steps() { engine_->end_steps(); }
  [[nodiscard]] bool has_device_memory() const { return engine_->free_device_memory().has_value(); }

 private:
  std::shared_ptr<Engine> engine_;
  std::int32_t max_draft_len_;
  std::unique_ptr<LoraCache> lora_cache_;
  std::int32_t num_kv_blocks_;
  DraftEngine draft_engine_;
  std::vector<DraftTask> tasks_;
};

/// nullptr where the configuration has none. Throws ConfigError, also when there is a configuration and no
/// engine, or the other way round.
[[nodiscard]] std::unique_ptr<DraftTarget> make_draft_target(const ExecutorConfig& config,
                                                             const EngineInfo& target,
                                                             std::shared_ptr<Engine> engine,
                                                             std::size_t& available_memory);

}  // namespace adaptrt
