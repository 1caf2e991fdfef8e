#pragma once

namespace adaptrt {
namespace {

/// How the weights of a few rows, which memory is the limit of, are brought ahead of their use.
struct Fetching {
  /// Which cache they are fetched to, as __builtin_prefetch counts: 3 is the first level, 2 the second.
  int locality = 3;
  /// Whether a single tile of rows fetches its own panel; otherwise the caches' own prefetchers do. With more
  /// tiles, which multiply between two reads, it is always fetched.
  bool for_one_tile = true;
};

}  // namespace
}  // namespace adaptrt
