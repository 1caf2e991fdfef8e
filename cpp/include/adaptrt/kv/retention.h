#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/core/fields.h"

namespace adaptrt {

/// Priority of blocks without a retention config.
inline constexpr std::int32_t kDefaultRetentionPriority = 35;
inline constexpr std::int32_t kMaxRetentionPriority = 100;

/// Retention of a block that no table uses: blocks of a lower priority are evicted first.
struct BlockRetention {
  std::int32_t priority = kDefaultRetentionPriority;
  /// Duration from the end of the block's last use; after it the priority is the default one. nullopt:
  /// indefinitely.
  std::optional<std::chrono::milliseconds> duration = std::nullopt;

  bool operator==(const BlockRetention&) const = default;
};

/// TensorRT-LLM's KvCacheRetentionConfig.TokenRangeRetentionConfig.
struct TokenRangeRetentionConfig {
  std::int32_t token_start = 0;
  std::optional<std::int32_t> token_end = std::nullopt;
  std::int32_t priority = kDefaultRetentionPriority;
  std::optional<std::chrono::milliseconds> duration_ms = std::nullopt;

  bool operator==(const TokenRangeRetentionConfig&) const = default;
};

constexpr auto fields_of(const TokenRangeRetentionConfig* /*type*/) {
  using C = TokenRangeRetentionConfig;
  return FieldList{
      Field{"token_start", &C::token_start, "First token of the range in the prompt."},
      Field{"token_end", &C::token_end, "Token after the last one of the range; None: the prompt's end."},
      Field{"priority", &C::priority, "0 to 100; blocks of a lower priority are evicted first."},
      Field{"duration_ms", &C::duration_ms,
            "Time without use (timedelta or milliseconds) after which the priority becomes the default, 35. "
            "None: never."}};
}

/// TensorRT-LLM's KvCacheRetentionConfig. A block gets the priority of the range that contains its first
/// token. Without such a range it keeps its priority, initially the default.
struct KvCacheRetentionConfig {
  std::vector<TokenRangeRetentionConfig> token_range_retention_configs = {};
  std::int32_t decode_retention_priority = kDefaultRetentionPriority;
  std::optional<std::chrono::milliseconds> decode_duration_ms = std::nullopt;

  bool operator==(const KvCacheRetentionConfig&) const = default;

  [[nodiscard]] Problems validate() const;
  /// Returns the retention of the block whose first token is at this position; nullopt if the config sets
  /// none. The config must be valid.
  [[nodiscard]] std::optional<BlockRetention> for_block(std::int32_t first_token,
                                                        std::int32_t prompt_length) const;
};

constexpr auto fields_of(const KvCacheRetentionConfig* /*type*/) {
  using C = KvCacheRetentionConfig;
  return FieldList{Field{"token_range_retention_configs", &C::token_range_retention_configs,
                         "Ranges of the prompt's tokens, which must not overlap."},
                   Field{"decode_retention_priority", &C::decode_retention_priority,
                         "Priority of blocks that begin with a generated token, 0 to 100."},
                   Field{"decode_duration_ms", &C::decode_duration_ms,
                         "The same as a range's duration_ms, for these blocks."}};
}

}  // namespace adaptrt
