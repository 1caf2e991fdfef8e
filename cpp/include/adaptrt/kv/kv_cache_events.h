#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <variant>
#include <vector>

#include "adaptrt/core/fields.h"
#include "adaptrt/kv/retention.h"

namespace adaptrt {

// TensorRT-LLM's events of a KV cache, with its names. They report blocks that can be reused: full blocks
// that a completed step has written.

/// Cache levels: the memory that steps read, and the second level.
inline constexpr std::int32_t kPrimaryLevel = 0;
inline constexpr std::int32_t kSecondaryLevel = 1;

/// The first event of an executor.
struct KVCacheCreatedData {
  std::vector<std::int64_t> num_blocks_per_cache_level;

  bool operator==(const KVCacheCreatedData&) const = default;
};

struct UniqueToken {
  std::int32_t token_id = 0;
  std::int32_t token_extra_id = 0;

  bool operator==(const UniqueToken&) const = default;
};

struct KVCacheStoredBlockData {
  std::uint64_t block_hash = 0;
  std::vector<UniqueToken> tokens;
  std::optional<std::uint64_t> lora_id;
  std::int32_t cache_level = kPrimaryLevel;
  std::int32_t priority = kDefaultRetentionPriority;
  std::optional<std::uint64_t> cache_salt_id;

  bool operator==(const KVCacheStoredBlockData&) const = default;
};

/// The parent of each block is the block before it; the parent of the first block is `parent_hash`.
struct KVCacheStoredData {
  std::optional<std::uint64_t> parent_hash;
  std::vector<KVCacheStoredBlockData> blocks;

  bool operator==(const KVCacheStoredData&) const = default;
};

struct KVCacheRemovedData {
  std::vector<std::uint64_t> block_hashes;

  bool operator==(const KVCacheRemovedData&) const = default;
};

struct KVCacheEventDiffInt {
  std::int32_t old_value = 0;
  std::int32_t new_value = 0;

  bool operator==(const KVCacheEventDiffInt&) const = default;
};

struct KVCacheUpdatedData {
  std::uint64_t block_hash = 0;
  std::optional<KVCacheEventDiffInt> cache_level;
  std::optional<KVCacheEventDiffInt> priority;

  bool operator==(const KVCacheUpdatedData&) const = default;
};

using KVCacheEventData =
    std::variant<KVCacheCreatedData, KVCacheStoredData, KVCacheRemovedData, KVCacheUpdatedData>;

struct KVCacheEvent {
  std::uint64_t event_id = 0;
  KVCacheEventData data;
  std::int32_t window_size = 0;
  std::optional<std::int32_t> attention_dp_rank;

  bool operator==(const KVCacheEvent&) const = default;
};

constexpr auto fields_of(const KVCacheCreatedData* /*type*/) {
  return FieldList{Field{"num_blocks_per_cache_level", &KVCacheCreatedData::num_blocks_per_cache_level,
                         "Number of blocks of the pool, then of the second level."}};
}

constexpr auto fields_of(const UniqueToken* /*type*/) {
  return FieldList{Field{"token_id", &UniqueToken::token_id, "The token."},
                   Field{"token_extra_id", &UniqueToken::token_extra_id,
                         "Always 0: block_hash already distinguishes prompt embeddings."}};
}

constexpr auto fields_of(const KVCacheStoredBlockData* /*type*/) {
  using C = KVCacheStoredBlockData;
  return FieldList{
      Field{"block_hash", &C::block_hash,
            "Hash of all tokens up to the block's end, the adapter and the cache salt. It is the same "
            "whenever the block is stored in this executor, and different after the adapter is replaced."},
      Field{"tokens", &C::tokens, "[tokens_per_block] of UniqueToken."},
      Field{"lora_id", &C::lora_id, "task_id of the adapter; None: the base model."},
      Field{"cache_level", &C::cache_level, "0: the pool."},
      Field{"priority", &C::priority, "Priority as in KvCacheRetentionConfig."},
      Field{"cache_salt_id", &C::cache_salt_id, "Request.cache_salt_id."}};
}

constexpr auto fields_of(const KVCacheStoredData* /*type*/) {
  using C = KVCacheStoredData;
  return FieldList{
      Field{"parent_hash", &C::parent_hash,
            "Hash of the block before the first one; None at the start of a prompt."},
      Field{"blocks", &C::blocks, "List of KVCacheStoredBlockData; each is the parent of the next."}};
}

constexpr auto fields_of(const KVCacheRemovedData* /*type*/) {
  return FieldList{Field{"block_hashes", &KVCacheRemovedData::block_hashes,
                         "Hashes of blocks that can no longer be reused."}};
}

constexpr auto fields_of(const KVCacheEventDiffInt* /*type*/) {
  using C = KVCacheEventDiffInt;
  return FieldList{Field{"old_value", &C::old_value, "Value before the change."},
                   Field{"new_value", &C::new_value, "Value after the change."}};
}

constexpr auto fields_of(const KVCacheUpdatedData* /*type*/) {
  using C = KVCacheUpdatedData;
  return FieldList{Field{"block_hash", &C::block_hash, "Hash of a stored block."},
                   Field{"cache_level", &C::cache_level, "KVCacheEventDiffInt; None: unchanged."},
                   Field{"priority", &C::priority, "KVCacheEventDiffInt; None: unchanged."}};
}

constexpr auto fields_of(const KVCacheEvent* /*type*/) {
  using C = KVCacheEvent;
  return FieldList{
      Field{"event_id", &C::event_id, "Counts from 0; a missing id means that events were dropped."},
      Field{"data", &C::data,
            "KVCacheCreatedData, KVCacheStoredData, KVCacheRemovedData or KVCacheUpdatedData."},
      Field{"window_size", &C::window_size, "The engine's max_seq_len: blocks are kept for all positions."},
      Field{"attention_dp_rank", &C::attention_dp_rank, "Always None: ranks never split a batch."}};
}

/// Passes events from the executor's thread, which records and flushes them, to any other thread.
class KVCacheEventManager {
 public:
  /// Maximum time to wait; nullopt: indefinitely.
  using Timeout = std::optional<std::chrono::nanoseconds>;

  /// Keeps the newest `max_size` events that no call has returned yet.
  KVCacheEventManager(std::size_t max_size, std::int32_t window_size)
      : max_size_(max_size), window_size_(window_size) {}

  /// Waits for events and returns all that were flushed since the last call, the oldest first. Returns none
  /// if the timeout passes or the executor has ended.
  [[nodiscard]] std::vector<KVCacheEvent> get_latest_events(Timeout timeout);
  /// True if no more events will come.
  [[nodiscard]] bool is_closed() const;

  // Only one thread may call the functions below.
  void record_created(std::vector<std::int64_t> num_blocks_per_cache_level);
  /// Extends the previous event if its last block is the parent; otherwise records a new one.
  void record_stored(std::optional<std::uint64_t> parent_hash, KVCacheStoredBlockData block);
  /// Extends the previous event if it is of the same kind; otherwise records a new one.
  void record_removed(std::uint64_t block_hash);
  /// Records a change of a block's retention priority. If the previous event stored the block, only the
  /// priority in that event changes.
  void record_priority(std::uint64_t block_hash, std::int32_t old_value, std::int32_t new_value);
  /// Records that a block moved from one cache level to another.
  void record_level(std::uint64_t block_hash, std::int32_t old_value, std::int32_t new_value);
  /// Makes the events that were recorded since the last call available to get_latest_events().
  void flush();
  void close();

 private:
  void record(KVCacheEventData data);
  [[nodiscard]] KVCacheStoredData* newest_stored();

  const std::size_t max_size_;
  const std::int32_t window_size_;
  std::uint64_t next_id_ = 0;
  std::vector<KVCacheEvent> pending_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<KVCacheEvent> events_;
  bool is_closed_ = false;
};

}  // namespace adaptrt
