#pragma once

#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <ostream>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "adaptrt/exec/executor.h"
#include "exec/active_sequence.h"
#include "fake_engine.h"
#include "fake_grammar.h"
#include "sequences.h"

namespace adaptrt::test {

namespace request_kinds {

/// Adds 1 to the logit of token 7.
class FakeProcessor final : public LogitsPostProcessor {
 public:
  std::shared_ptr<void> enter() override { return nullptr; }
  void process(PostProcessedRow& row) override { row.logits->at(7) += 1.0F; }
  void process_batch(std::span<PostProcessedRow> rows) override {
    for (PostProcessedRow& row : rows) process(row);
  }
  [[nodiscard]] bool equals(const LogitsPostProcessor& other) const override { return this == &other; }
};

/// A kind of request, and what its tokens need of their rows.
struct Kind {
  const char* name;
  RowNeed need;
  std::function<void(Request&)> set;
};

inline std::ostream& operator<<(std::ostream& out, const Kind& kind) {
  return out << kind.name;
}

inline constexpr RowNeed kLogits{};
inline constexpr RowNeed kBest{.kind = RowNeed::Kind::kBestToken};
constexpr RowNeed highest(std::int32_t count) {
  return {.kind = RowNeed::Kind::kHighest, .num_highest = count};
}

inline const std::vector<Kind> kKinds = {
    {"greedy", kBest, [](Request&) {}},
    {"top_k 1", kBest, [](Request& request) { request.sampling_config.top_k = 1; }},
    {"temperature 0", kBest,
     [](Request& request) {
       request.sampling_config.top_p = 0.9;
       request.sampling_config.temperature = 0.0;
     }},
    {"streaming", kBest, [](Request& request) { request.streaming = true; }},
    {"end id", kBest, [](Request& request) { request.end_id = 7; }},
    {"stop words", kBest, [](Request& request) { request.stop_words = {{{8}, {1, 2}}}; }},
    {"min_tokens without end id", kBest, [](Request& request) { request.sampling_config.min_tokens = 5; }},
    {"several sequences", kBest, [](Request& request) { request.num_return_sequences = 3; }},
    {"an adapter", kBest, [](Request& request) { request.lora_config = fake_adapter(3); }},
    {"lookahead", kBest,
     [](Request& request) {
       request.lookahead_config = {.max_window_size = 6, .max_ngram_size = 4, .max_verification_set_size = 4};
     }},
    {"drafts", kBest,
     [](Request& request) {
       auto drafts = expected_tokens(request.input_token_ids, 4);
       drafts.push_back(1);
       request.external_draft_tokens_config.emplace().tokens = std::move(drafts);
     }},
    {"top_k", highest(20),
     [](Request& request) {
       request.sampling_config.top_k = 20;
       request.sampling_config.temperature = 1.5;
     }},
    {"top_k and top_p", highest(50),
     [](Request& request) {
       request.sampling_config.top_k = 50;
       request.sampling_config.top_p = 0.7;
       request.sampling_config.top_p_decay = 0.9;
     }},
    {"top_k and log probs", highest(3),
     [](Request& request) {
       request.sampling_config.top_k = 3;
       request.output_config.return_log_probs = true;
     }},
    {"top_k and more log probs", highest(12),
     [](Request& request) {
       request.sampling_config.top_k = 3;
       request.output_config.top_log_probs = 12;
     }},
    {"top_k of all tokens", highest(101), [](Request& request) { request.sampling_config.top_k = 120; }},
    {"top_k of sequences", highest(9),
     [](Request& request) {
       request.sampling_config.top_k = 9;
       request.num_return_sequences = 3;
     }},
    {"top_k with drafts", highest(4),
     [](Request& request) {
       request.sampling_config.top_k = 4;
       request.sampling_config.temperature = 0.01;
       request.output_config.return_log_probs = true;
       request.external_draft_tokens_config.emplace().tokens = expected_tokens(request.input_token_ids, 6);
     }},
    {"top_p", kLogits, [](Request& request) { request.sampling_config.top_p = 0.7; }},
    {"min_p", kLogits, [](Request& request) { request.sampling_config.min_p = 0.1; }},
    {"top_k and a penalty", kLogits,
     [](Request& request) {
       request.sampling_config.top_k = 9;
       request.sampling_config.presence_penalty = 0.5;
     }},
    {"repetition penalty", kLogits,
     [](Request& request) { request.sampling_config.repetition_penalty = 1.5; }},
    {"presence penalty", kLogits, [](Request& request) { request.sampling_config.presence_penalty = 0.5; }},
    {"frequency penalty", kLogits, [](Request& request) { request.sampling_config.frequency_penalty = 0.5; }},
    {"no repeated n-grams", kLogits,
     [](Request& request) { request.sampling_config.no_repeat_ngram_size = 1; }},
    {"bad words", kLogits, [](Request& request) { request.bad_words = {{{3}}}; }},
    {"bias", kLogits,
     [](Request& request) {
       std::vector<float> bias(101);
       bias[3] = 9.0F;
       request.embedding_bias = bias_of(bias);
     }},
    {"log probs", highest(1), [](Request& request) { request.output_config.return_log_probs = true; }},
    {"top log probs", highest(2), [](Request& request) { request.output_config.top_log_probs = 2; }},
    {"generation logits", kLogits,
     [](Request& request) { request.output_config.return_generation_logits = true; }},
    {"a guide", kLogits, [](Request& request) { request = guided(std::move(request), "9"); }},
    {"a post-processor", kLogits,
     [](Request& request) {
       request.logits_post_processor = PostProcessorFunction{std::make_shared<FakeProcessor>()};
     }},
    {"beams", kLogits, [](Request& request) {
       request.sampling_config.beam_width = 2;
       request.sampling_config.beam_search_diversity_rate = 0.0;
     }}};

inline bool has_drafts(const Request& request) {
  return request.lookahead_config || request.external_draft_tokens_config;
}

/// Returns requests of all kinds; half of them are plain greedy ones.
inline std::vector<Request> draw_mixed_crowd(std::mt19937& random, int count) {
  const auto draw = [&](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
  std::vector<Request> crowd;
  for (int i = 0; i < count; ++i) {
    std::vector<TokenId> prompt;
    for (int left = draw(1, 30); left > 0; --left) prompt.push_back(draw(0, 3));
    Request request = make_request(std::move(prompt), draw(1, 20));
    request.sampling_config.seed = static_cast<std::uint64_t>(i);
    const auto kind = static_cast<std::size_t>(draw(0, 2 * static_cast<int>(kKinds.size()) - 1));
    if (kind < kKinds.size()) kKinds[kind].set(request);
    if (!request.has_beams() && !has_drafts(request) && draw(0, 3) == 0) request.streaming = true;
    if (draw(0, 7) == 0) request.output_config.return_prompt_log_probs = true;
    if (!request.lora_config && draw(0, 4) == 0) request.lora_config = fake_adapter(4);
    crowd.push_back(std::move(request));
  }
  return crowd;
}

inline void check_same_rows(const std::optional<FloatTensor>& found,
                            const std::optional<FloatTensor>& expected) {
  BOOST_TEST_REQUIRE(found.has_value() == expected.has_value());
  if (!found) return;
  BOOST_TEST((found->shape == expected->shape));
  BOOST_TEST((*found->values == *expected->values));
}

/// Checks that both lists have the same responses for each sequence, in the same order. With
/// `may_have_other_steps`, a sequence may get its tokens in fewer or more steps.
inline void check_same(const std::vector<Response>& found, const std::vector<Response>& expected,
                       bool may_have_other_steps = false) {
  std::map<std::int32_t, std::vector<const Result*>> expected_results;
  std::map<std::int32_t, std::vector<const Result*>> found_results;
  for (const Response& response : expected) {
    expected_results[response.result.sequence_index].push_back(&response.result);
  }
  for (const Response& response : found) {
    BOOST_TEST(response.error_msg == expected.front().error_msg);
    found_results[response.result.sequence_index].push_back(&response.result);
  }
  BOOST_TEST_REQUIRE(found.size() == expected.size());
  for (const auto& [index, results] : expected_results) {
    BOOST_TEST_REQUIRE(found_results[index].size() == results.size());
    for (std::size_t i = 0; i < results.size(); ++i) {
      const Result& one = *found_results[index][i];
      const Result& other = *results[i];
      BOOST_TEST((one.output_token_ids == other.output_token_ids));
      BOOST_TEST((one.finish_reasons == other.finish_reasons));
      BOOST_TEST((one.log_probs == other.log_probs));
      BOOST_TEST((one.cum_log_probs == other.cum_log_probs));
      BOOST_TEST((one.top_log_probs == other.top_log_probs));
      BOOST_TEST((one.prompt_log_probs == other.prompt_log_probs));
      BOOST_TEST((one.prompt_top_log_probs == other.prompt_top_log_probs));
      BOOST_TEST(one.is_sequence_final == other.is_sequence_final);
      if (!may_have_other_steps) BOOST_TEST(one.decoding_iter == other.decoding_iter);
      check_same_rows(one.generation_logits, other.generation_logits);
      check_same_rows(one.context_logits, other.context_logits);
    }
  }
}

}  // namespace request_kinds
}  // namespace adaptrt::test
