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

/// The draft engine of an executor, with its adapters and its work in each step.
class DraftTarget {
 public:
  static constexpr const char* kWithoutLora = "the draft engine was built without LoRA";

  /// Subtracts the host memory of this object and of allocate_kv_blocks() from `available_memory`. Throws
  /// ConfigError.
  DraftTarget(const DraftTargetDecodingConfig& config, std::shared_ptr<Engine> engine,
              std::int32_t max_batch_size, std::size_t& available_memory);

  /// Call it once, before the first draft(). Throws ConfigError if the memory cannot be allocated.
  void allocate_kv_blocks();
  /// Bytes that allocate_kv_blocks() will take on a device; 0 if the engine's memory is the host's.
  [[nodiscard]] std::size_t reserved_device_memory() const;

  [[nodiscard]] std::int32_t max_draft_len() const { return max_draft_len_; }
  /// Admits the request's adapter for the draft engine to its cache. Thread-safe. Returns nullptr if there is
  /// no adapter, or no room for it; then the request gets drafts without its adapter. `admissions` is the one
  /// of the request's list for lora_cache(), or nullptr without such a cache. Throws AdapterError.
  [[nodiscard]] static std::shared_ptr<const HostAdapter> admit(const Request& request,
                                                                AdapterAdmissions* admissions);
  /// The draft engine's adapters; nullptr for an engine without LoRA.
  [[nodiscard]] LoraCache* lora_cache() const { return lora_cache_.get(); }

  /// Makes drafts for running sequences that want them, at most as many as a step has room for.
  void draft(std::span<Sequence* const> running, std::int32_t max_rows_with_drafts);
  /// Releases the blocks of a sequence that no longer runs.
  void release(Sequence& sequence);
  [[nodiscard]] DraftEngine& engine() { return draft_engine_; }
  /// Call it when no step follows.
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

/// Throws ConfigError that lists why `draft` cannot draft for `target`.
void check_draft_target(const DraftTargetDecodingConfig& config, const EngineInfo& target,
                        const EngineInfo& draft);

/// Returns nullptr if none is configured. Throws ConfigError, also if only one of configuration and engine is
/// given.
[[nodiscard]] std::unique_ptr<DraftTarget> make_draft_target(const ExecutorConfig& config,
                                                             const EngineInfo& target,
                                                             std::shared_ptr<Engine> engine,
                                                             std::size_t& available_memory);

}  // namespace adaptrt
