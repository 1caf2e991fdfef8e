#pragma once

#include <cstdint>

namespace adaptrt {
namespace {

/// Bytes ahead of its use at which a panel is prefetched if the rows are few and memory is the limit.
inline constexpr std::int64_t kStreamAhead = 4096;

/// How weights are prefetched for few rows, where memory is the limit.
struct Fetching {
  /// Cache level as for __builtin_prefetch: 3 is the first level, 2 the second.
  int locality = 3;
  /// True if a single tile of rows prefetches its own panel; otherwise the hardware prefetchers do. Several
  /// tiles, which multiply between two reads, always prefetch.
  bool for_one_tile = true;
  /// Steps of k (256 bytes each) by which all tiles are multiplied before the next part. The next part is
  /// prefetched during that time, so two parts must fit in the cache level.
  std::int64_t part_steps = 64;
  /// The same for panels that are decoded while a few rows are multiplied, and the number of bytes ahead of
  /// their use.
  int decoded_locality = 3;
  std::int64_t decoded_ahead = kStreamAhead;
};

}  // namespace
}  // namespace adaptrt
