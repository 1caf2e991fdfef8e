#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "adaptrt/core/error.h"

namespace adaptrt {

/// TensorRT-LLM's GuidedDecodingParams::GuideType: how a guide describes texts.
enum class GuideType : std::uint8_t {
  kJson = 0,
  kJsonSchema = 1,
  kRegex = 2,
  kEbnfGrammar = 3,
  kStructuralTag = 4,
};

/// TensorRT-LLM's GuidedDecodingParams: what a request's output has to be like.
struct GuidedDecodingParams {
  GuideType guide_type = GuideType::kJson;
  std::optional<std::string> guide = std::nullopt;

  /// A guide that is missing, or that kJson has.
  [[nodiscard]] Problems validate() const;
  /// Throws RequestError with them: a guide that Python constructs is whole, as in TensorRT-LLM.
  void check_constructed() const;
  auto operator<=>(const GuidedDecodingParams&) const = default;
};

/// TensorRT-LLM's GuidedDecodingConfig::GuidedDecodingBackend.
enum class GuidedDecodingBackend : std::uint8_t { kXgrammar = 0, kLlguidance = 1 };

/// TensorRT-LLM's GuidedDecodingConfig: what makes masks of guides, for which tokenizer.
struct GuidedDecodingConfig {
  GuidedDecodingBackend backend = GuidedDecodingBackend::kLlguidance;  // kXgrammar is refused
  std::optional<std::vector<std::string>> encoded_vocab = std::nullopt;
  std::optional<std::string> tokenizer_str = std::nullopt;
  std::optional<std::vector<std::int32_t>> stop_token_ids = std::nullopt;

  [[nodiscard]] Problems validate() const;
  bool operator==(const GuidedDecodingConfig&) const = default;
};

}  // namespace adaptrt
