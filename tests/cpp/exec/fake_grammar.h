#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "adaptrt/core/error.h"
#include "adaptrt/exec/executor.h"

namespace adaptrt::test {

inline constexpr TokenId kStopToken = 100;

/// The rule of FakeGrammar: every third token except the last one, shifted by the sum of the earlier tokens.
inline bool may_follow(TokenId token, std::int64_t sum) {
  return token != kStopToken && (token + sum) % 3 == 0;
}

/// Outputs of `length` tokens that follow the rule, and a stop token.
class FakeGrammar final : public GrammarState {
 public:
  FakeGrammar(int length, int broken_at, std::function<void()> in_mask)
      : length_(length), broken_at_(broken_at), in_mask_(std::move(in_mask)) {}

  void fill_mask(std::span<std::uint32_t> mask) override {
    in_mask_();
    std::ranges::fill(mask, 0U);
    for (TokenId token = 0; token <= kStopToken; ++token) {
      const bool allowed = accepted_ == length_ ? token == kStopToken : may_follow(token, sum_);
      if (allowed) mask[static_cast<std::size_t>(token / 32)] |= 1U << token % 32;
    }
  }
  void accept(std::int32_t token) override {
    if (accepted_ == broken_at_) throw StepError("it broke");
    sum_ += token;
    ++accepted_;
  }

 private:
  int length_;
  int broken_at_;
  std::function<void()> in_mask_;
  int accepted_ = 0;
  std::int64_t sum_ = 0;
};

/// A guide is a regular expression with the output's length. "bad" cannot be compiled, and "broken" refuses
/// the third token.
class FakeCompiler final : public GrammarCompiler {
 public:
  /// `in_mask` is called before each mask, on the thread that makes it.
  explicit FakeCompiler(std::function<void()> in_mask = [] {}) : in_mask_(std::move(in_mask)) {}

  std::unique_ptr<GrammarState> compile(const GuidedDecodingParams& params) override {
    if (params.guide == "bad") throw RequestError("the guide cannot be compiled: it is bad");
    if (params.guide == "broken") return std::make_unique<FakeGrammar>(9, 2, in_mask_);
    return std::make_unique<FakeGrammar>(std::stoi(*params.guide), -1, in_mask_);
  }
  /// True only for "1".
  bool has_compiled(const GuidedDecodingParams& params) override { return params.guide == "1"; }
  [[nodiscard]] std::span<const std::int32_t> stop_token_ids() const override { return stop_token_ids_; }

 private:
  std::function<void()> in_mask_;
  std::array<std::int32_t, 1> stop_token_ids_ = {kStopToken};
};

inline Request guided(Request request, std::string guide) {
  request.guided_decoding_params = {.guide_type = GuideType::kRegex, .guide = std::move(guide)};
  return request;
}

inline bool follows_the_rule(std::span<const TokenId> output) {
  std::int64_t sum = 0;
  for (const TokenId token : output) {
    if (!may_follow(token, sum)) return false;
    sum += token;
  }
  return true;
}

}  // namespace adaptrt::test
