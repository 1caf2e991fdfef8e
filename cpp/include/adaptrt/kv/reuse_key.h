#pragma once

#include <compare>
#include <cstdint>
#include <optional>

#include "adaptrt/core/sha256.h"

namespace adaptrt {

/// What, besides the tokens, KV must have in common to be shared.
struct ReuseKey {
  /// HostAdapter::generation() of the adapter that computed it; 0: the base model.
  std::uint64_t adapter_generation = 0;
  /// Request::cache_salt_id.
  std::optional<std::uint64_t> cache_salt = std::nullopt;
  /// Of that adapter, for events; nullopt: the base model.
  std::optional<std::uint64_t> task_id = std::nullopt;
  /// Of that adapter, where there is a second level: HostAdapter::content_digest(); else zeros.
  Sha256Digest adapter_digest = {};
  /// The position from which on the adapter acts. The base model computes what is before it.
  std::int32_t adapter_from = 0;

  /// That of the tokens before position `end`, which a block of KV ends with.
  [[nodiscard]] ReuseKey of_tokens_before(std::int32_t end) const {
    return end <= adapter_from ? ReuseKey{.cache_salt = cache_salt} : *this;
  }

  bool operator==(const ReuseKey&) const = default;
  auto operator<=>(const ReuseKey&) const = default;
};

}  // namespace adaptrt
