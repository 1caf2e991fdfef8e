#include "adaptrt/sample/log_softmax.h"

#include <algorithm>
#include <array>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/sample/sampler.h"
#include "reference_sampler.h"

namespace adaptrt {

std::ostream& operator<<(std::ostream& out, const TokenLogProb& entry) {
  return out << "(" << entry.token_id << ", " << entry.log_prob << ")";
}

}  // namespace adaptrt

namespace adaptrt::testing::log_softmax_test {
namespace {

std::vector<TokenLogProb> most_likely_of(const Row& row, std::size_t count) {
  std::vector<TokenLogProb> found(count);
  LogSoftmax(row).find_most_likely(found);
  return found;
}

/// Reference by sorting: the most likely tokens of a row.
Tokens likeliest(const Row& row, std::size_t count) {
  Tokens order(row.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, [&](auto a, auto b) { return row[a] > row[b]; });
  order.resize(count);
  return order;
}

void check_row(const Row& row, std::size_t count) {
  const LogSoftmax softmax(row);
  double total = 0.0;
  for (const float logit : row) total += std::exp(double{logit});
  const auto found = most_likely_of(row, count);
  const auto expected = likeliest(row, count);
  for (std::size_t i = 0; i < count; ++i) {
    BOOST_TEST(found[i].token_id == expected[i]);
    BOOST_TEST(found[i].log_prob == softmax.log_prob(expected[i]));
    BOOST_TEST(std::abs(double{found[i].log_prob} - (double{row[expected[i]]} - std::log(total))) < 1e-5);
  }
}

BOOST_AUTO_TEST_SUITE(log_softmax)

BOOST_AUTO_TEST_CASE(the_most_likely_tokens_are_those_of_a_sort) {
  std::mt19937_64 random(5);
  for (const std::size_t size : {1, 2, 20, 255, 256, 257, 1000, 5000}) {
    for (const bool with_ties : {false, true}) {
      for (const std::size_t count : {1, 2, 5, 20}) {
        if (count <= size) check_row(random_row(random, size, with_ties), count);
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(the_order_of_a_row_does_not_matter) {
  Row row(700);
  std::iota(row.begin(), row.end(), -600.0F);
  for (auto& logit : row) logit /= 20.0F;
  check_row(row, 20);
  std::ranges::reverse(row);
  check_row(row, 20);
  check_row(Row(700, 0.5F), 20);
}

BOOST_AUTO_TEST_CASE(a_forbidden_token_s_log_prob_is_minus_infinity) {
  const Row row = {kForbidden, 0.0F, kForbidden, 0.0F};
  BOOST_TEST(LogSoftmax(row).log_prob(2) == kForbidden);
  const auto found = most_likely_of(row, 4);
  const float half = LogSoftmax(row).log_prob(1);
  BOOST_TEST(std::abs(half + std::log(2.0F)) < 1e-6F);
  BOOST_TEST(found == (std::vector<TokenLogProb>{{1, half}, {3, half}, {0, kForbidden}, {2, kForbidden}}),
             boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(rows_that_are_no_numbers_are_refused) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    Row row(100, 0.0F);
    row[99] = bad;
    BOOST_CHECK_THROW(LogSoftmax{row}, StepError);
  }
  BOOST_CHECK_THROW(LogSoftmax{Row(5, kForbidden)}, StepError);
}

BOOST_AUTO_TEST_CASE(the_sampled_token_has_the_same_bits_among_the_most_likely) {
  std::mt19937_64 random(17);
  Sampler sampler(40);
  int num_among = 0;
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    const Row row = random_row(random, 40, seed % 2 == 0);
    TokenConstraints constraints;
    constraints.bad_words = {{likeliest(row, 1)[0]}};
    SamplerState state(resolve({.top_k = 8, .seed = seed, .temperature = 1.7, .repetition_penalty = 1.4}),
                       constraints, 2, 8);
    std::array<TokenLogProb, 5> found;
    const SampledToken sampled = sampler.sample(state, row.data(), Tokens{1, 2}, true, found);
    // The log probs are the model's, even for forbidden tokens.
    BOOST_TEST(std::vector(found.begin(), found.end()) == most_likely_of(row, 5),
               boost::test_tools::per_element());
    const auto entry = std::ranges::find(found, sampled.token, &TokenLogProb::token_id);
    if (entry == found.end()) continue;
    ++num_among;
    BOOST_TEST(entry->log_prob == sampled.log_prob);
  }
  BOOST_TEST(num_among > 10);
}

BOOST_AUTO_TEST_CASE(the_most_likely_tokens_need_no_log_prob_of_the_sampled_one) {
  std::mt19937_64 random(18);
  const Row row = random_row(random, 300, false);
  Sampler sampler(300);
  SamplerState state(resolve({}), {}, 1, 4);
  std::vector<TokenLogProb> found(3);
  const SampledToken sampled = sampler.sample(state, row.data(), Tokens{0}, false, found);
  BOOST_TEST(found == most_likely_of(row, 3), boost::test_tools::per_element());
  BOOST_TEST(sampled.token == found[0].token_id);
  BOOST_TEST(sampled.log_prob == 0.0F);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::log_softmax_test
