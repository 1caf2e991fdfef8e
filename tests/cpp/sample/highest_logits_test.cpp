// Tokens from the highest logits of a row are those from the row, bit by bit.

#include <algorithm>
#include <array>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/sample/sampler.h"
#include "reference_sampler.h"
#include "support/found_highest.h"

namespace adaptrt::testing::highest_logits_test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

BOOST_AUTO_TEST_SUITE(highest_logits)

/// Rows of all kinds: with equal logits, forbidden tokens, both zeros, and a wide range.
Row random_row(std::size_t size, std::mt19937* random) {
  const auto draw = [&](int low, int high) { return std::uniform_int_distribution(low, high)(*random); };
  Row row(size);
  const int kind = draw(0, 4);
  for (float& logit : row) {
    logit = static_cast<float>(draw(-3000, 3000)) / (kind == 1 ? 7.0F : 700.0F);
    if (kind == 2) logit = static_cast<float>(draw(-2, 2));
    if (kind == 3 && draw(0, 2) > 0) logit = -kInfinity;
    if (kind == 4) logit = draw(0, 1) == 0 ? -0.0F : 0.0F;
    if (kind == 4 && draw(0, 9) == 0) logit = -100.0F;
  }
  row[static_cast<std::size_t>(draw(0, static_cast<int>(size) - 1))] = kind == 4 ? 0.0F : 4.5F;
  return row;
}

BOOST_AUTO_TEST_CASE(tokens_and_log_probs_are_those_of_the_whole_row) {
  std::mt19937 random(7);
  const auto draw = [&](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
  for (int round = 0; round < 2000; ++round) {
    const auto size = static_cast<std::size_t>(draw(0, 3) == 0 ? draw(1, 30) : draw(200, 900));
    const Row row = random_row(size, &random);
    SamplingConfig config{.seed = static_cast<std::uint64_t>(round)};
    if (draw(0, 3) > 0) config.top_k = draw(1, 60);
    if (config.top_k && draw(0, 1) == 0) config.top_p = 0.05 * draw(1, 20);
    if (config.top_k && draw(0, 3) == 0) config.min_p = 0.01 * draw(0, 100);
    if (config.top_p && draw(0, 3) == 0) config.top_p_decay = 0.5;
    if (draw(0, 1) == 0) config.temperature = 0.1 * draw(1, 30);
    const SamplingParams params = resolve(config);
    const auto num_generated = static_cast<std::size_t>(draw(0, 3));
    const Tokens tokens(2 + num_generated, 0);
    Sampler sampler(static_cast<std::int64_t>(size));
    SamplerState of_row(params, {}, 2, 10);
    SamplerState of_highest(params, {}, 2, 10);
    const auto needed = static_cast<std::size_t>(of_row.num_highest_needed(tokens.size()).value());
    std::array<TokenLogProb, 20> expected_likely{};
    std::array<TokenLogProb, 20> found_likely{};
    const std::size_t num_likely = std::min(size, static_cast<std::size_t>(draw(0, 20)));
    // Another row of the step may need more.
    const std::size_t count =
        std::min(size, std::max(needed, num_likely) + static_cast<std::size_t>(draw(0, 5)));
    const FoundHighest highest(row, count);
    BOOST_TEST_CONTEXT("round " << round) {
      const SampledToken expected =
          sampler.sample(of_row, row.data(), tokens, true, std::span(expected_likely).first(num_likely));
      const SampledToken found =
          sampler.sample(of_highest, highest.view(), tokens, true, std::span(found_likely).first(num_likely));
      BOOST_TEST(found.token == expected.token);
      BOOST_TEST(found.log_prob == expected.log_prob);
      BOOST_TEST((found_likely == expected_likely));
      BOOST_TEST(sampler.sample(of_highest, highest.view(), tokens, false).log_prob == 0.0F);
    }
  }
}

BOOST_AUTO_TEST_CASE(rows_without_a_token_are_errors) {
  Sampler sampler(4);
  SamplerState state(resolve({.top_k = 2}), {}, 1, 10);
  const auto fails = [&](const Row& row, const char* message) {
    const FoundHighest highest(row, 2);
    BOOST_CHECK_EXCEPTION(static_cast<void>(sampler.sample(state, highest.view(), Tokens{0}, true)),
                          StepError,
                          [&](const StepError& error) { return std::string(error.what()) == message; });
  };
  fails({0.0F, std::numeric_limits<float>::quiet_NaN(), 1.0F, 2.0F}, kUnusableLogitsError);
  fails({0.0F, kInfinity, 1.0F, 2.0F}, kUnusableLogitsError);
  fails(Row(4, -kInfinity), kEveryTokenForbiddenError);
}

BOOST_AUTO_TEST_CASE(the_sign_of_a_zero_has_no_effect_on_log_probs) {
  // A token with the logit -0 or 0 has the same log prob, whichever of both is the maximum.
  for (const Row& row :
       {Row{-0.0F, 0.0F, -200.0F}, Row{0.0F, -0.0F, -200.0F}, Row{-0.0F, -200.0F, -200.0F}}) {
    const FoundHighest highest(row, 1);
    BOOST_TEST(!std::signbit(highest.summary.max));
    BOOST_TEST(LogSoftmax(row).log_prob(0) ==
               LogSoftmax(highest.summary).log_prob_of(highest.highest[0].logit));
  }
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::highest_logits_test
