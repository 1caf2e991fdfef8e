#pragma once

// Spans of 16-bit activations, for products with integers of eight bits or fewer (Int16Gemm).

#include <algorithm>
#include <cstdint>

#include "adaptrt/core/quantized_panels.h"

namespace adaptrt {

/// Maximum number of inputs of a span. Sums of so many products fit in 32 bits: activations are at most
/// 32640, and integers differ from their zero points by at most 255, so a sum is at most 256 * 32640 * 255 <
/// 2^31.
inline constexpr std::int64_t kMaxSpanInputs = 256;

/// A span of a row's inputs: a quantisation group, or kMaxSpanInputs of it. The last one of a group may be
/// shorter. Begins at the first span of k inputs.
class InputSpan {
 public:
  InputSpan(const Quantization& how, std::int64_t k)
      : k_(k), size_(how.group_size == 0 ? k : how.group_size) {
    begin_group();
  }

  [[nodiscard]] std::int64_t first() const { return first_; }
  [[nodiscard]] std::int64_t end() const { return end_; }
  [[nodiscard]] std::int64_t index() const { return index_; }

  /// Moves to the next span, which is empty after the last one. Returns true if it begins a group.
  bool next() {
    ++index_;
    first_ = end_;
    if (first_ == group_end_) {
      begin_group();
      return true;
    }
    end_ = std::min(first_ + kMaxSpanInputs, group_end_);
    return false;
  }

 private:
  void begin_group() {
    group_end_ = std::min(first_ + size_, k_);
    end_ = std::min(first_ + kMaxSpanInputs, group_end_);
  }

  std::int64_t k_;
  std::int64_t size_;
  std::int64_t index_ = 0;
  std::int64_t first_ = 0;
  std::int64_t end_ = 0;
  std::int64_t group_end_ = 0;
};

/// Number of spans of k inputs.
[[nodiscard]] constexpr std::int64_t span_count(const Quantization& how, std::int64_t k) {
  const auto spans = [](std::int64_t inputs) { return (inputs + kMaxSpanInputs - 1) / kMaxSpanInputs; };
  if (how.group_size == 0) return spans(k);
  return k / how.group_size * spans(how.group_size) + spans(k % how.group_size);
}

/// Number of elements of a row of k inputs with its padding: words of panels have up to 32 inputs.
[[nodiscard]] constexpr std::int64_t padded_int16_inputs(std::int64_t k) {
  constexpr std::int64_t kMostWordInputs = 32;
  return (k + kMostWordInputs - 1) / kMostWordInputs * kMostWordInputs;
}

}  // namespace adaptrt
