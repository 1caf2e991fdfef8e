#include <algorithm>
#include <array>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/sample/philox.h"
#include "adaptrt/sample/sampler.h"
#include "reference_sampler.h"

namespace adaptrt::testing::sampler_distribution_test {
namespace {

/// Probabilities are sums and quotients of float32 exponentials with an error of 2 ulp.
constexpr double kProbabilityTolerance = 1e-6;
BOOST_AUTO_TEST_SUITE(sampler_distribution)

BOOST_AUTO_TEST_CASE(philox_gives_its_published_numbers) {
  // Known answers from the authors' Random123 distribution.
  using Words = std::array<std::uint32_t, 4>;
  BOOST_CHECK((philox({0, 0, 0, 0}, {0, 0}) == Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  BOOST_CHECK((philox({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}) ==
               Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  BOOST_CHECK((philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}) ==
               Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

BOOST_AUTO_TEST_CASE(draws_are_uniform_and_differ_by_seed_and_position) {
  constexpr int kDraws = 20000;
  double total = 0.0;
  for (int i = 0; i < kDraws; ++i) {
    const double draw = uniform_draw(7, static_cast<std::uint64_t>(i));
    BOOST_TEST_REQUIRE((draw >= 0.0 && draw < 1.0));
    total += draw;
  }
  BOOST_TEST(std::abs(total / kDraws - 0.5) < 0.01);
  BOOST_TEST(uniform_draw(7, 1) != uniform_draw(7, 2));
  BOOST_TEST(uniform_draw(7, 1) != uniform_draw(8, 1));
  BOOST_TEST(uniform_draw(7, 1) != uniform_draw(7 + (1ULL << 32), 1));
}

BOOST_DATA_TEST_CASE(filters_leave_the_reference_s_tokens_and_probabilities,
                     boost::unit_test::data::xrange(600), seed) {
  std::mt19937_64 random(static_cast<std::uint64_t>(seed));
  const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
  const auto unit = [&] { return static_cast<double>(random() >> 11) * 0x1.0p-53; };
  const std::size_t vocab = 1 + below(seed % 10 == 0 ? 5000 : 200);
  Row row = random_row(random, vocab, below(3) == 0);
  if (below(4) == 0) {
    for (std::size_t i = 0; i + 1 < vocab; ++i) row[i] = below(3) == 0 ? kForbidden : row[i];
  }
  if (below(20) == 0) std::ranges::fill(row, row[0] == kForbidden ? 0.0F : row[0]);

  SamplingConfig config;
  if (below(2) == 0) config.top_k = static_cast<std::int32_t>(below(vocab + 5));
  if (below(2) == 0) config.top_p = 0.01 + 0.99 * unit();
  if (config.top_p && below(3) == 0) {
    config.top_p_decay = 0.5 + 0.5 * unit();
    if (below(2) == 0) config.top_p_min = 0.01 + 0.6 * unit();
    if (below(2) == 0) config.top_p_reset_ids = static_cast<std::int32_t>(below(6));
  }
  if (below(3) == 0) config.min_p = below(10) == 0 ? 1.0 : 0.3 * unit();
  constexpr double kTemperatures[] = {0.0, 1e-3, 0.3, 0.7, 1.0, 2.0, 100.0};
  if (below(2) == 0) config.temperature = kTemperatures[below(std::size(kTemperatures))];
  if (below(3) == 0) config.repetition_penalty = 0.5 + 2.0 * unit();
  if (below(3) == 0) config.presence_penalty = 4.0 * unit() - 2.0;
  if (below(3) == 0) config.frequency_penalty = 4.0 * unit() - 2.0;
  if (below(4) == 0) config.no_repeat_ngram_size = static_cast<std::int32_t>(below(4));
  if (below(4) == 0) config.min_tokens = static_cast<std::int32_t>(below(10));

  const auto prompt_length = static_cast<std::int32_t>(1 + below(10));
  Tokens tokens(static_cast<std::size_t>(prompt_length) + below(20));
  for (auto& token : tokens) token = static_cast<std::int32_t>(below(std::min<std::size_t>(vocab, 6)));
  TokenConstraints constraints;
  if (below(2) == 0) constraints.end_id = static_cast<std::int32_t>(below(vocab));
  for (std::size_t words = below(4); words > 0; --words) {
    Tokens word(1 + below(3));
    for (auto& token : word) token = static_cast<std::int32_t>(below(std::min<std::size_t>(vocab, 6)));
    constraints.bad_words.push_back(word);
  }
  if (below(4) == 0) constraints.embedding_bias = std::make_shared<Row>(random_row(random, vocab, true));

  const SamplingParams params = resolve(config);
  const Reference reference(params, constraints);
  Sampler sampler(static_cast<std::int64_t>(vocab));
  SamplerState state(params, constraints, prompt_length, static_cast<std::int32_t>(tokens.size()) + 1);
  const auto processed = reference.process(row, tokens, prompt_length);
  if (std::ranges::all_of(processed, [](double logit) { return std::isinf(logit); })) {
    BOOST_CHECK_THROW((void)sampler.sample(state, row.data(), tokens, false), StepError);
    return;
  }
  const auto expected = reference.distribution(row, tokens, prompt_length);
  if (!expected) return;
  const auto actual = sampler.distribution(state, row.data(), tokens);
  // Differences of float32 logits reach the probabilities magnified by 1 / temperature.
  const double tolerance =
      kProbabilityTolerance * std::max(1.0, 1.0 / std::max(params.temperature, 1e-3)) * 10;
  std::map<std::int32_t, double> found;
  for (const auto& [token, probability] : actual) found[token] = probability;
  for (const auto& [token, probability] : *expected) {
    if (probability > tolerance) BOOST_TEST(found.contains(token), "token " << token << " is missing");
    BOOST_TEST(std::abs(found[token] - probability) < tolerance);
  }
  for (const auto& [token, probability] : found) {
    BOOST_TEST((expected->contains(token) || probability < tolerance),
               "token " << token << " should be gone");
  }
  // The draw is the inverse of the cumulative distribution in the order of tokens.
  const double uniform = uniform_draw(params.seed, tokens.size() - static_cast<std::size_t>(prompt_length));
  double cumulative = 0.0;
  for (const auto& [token, probability] : *expected) {
    cumulative += probability;
    if (std::abs(cumulative - uniform) < 100 * tolerance) break;
    if (cumulative < uniform) continue;
    BOOST_TEST(sampler.sample(state, row.data(), tokens, false).token == token);
    break;
  }
}

BOOST_AUTO_TEST_CASE(draws_have_the_distribution_s_frequencies) {
  constexpr std::size_t kVocab = 40;
  constexpr int kDraws = 40000;
  std::mt19937_64 random(5);
  const Row row = random_row(random, kVocab, false);
  for (const auto& config :
       {SamplingConfig{.top_p = 1.0}, SamplingConfig{.top_k = 8}, SamplingConfig{.top_p = 0.8},
        SamplingConfig{.top_k = 20, .top_p = 0.9, .temperature = 1.7}}) {
    Sampler sampler(kVocab);
    SamplingParams params = resolve(config);
    SamplerState probe(params, {}, 1, 2);
    std::map<std::int32_t, double> expected;
    for (const auto& [token, p] : sampler.distribution(probe, row.data(), Tokens{0}))
      expected[token] = p * kDraws;
    std::map<std::int32_t, int> counts;
    for (int i = 0; i < kDraws; ++i) {
      params.seed = static_cast<std::uint64_t>(i);
      SamplerState state(params, {}, 1, 2);
      ++counts[sampler.sample(state, row.data(), Tokens{0}, false).token];
    }
    double chi_square = 0.0;
    double rare_expected = 0.0;
    double rare_count = 0.0;
    int cells = 0;
    for (const auto& [token, count] : counts) BOOST_TEST(expected.contains(token));
    for (const auto& [token, mean] : expected) {
      if (mean < 10.0) {
        rare_expected += mean;
        rare_count += counts[token];
        continue;
      }
      chi_square += (counts[token] - mean) * (counts[token] - mean) / mean;
      ++cells;
    }
    if (rare_expected > 1.0) {
      chi_square += (rare_count - rare_expected) * (rare_count - rare_expected) / rare_expected;
      ++cells;
    }
    // Mean plus five standard deviations of the chi-square distribution with cells - 1 degrees of freedom.
    const double degrees = std::max(1, cells - 1);
    BOOST_TEST(chi_square < degrees + 5.0 * std::sqrt(2.0 * degrees));
  }
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::sampler_distribution_test
