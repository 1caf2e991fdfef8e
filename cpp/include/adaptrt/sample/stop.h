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

/// Conditions that end a request's generation.
struct StopCriteria {
  std::optional<std::int32_t> end_id = std::nullopt;
  /// Token sequences, none of them empty. A match must be within the generated tokens (in TensorRT-LLM it may
  /// start in the prompt).
  std::vector<std::vector<std::int32_t>> stop_words = {};
  std::int32_t max_tokens = 0;

  /// Call it after each generated token. Returns kEndId, kStopWords or kLength (the first that applies),
  /// otherwise kNotFinished.
  [[nodiscard]] FinishReason check(std::span<const std::int32_t> generated) const;
};

}  // namespace adaptrt
