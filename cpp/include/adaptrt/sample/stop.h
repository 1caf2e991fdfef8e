#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace adaptrt {

/// TensorRT-LLM's FinishReason.
enum class FinishReason : std::uint8_t {
  kNotFinished = 0,
  kEndId = 1,
  kStopWords = 2,
  kLength = 3,
  kTimedOut = 4,
  kCancelled = 5,
};

/// When a request has generated enough.
struct StopCriteria {
  std::optional<std::int32_t> end_id = std::nullopt;
  /// Token sequences, none empty. A match lies within the generated tokens (TensorRT-LLM's may begin in the
  /// prompt).
  std::vector<std::vector<std::int32_t>> stop_words = {};
  std::int32_t max_tokens = 0;

  /// To be asked after each generated token: kEndId, kStopWords, kLength (the first that holds) or
  /// kNotFinished.
  [[nodiscard]] FinishReason check(std::span<const std::int32_t> generated) const;
};

}  // namespace adaptrt
