#pragma once

#include <algorithm>
#include <compare>
#include <cstdint>
#include <iterator>
#include <optional>
#include <vector>

#include "adaptrt/core/sha256.h"

namespace adaptrt {

/// Digest of everything in a prompt except token ids, up to and including a position.
struct PrefixDigest {
  std::int32_t position = 0;
  Sha256Digest digest = {};
};
/// Sorted by position.
using PrefixDigests = std::vector<PrefixDigest>;

/// Values that must be equal, in addition to the tokens, before KV is shared.
struct ReuseKey {
  /// HostAdapter::generation() of the adapter that computed it; 0 for the base model.
  std::uint64_t adapter_generation = 0;
  /// Request::cache_salt_id.
  std::optional<std::uint64_t> cache_salt = std::nullopt;
  /// Task id of that adapter, for events; nullopt for the base model.
  std::optional<std::uint64_t> task_id = std::nullopt;
  /// HostAdapter::content_digest() of that adapter if there is a second level; otherwise zeros.
  Sha256Digest adapter_digest = {};
  /// First position at which the adapter is active. The base model computes the positions before it.
  std::int32_t adapter_from = 0;
  /// Digest of a request's prompt embeddings and of the ids that distinguish them, up to the block's end;
  /// zeros if there are none.
  Sha256Digest given_digest = {};
  /// Digests of the whole prompt, from which its blocks take their given_digest; nullptr: the prompt has
  /// none.
  const PrefixDigests* given = nullptr;

  /// Returns the key of the tokens before position `end`, which is the end of a block.
  [[nodiscard]] ReuseKey for_tokens_before(std::int32_t end) const {
    ReuseKey key = end <= adapter_from ? ReuseKey{.cache_salt = cache_salt} : *this;
    key.given = nullptr;
    if (given == nullptr) return key;
    const auto next = std::ranges::lower_bound(*given, end, {}, &PrefixDigest::position);
    if (next != given->begin()) key.given_digest = std::prev(next)->digest;
    return key;
  }

  bool operator==(const ReuseKey&) const = default;
  auto operator<=>(const ReuseKey&) const = default;
};

}  // namespace adaptrt
