#pragma once

// Prefetching during products on tile registers. Included after simd_*.h and gemm.h.

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace adaptrt {
namespace {

/// Prefetches a little with each step of a product.
class StepPrefetch {
 public:
  /// Prefetches nothing.
  StepPrefetch() = default;

  /// For many rows, where multiplying a panel takes long: prefetches `bytes` bytes from `next` on to the
  /// second-level cache, spread evenly over `steps` steps, and from several places at once.
  static StepPrefetch spread(const std::byte* next, std::int64_t bytes, std::int64_t steps) {
    StepPrefetch prefetch;
    if (next == nullptr || steps == 0) return prefetch;
    const auto address = reinterpret_cast<std::uintptr_t>(next);
    prefetch.spread_ = next - address % kGroupBytes;
    prefetch.groups_of_place_ = (bytes + kPlaces * kGroupBytes - 1) / (kPlaces * kGroupBytes);
    prefetch.steps_ = steps;
    prefetch.fetches_all_ = bytes / kCacheLine < kManyLines * steps;
    return prefetch;
  }

  /// For few rows, where memory is the limit: prefetches the panel [begin, begin + bytes) to the first-level
  /// cache, `ahead` bytes ahead of its use, and after it the first bytes of `next` unless it is nullptr.
  static StepPrefetch stream(const std::byte* begin, std::int64_t bytes, std::int64_t ahead,
                             const std::byte* next) {
    StepPrefetch prefetch;
    ahead = std::min(ahead, bytes);
    prefetch.near_ = begin + ahead;
    prefetch.near_lines_ = (bytes - ahead) / kCacheLine;
    if (next != nullptr) {
      prefetch.next_ = next;
      prefetch.next_lines_ = ahead / kCacheLine;
    }
    return prefetch;
  }

  /// The same. In addition, it prefetches `next` to the second-level cache, in four quarters at once: memory
  /// is faster with several streams.
  static StepPrefetch stream_in_quarters(const std::byte* begin, std::int64_t bytes, std::int64_t ahead,
                                         const std::byte* next) {
    StepPrefetch prefetch = stream(begin, bytes, ahead, next);
    for (int i = 0; next != nullptr && i < kQuarters; ++i) {
      prefetch.quarters_[i] = next + bytes / kQuarters * i;
    }
    return prefetch;
  }

  /// Prefetches the spans of `others` as well, `lines` lines with each step.
  void add_others(SpanFetcher* others, std::int64_t lines) {
    others_ = others;
    others_lines_ = lines;
  }

  /// Must be called with each kLines lines of a streamed panel.
  template <int kLines>
  __attribute__((always_inline)) void at_lines() {
    if (near_lines_ <= 0) {
      if (next_lines_ <= 0) return;
      near_ = next_;
      near_lines_ = next_lines_;
      next_lines_ = 0;
    }
    ADAPTRT_UNROLL
    for (int line = 0; line < kLines; ++line) {
      __builtin_prefetch(near_ + line * kCacheLine, 0, 3);
    }
    near_ += kLines * kCacheLine;
    near_lines_ -= kLines;
    if (quarters_[0] == nullptr) return;
    if constexpr (kLines < kQuarters) {
      for (int line = 0; line < kLines; ++line) {
        const std::byte*& quarter = quarters_[turn_++ % kQuarters];
        __builtin_prefetch(quarter, 0, 2);
        quarter += kCacheLine;
      }
      return;
    }
    for (const std::byte*& quarter : quarters_) {
      ADAPTRT_UNROLL
      for (int line = 0; line < kLines / kQuarters; ++line) {
        __builtin_prefetch(quarter + line * kCacheLine, 0, 2);
      }
      quarter += kLines / kQuarters * kCacheLine;
    }
  }

  /// Must be called with each step.
  void at_step() {
    if (others_ != nullptr) others_->fetch(others_lines_);
    for (due_ += kPlaces * groups_of_place_; due_ >= steps_; due_ -= steps_) fetch_group();
  }

 private:
  static constexpr int kQuarters = 4;
  /// If a step needs many lines, only half of each group is prefetched. The hardware prefetcher of the
  /// second-level cache fetches the other half, without the few line fill buffers that tile loads need.
  static constexpr std::int64_t kGroupLines = 4;
  static constexpr std::int64_t kGroupBytes = kGroupLines * kCacheLine;
  /// Minimum number of lines per step that counts as many.
  static constexpr std::int64_t kManyLines = 4;
  /// Number of places to read from at once; the hardware prefetcher continues in each.
  static constexpr std::int64_t kPlaces = 8;

  void fetch_group() {
    const std::int64_t group = fetched_ % kPlaces * groups_of_place_ + fetched_ / kPlaces;
    const std::byte* lines = spread_ + group * kGroupBytes;
    ADAPTRT_UNROLL
    for (std::int64_t line = 0; line < kGroupLines; ++line) {
      if (line < kGroupLines / 2 || fetches_all_) __builtin_prefetch(lines + line * kCacheLine, 0, 2);
    }
    ++fetched_;
  }

  const std::byte* spread_ = nullptr;
  std::int64_t groups_of_place_ = 0;
  std::int64_t fetched_ = 0;  ///< number of groups
  std::int64_t steps_ = 1;
  std::int64_t due_ = 0;  ///< number of groups to prefetch, times steps_
  bool fetches_all_ = false;
  const std::byte* near_ = nullptr;
  std::int64_t near_lines_ = 0;  ///< number of lines left from near_ on; then next_lines_ from next_ on
  const std::byte* next_ = nullptr;
  std::int64_t next_lines_ = 0;
  const std::byte* quarters_[kQuarters] = {};
  unsigned turn_ = 0;  ///< chooses the quarter, if a call prefetches fewer lines than there are quarters
  SpanFetcher* others_ = nullptr;
  std::int64_t others_lines_ = 0;
};

/// Adapter for kernels that use the interface of Prefetch.
template <int kLines>
inline void prefetch_lines(StepPrefetch* prefetch) {
  if constexpr (kLines > 0) prefetch->at_lines<kLines>();
}

}  // namespace
}  // namespace adaptrt
