#pragma once

// Included after simd_*.h and gemm.h.

#include <cstddef>
#include <cstdint>

#include "adaptrt/core/quantized_panels.h"
#include "gemm.h"

namespace adaptrt {
namespace {

/// Prefetches a panel that is decoded while a few rows are multiplied, and then the beginning of the data
/// after it. Simd::kFetching says how far ahead.
class PanelStream {
 public:
  /// Prefetches `steps` steps from `begin` on, `step_bytes` apart. `next`: data that is read afterwards, with
  /// steps as far apart; nullptr if it is unknown.
  PanelStream(const std::byte* begin, std::int64_t steps, std::int64_t step_bytes, const std::byte* next)
      : step_bytes_(step_bytes) {
    const std::int64_t ahead = Simd::kFetching.decoded_ahead / step_bytes;
    if (next == nullptr || ahead < steps) {
      from_ = begin + ahead * step_bytes;
      steps_left_ = steps - ahead;
      next_ = next;
    } else {
      from_ = next;
    }
  }

  template <int kLines>
  void fetch_step() {
    ADAPTRT_UNROLL
    for (int line = 0; line < kLines; ++line) {
      __builtin_prefetch(from_ + line * kCacheLine, 0, Simd::kFetching.decoded_locality);
    }
    from_ += step_bytes_;
    if (--steps_left_ == 0 && next_ != nullptr) from_ = next_;
  }

 private:
  const std::byte* from_ = nullptr;
  std::int64_t step_bytes_ = 0;
  std::int64_t steps_left_ = 0;  ///< number of steps before next_
  const std::byte* next_ = nullptr;
};

/// Returns the stream for a group of whole vectors of columns of a panel with `width` columns, from `column`
/// on. The next group or the next panel is read after it. A column has `column_bytes` bytes of each line.
inline PanelStream stream_of_columns(const QuantizedPanel& panel, std::int64_t column, std::int64_t width,
                                     std::int64_t column_bytes, const std::byte* next_panel) {
  constexpr std::int64_t kGroup = kTileVectors * Simd::kLanes;
  const std::byte* begin = panel.weights + column * column_bytes;
  const bool is_last = column + 2 * kGroup > width;
  return {begin, (panel.scales - panel.weights) / (width * column_bytes), width * column_bytes,
          is_last ? next_panel : begin + kGroup * column_bytes};
}

template <int kLines>
inline void prefetch_lines(PanelStream* stream) {
  if constexpr (kLines > 0) stream->fetch_step<kLines>();
}

}  // namespace
}  // namespace adaptrt
