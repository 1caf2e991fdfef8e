#include "adaptrt/kv/retention.h"

#include <algorithm>
#include <string>

namespace adaptrt {

namespace {

void check_priority(Problems& problems, const std::string& name, std::int32_t priority) {
  if (priority >= 0 && priority <= kMaxRetentionPriority) return;
  problems.add(name + " is " + std::to_string(priority) + "; accepted: 0 to " +
               std::to_string(kMaxRetentionPriority));
}

void check_duration(Problems& problems, const std::string& name,
                    std::optional<std::chrono::milliseconds> duration) {
  if (!duration || duration->count() > 0) return;
  problems.add(name + " is " + std::to_string(duration->count()) + "; accepted: 1 or more");
}

}  // namespace

Problems KvCacheRetentionConfig::validate() const {
  Problems problems;
  std::vector<const TokenRangeRetentionConfig*> ranges;
  for (std::size_t i = 0; i < token_range_retention_configs.size(); ++i) {
    const TokenRangeRetentionConfig& range = token_range_retention_configs[i];
    const std::string name = "token_range_retention_configs[" + std::to_string(i) + "].";
    if (range.token_start < 0) {
      problems.add(name + "token_start is " + std::to_string(range.token_start) + "; accepted: 0 or more");
    }
    if (range.token_end && *range.token_end <= range.token_start) {
      problems.add(name + "token_end is " + std::to_string(*range.token_end) +
                   "; accepted: more than token_start, which is " + std::to_string(range.token_start));
    }
    check_priority(problems, name + "priority", range.priority);
    check_duration(problems, name + "duration_ms", range.duration_ms);
    ranges.push_back(&range);
  }
  std::ranges::sort(ranges, {}, &TokenRangeRetentionConfig::token_start);
  for (std::size_t i = 0; i + 1 < ranges.size(); ++i) {
    if (ranges[i]->token_end && *ranges[i]->token_end <= ranges[i + 1]->token_start) continue;
    problems.add("token_range_retention_configs: the ranges that start at " +
                 std::to_string(ranges[i]->token_start) + " and " +
                 std::to_string(ranges[i + 1]->token_start) + " overlap");
  }
  check_priority(problems, "decode_retention_priority", decode_retention_priority);
  check_duration(problems, "decode_duration_ms", decode_duration_ms);
  return problems;
}

std::optional<BlockRetention> KvCacheRetentionConfig::for_block(std::int32_t first_token,
                                                                std::int32_t prompt_length) const {
  if (first_token >= prompt_length) return BlockRetention{decode_retention_priority, decode_duration_ms};
  for (const TokenRangeRetentionConfig& range : token_range_retention_configs) {
    if (first_token >= range.token_start && (!range.token_end || first_token < *range.token_end)) {
      return BlockRetention{range.priority, range.duration_ms};
    }
  }
  return std::nullopt;
}

}  // namespace adaptrt
