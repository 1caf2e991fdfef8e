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

  bool operator==(const ReuseKey&) const = default;
  auto operator<=>(const ReuseKey&) const = default;
};

}  // namespace adaptrt
