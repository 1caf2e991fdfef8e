#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "adaptrt/core/error.h"

namespace adaptrt {

/// TensorRT-LLM's GuidedDecodingParams::GuideType: the language of a guide.
enum class GuideType : std::uint8_t {
  kJson = 0,
  kJsonSchema = 1,
  kRegex = 2,
  kEbnfGrammar = 3,
  kStructuralTag = 4,
};

/// TensorRT-LLM's GuidedDecodingParams: constraints on a request's output.
struct GuidedDecodingParams {
  GuideType guide_type = GuideType::kJson;
  std::optional<std::string> guide = std::nullopt;

  /// Reports a missing guide, and a guide given for kJson.
  [[nodiscard]] Problems validate() const;
  /// Throws RequestError with these problems: Python checks guides when it constructs them, like
  /// TensorRT-LLM.
  void check_constructed() const;
  auto operator<=>(const GuidedDecodingParams&) const = default;
};

/// TensorRT-LLM's GuidedDecodingConfig::GuidedDecodingBackend.
enum class GuidedDecodingBackend : std::uint8_t { kXgrammar = 0, kLlguidance = 1 };

/// TensorRT-LLM's GuidedDecodingConfig: the backend for guides, and its tokenizer.
struct GuidedDecodingConfig {
  GuidedDecodingBackend backend = GuidedDecodingBackend::kLlguidance;  // kXgrammar is refused
  std::optional<std::vector<std::string>> encoded_vocab = std::nullopt;
  std::optional<std::string> tokenizer_str = std::nullopt;
  std::optional<std::vector<std::int32_t>> stop_token_ids = std::nullopt;

  [[nodiscard]] Problems validate() const;
  bool operator==(const GuidedDecodingConfig&) const = default;
};

}  // namespace adaptrt
