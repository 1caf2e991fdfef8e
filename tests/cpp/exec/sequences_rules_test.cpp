// A request's token rules apply to each of its sequences, as if it were alone.

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "sequences.h"

namespace adaptrt::test::sequences_rules_test {
namespace {

/// Forbids all tokens up to the newest one, and counts its rows.
class AscendingTokens final : public LogitsPostProcessor {
 public:
  std::shared_ptr<void> enter() override { return nullptr; }
  void process(PostProcessedRow& row) override {
    ++rows_by_length[row.tokens.size()];
    const TokenId newest = row.tokens.size() == kPrompt.size() ? 0 : row.tokens.back();
    if (newest > fails_above) row.error = "too large";
    std::fill_n(row.logits->begin(), newest + 1, -std::numeric_limits<float>::infinity());
  }
  void process_batch(std::span<PostProcessedRow> rows) override {
    for (auto& row : rows) process(row);
    rows_of_batches.insert(rows.size());
  }
  [[nodiscard]] bool equals(const LogitsPostProcessor& other) const override { return this == &other; }

  TokenId fails_above = 1000;
  std::map<std::size_t, int> rows_by_length;
  std::set<std::size_t> rows_of_batches;
};

BOOST_AUTO_TEST_SUITE(sequences_rules)

BOOST_AUTO_TEST_CASE(each_sequence_has_its_own_guide) {
  const auto executor = make_guided();
  for (const std::int32_t length : {0, 1, 7}) {
    const auto request = guided(several(sampled(kPrompt, 10, 11), 4), std::to_string(length));
    const auto results = results_of(*executor, executor->enqueue_request(request));
    const auto expected = each_alone(request);
    BOOST_TEST_REQUIRE(results.size() == 4U);
    for (const auto& [index, of_sequence] : results) {
      const auto tokens = tokens_of(of_sequence);
      BOOST_TEST(tokens.size() == static_cast<std::size_t>(length));
      BOOST_TEST(follows_the_rule(tokens));
      BOOST_TEST(tokens == expected.at(static_cast<std::size_t>(index)), boost::test_tools::per_element());
      BOOST_TEST((of_sequence.back().finish_reasons.at(0) == FinishReason::kEndId));
    }
    BOOST_TEST((length < 7 || tokens_of(results.at(0)) != tokens_of(results.at(1))));
  }
  const auto broken = guided(several(sampled(kPrompt, 10, 11), 4), "broken");
  const auto responses = collect(*executor, executor->enqueue_request(broken));
  BOOST_TEST_REQUIRE(responses.size() == 1U);
  BOOST_TEST(responses[0].error_msg == "guided decoding: it broke");
}

BOOST_AUTO_TEST_CASE(a_post_processor_sees_each_sequence) {
  for (const bool is_batched : {false, true}) {
    const auto processor = std::make_shared<AscendingTokens>();
    ExecutorConfig config;
    config.logits_post_processor_config.emplace().processor_batched = PostProcessorFunction{processor};
    const auto executor = make_executor(config);
    auto request = several(sampled(kPrompt, 3, 11), 3);
    if (is_batched) {
      request.logits_post_processor_name = kBatchedPostProcessorName;
    } else {
      request.logits_post_processor = PostProcessorFunction{processor};
    }
    const auto results = results_of(*executor, executor->enqueue_request(request));
    BOOST_TEST_REQUIRE(results.size() == 3U);
    const std::map<std::size_t, int> each_once = {{7, 3}, {8, 3}, {9, 3}};
    BOOST_TEST((processor->rows_by_length == each_once));
    if (is_batched) BOOST_TEST((processor->rows_of_batches == std::set<std::size_t>{3}));
    request.logits_post_processor_name.reset();
    request.logits_post_processor = PostProcessorFunction{processor};
    const auto expected = each_alone(request);
    for (const auto& [index, of_sequence] : results) {
      const auto tokens = tokens_of(of_sequence);
      BOOST_TEST((tokens[0] < tokens[1] && tokens[1] < tokens[2]));
      BOOST_TEST(tokens == expected.at(static_cast<std::size_t>(index)), boost::test_tools::per_element());
    }
  }
}

BOOST_AUTO_TEST_CASE(a_post_processor_that_fails_for_one_sequence_ends_all) {
  const auto plain = several(sampled(kPrompt, 4, 11), 3);
  std::vector<TokenId> first_tokens;
  for (const auto& tokens : each_alone(plain)) first_tokens.push_back(tokens[0]);
  std::ranges::sort(first_tokens);
  BOOST_TEST_REQUIRE(first_tokens[1] < first_tokens[2]);
  const auto processor = std::make_shared<AscendingTokens>();
  processor->fails_above = first_tokens[1];
  auto request = plain;
  request.logits_post_processor = PostProcessorFunction{processor};
  const auto executor = make_executor();
  const auto ids = executor->enqueue_requests({request, make_request(kPrompt, 5)});
  const auto responses = collect(*executor, ids[0]);
  BOOST_TEST_REQUIRE(responses.size() == 1U);
  BOOST_TEST(responses[0].error_msg == "too large");
  BOOST_TEST(collect_result(*executor, ids[1]).output_token_ids.at(0) == expected_tokens(kPrompt, 5),
             boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(top_p_decays_in_each_sequence_alone) {
  auto request = several(sampled(kPrompt, 10, 11), 4);
  request.sampling_config.top_k.reset();
  request.sampling_config.top_p = 0.9;
  request.sampling_config.top_p_decay = 0.6;
  request.sampling_config.top_p_reset_ids = each_alone(request)[2][3];
  const auto executor = make_executor();
  const auto results = results_of(*executor, executor->enqueue_request(request));
  const auto expected = each_alone(request);
  for (const auto& [index, of_sequence] : results)
    BOOST_TEST(tokens_of(of_sequence) == expected.at(static_cast<std::size_t>(index)),
               boost::test_tools::per_element());
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::test::sequences_rules_test
