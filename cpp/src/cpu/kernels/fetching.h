#pragma once

#include <cstdint>

namespace adaptrt {
namespace {

/// How far ahead of its use a panel is fetched when the rows are few and memory is the limit.
inline constexpr std::int64_t kStreamAhead = 4096;

/// How the weights of a few rows, which memory is the limit of, are brought ahead of their use.
struct Fetching {
  /// Which cache they are fetched to, as __builtin_prefetch counts: 3 is the first level, 2 the second.
  int locality = 3;
  /// Whether a single tile of rows fetches its own panel; otherwise the caches' own prefetchers do. With more
  /// tiles, which multiply between two reads, it is always fetched.
  bool for_one_tile = true;
  /// Steps of k of a panel that all tiles take before they take the next: 256 bytes each. The next part is
  /// fetched meanwhile, so parts are what the cache that it is fetched to can hold beside another.
  std::int64_t part_steps = 64;
  /// The same of panels that are decoded while a few rows are multiplied, and how many bytes ahead of their
  /// use they are fetched.
  int decoded_locality = 3;
  std::int64_t decoded_ahead = kStreamAhead;
};

}  // namespace
}  // namespace adaptrt
