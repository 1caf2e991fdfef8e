// Scores that compare beams: log probs after the sampling constraints.

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/sample/beam_search.h"
#include "adaptrt/sample/sampler.h"
#include "reference_sampler.h"

namespace adaptrt::testing::score_tokens_test {
namespace {

constexpr std::int32_t kPromptLength = 3;
const Tokens kTokens = {4, 7, 4, 9, 7, 9, 2};

Row log_softmax_of(const Row& logits, double temperature = 1.0) {
  double sum = 0.0;
  for (const float logit : logits) sum += std::exp(double{logit} / temperature);
  Row row;
  for (const float logit : logits)
    row.push_back(static_cast<float>(double{logit} / temperature - std::log(sum)));
  return row;
}

SamplerState state_of(const SamplingConfig& config, TokenConstraints constraints = {}) {
  return SamplerState(resolve(config), std::move(constraints), kPromptLength, 100);
}

std::vector<ScoredToken> scores_of(SamplerState& state, const Row& logits, const Tokens& tokens,
                                   std::size_t count) {
  std::vector<ScoredToken> best(count);
  Sampler sampler(static_cast<std::int64_t>(logits.size()));
  best.resize(sampler.score_tokens(state, logits.data(), tokens, best));
  return best;
}

BOOST_AUTO_TEST_SUITE(score_tokens)

BOOST_AUTO_TEST_CASE(without_constraints_scores_are_log_probs) {
  std::mt19937_64 random(3);
  for (const bool with_ties : {false, true}) {
    const Row logits = random_row(random, 300, with_ties);
    const LogSoftmax softmax(logits);
    Tokens order(logits.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int32_t>(i);
    std::ranges::stable_sort(order,
                             [&](auto a, auto b) { return softmax.log_prob(a) > softmax.log_prob(b); });
    SamplerState state = state_of({});
    const auto best = scores_of(state, logits, kTokens, 12);
    BOOST_TEST_REQUIRE(best.size() == 12U);
    for (std::size_t i = 0; i < best.size(); ++i) {
      BOOST_TEST(best[i].token == order[i]);
      BOOST_TEST(best[i].score == softmax.log_prob(order[i]));
      BOOST_TEST(best[i].log_prob == best[i].score);
    }
  }
}

BOOST_AUTO_TEST_CASE(constraints_act_on_log_probs) {
  std::mt19937_64 random(4);
  const Row logits = random_row(random, 40, false);
  SamplingConfig config;
  config.repetition_penalty = 1.5;
  config.presence_penalty = 0.25;
  config.frequency_penalty = 0.5;
  config.no_repeat_ngram_size = 2;
  config.min_tokens = 10;
  TokenConstraints constraints;
  constraints.end_id = 5;
  constraints.bad_words = {{11}, {9, 2, 12}};
  Row bias(logits.size());
  for (float& value : bias) value = std::uniform_real_distribution<float>(-1.0F, 1.0F)(random);
  constraints.embedding_bias = std::make_shared<const std::vector<float>>(bias);
  const auto expected =
      Reference(resolve(config), constraints).process(log_softmax_of(logits), kTokens, kPromptLength);
  SamplerState state = state_of(config, constraints);
  const auto best = scores_of(state, logits, kTokens, logits.size());
  const auto num_allowed = std::ranges::count_if(expected, [](double value) { return std::isfinite(value); });
  BOOST_TEST(num_allowed < 40);
  BOOST_TEST_REQUIRE(std::cmp_equal(best.size(), num_allowed));
  const LogSoftmax softmax(logits);
  for (std::size_t i = 0; i < best.size(); ++i) {
    BOOST_TEST(std::abs(double{best[i].score} - expected[static_cast<std::size_t>(best[i].token)]) < 1e-5);
    BOOST_TEST(best[i].log_prob == softmax.log_prob(best[i].token));
    if (i > 0) BOOST_TEST(best[i].score <= best[i - 1].score);
  }
}

BOOST_AUTO_TEST_CASE(the_temperature_divides_logits) {
  std::mt19937_64 random(5);
  const Row logits = random_row(random, 40, false);
  for (const double temperature : {0.3, 2.0}) {
    SamplingConfig config;
    config.temperature = temperature;
    SamplerState state = state_of(config);
    const Row expected = log_softmax_of(logits, temperature);
    const LogSoftmax softmax(logits);
    for (const ScoredToken& token : scores_of(state, logits, kTokens, 40)) {
      BOOST_TEST(std::abs(token.score - expected[static_cast<std::size_t>(token.token)]) < 1e-4F);
      BOOST_TEST(token.log_prob == softmax.log_prob(token.token));
    }
  }
  for (const double temperature : {1e-320, 1e-30, 1e300}) {
    SamplingConfig config;
    config.temperature = temperature;
    SamplerState state = state_of(config);
    const auto best = scores_of(state, logits, kTokens, 40);
    BOOST_TEST(best.size() >= 1U);
    BOOST_TEST(std::isfinite(best[0].score));
  }
}

BOOST_AUTO_TEST_CASE(unusable_rows_are_refused) {
  SamplerState state = state_of({});
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    BOOST_CHECK_THROW(static_cast<void>(scores_of(state, {1.0F, bad, 2.0F}, {0, 1, 2}, 2)), StepError);
  }
  BOOST_TEST(scores_of(state, {1.0F, kForbidden, 2.0F}, {0, 1, 2}, 3).size() == 2U);
}

BOOST_AUTO_TEST_CASE(a_state_that_follows_another_counts_its_tokens) {
  std::mt19937_64 random(6);
  const Row logits = random_row(random, 40, false);
  SamplingConfig config;
  config.repetition_penalty = 1.5;
  config.frequency_penalty = 0.5;
  SamplerState parent = state_of(config);
  SamplerState child = state_of(config);
  static_cast<void>(scores_of(child, logits, {4, 7, 4, 1, 1, 1}, 5));
  static_cast<void>(scores_of(parent, logits, kTokens, 5));
  child.follow(parent);
  Tokens longer = kTokens;
  longer.push_back(13);
  SamplerState fresh = state_of(config);
  BOOST_CHECK(scores_of(child, logits, longer, 40) == scores_of(fresh, logits, longer, 40));
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::score_tokens_test
