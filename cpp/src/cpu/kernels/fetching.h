#pragma once

#include <cstdint>

namespace adaptrt {
namespace {

/// Number of bytes that a panel is prefetched ahead of its use for few rows, where memory is the limit.
inline constexpr std::int64_t kStreamAhead = 4096;

/// How weights are prefetched for few rows, where memory is the limit.
struct Fetching {
  /// Cache level as for __builtin_prefetch: 3 is the first level, 2 the second.
  int locality = 3;
  /// True if a single tile of rows prefetches its own panel; otherwise the hardware prefetchers do. Several
  /// tiles, which multiply between two reads, always prefetch.
  bool for_one_tile = true;
  /// Number of steps of k in a part (256 bytes each). All tiles of rows are multiplied by a part before the
  /// next part, which is prefetched meanwhile. So two parts must fit in the cache level.
  std::int64_t part_steps = 64;
  /// Cache level for panels that are decoded while a few rows are multiplied, and the number of bytes that
  /// they are prefetched ahead of their use.
  int decoded_locality = 3;
  std::int64_t decoded_ahead = kStreamAhead;
};

}  // namespace
}  // namespace adaptrt
