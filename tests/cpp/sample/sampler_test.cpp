#include "adaptrt/sample/sampler.h"

#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <vector>

#include "adaptrt/sample/philox.h"

namespace adaptrt {
namespace {

using Tokens = std::vector<std::int32_t>;
using Row = std::vector<float>;
constexpr float kForbidden = -std::numeric_limits<float>::infinity();

/// Probabilities are sums and quotients of float32 exponentials with an error of 2 ulp.
constexpr double kProbabilityTolerance = 1e-6;
/// Closer to top_p or min_p than this, float32 and float64 may disagree about a token.
constexpr double kUndecided = 1e-5;

/// The whole of sampling in float64, by sorting; nullopt where rounding decides.
class Reference {
 public:
  Reference(SamplingParams params, TokenConstraints constraints)
      : params_(params), constraints_(std::move(constraints)) {}

  [[nodiscard]] std::vector<double> process(const Row& logits, const Tokens& tokens,
                                            std::int32_t prompt_length) const {
    std::vector<double> row(logits.begin(), logits.end());
    if (constraints_.embedding_bias) {
      for (std::size_t i = 0; i < row.size(); ++i) row[i] += double{(*constraints_.embedding_bias)[i]};
    }
    for (std::int32_t v = 0; v < static_cast<std::int32_t>(row.size()); ++v) {
      const auto all = std::ranges::count(tokens, v);
      const auto generated = std::count(tokens.begin() + prompt_length, tokens.end(), v);
      if (all > 0)
        row[v] = row[v] > 0 ? row[v] / params_.repetition_penalty : row[v] * params_.repetition_penalty;
      if (generated > 0) row[v] -= params_.presence_penalty;
      row[v] -= params_.frequency_penalty * static_cast<double>(generated);
      if (is_forbidden(v, tokens, prompt_length)) row[v] = double{kForbidden};
    }
    return row;
  }

  [[nodiscard]] std::optional<std::map<std::int32_t, double>> distribution(const Row& logits,
                                                                           const Tokens& tokens,
                                                                           std::int32_t prompt_length) const {
    const std::vector<double> row = process(logits, tokens, prompt_length);
    Tokens order(row.size());
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, [&](auto a, auto b) { return row[a] > row[b]; });
    if (params_.greedy) return {{{order[0], 1.0}}};
    if (params_.top_k > 0 && params_.top_k < static_cast<std::int32_t>(order.size()))
      order.resize(params_.top_k);
    std::map<std::int32_t, double> weight;
    double total = 0.0;
    for (const auto v : order) total += weight[v] = std::exp((row[v] - row[order[0]]) / params_.temperature);
    std::size_t kept = order.size();
    if (params_.top_p < 1.0) {
      double share = 0.0;
      for (kept = 0; share < params_.top_p && kept < order.size(); ++kept) {
        share += weight[order[kept]] / total;
        if (std::abs(share - params_.top_p) < kUndecided) return std::nullopt;
      }
    }
    order.resize(kept);
    std::map<std::int32_t, double> result;
    double left = 0.0;
    for (const auto v : order) {
      if (std::abs(weight[v] - params_.min_p) < kUndecided * params_.min_p && v != order[0])
        return std::nullopt;
      if (weight[v] < params_.min_p || weight[v] < 1e-37) continue;
      result[v] = weight[v];
      left += weight[v];
    }
    for (auto& [token, probability] : result) probability /= left;
    return result;
  }

 private:
  [[nodiscard]] bool is_forbidden(std::int32_t v, Tokens tokens, std::int32_t prompt_length) const {
    const auto generated = static_cast<std::int32_t>(tokens.size()) - prompt_length;
    if (constraints_.end_id == v && generated < params_.min_tokens) return true;
    const auto past = tokens.size();
    tokens.push_back(v);
    const auto ends_with = [&](const Tokens& word) {
      return word.size() <= tokens.size() && std::equal(word.rbegin(), word.rend(), tokens.rbegin());
    };
    if (std::ranges::any_of(constraints_.bad_words, ends_with)) return true;
    const auto n = static_cast<std::size_t>(params_.no_repeat_ngram_size);
    if (n == 0) return false;
    for (std::size_t i = 0; i + n <= past; ++i) {
      const Tokens ngram(tokens.begin() + static_cast<std::ptrdiff_t>(i),
                         tokens.begin() + static_cast<std::ptrdiff_t>(i + n));
      if (ends_with(ngram)) return true;
    }
    return false;
  }

  SamplingParams params_;
  TokenConstraints constraints_;
};

Row random_row(std::mt19937_64& random, std::size_t size, bool with_ties) {
  std::normal_distribution<float> normal(0.0F, 3.0F);
  Row row(size);
  for (auto& logit : row) logit = with_ties ? std::round(normal(random)) : normal(random);
  return row;
}

std::int32_t sample_once(const SamplingParams& params, const TokenConstraints& constraints, const Row& row,
                         const Tokens& tokens, std::int32_t prompt_length) {
  Sampler sampler(static_cast<std::int64_t>(row.size()));
  SamplerState state(params, constraints, prompt_length, static_cast<std::int32_t>(tokens.size()) + 8);
  return sampler.sample(state, row.data(), tokens, false).token;
}

std::int32_t greedy(const Row& row, const TokenConstraints& constraints = {},
                    const SamplingParams& params = {}, const Tokens& tokens = {0},
                    std::int32_t prompt_length = 1) {
  return sample_once(params, constraints, row, tokens, prompt_length);
}

BOOST_AUTO_TEST_SUITE(sampler)

BOOST_AUTO_TEST_CASE(philox_gives_its_published_numbers) {
  // The known answers of the authors' Random123 distribution.
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

BOOST_AUTO_TEST_CASE(of_equal_logits_the_lowest_token_wins) {
  BOOST_TEST(greedy({1.0F, 3.0F, 2.0F, 3.0F}) == 1);
  BOOST_TEST(greedy(Row(1000, -4.5F)) == 0);
  BOOST_TEST(greedy({-0.0F, 0.0F}) == 0);
  BOOST_TEST(greedy({0.0F, -0.0F}) == 0);
  for (std::size_t at = 0; at < 100; ++at) {
    Row row(100, 0.0F);
    row[at] = 1.0F;
    BOOST_TEST(greedy(row) == static_cast<std::int32_t>(at));
  }
}

BOOST_AUTO_TEST_CASE(top_k_keeps_the_lowest_tokens_of_equal_logits) {
  SamplingParams params = resolve({.top_k = 3});
  Sampler sampler(50);
  SamplerState state(params, {}, 1, 10);
  Row row(50, 1.0F);
  row[20] = 2.0F;
  const auto left = sampler.distribution(state, row.data(), Tokens{0});
  BOOST_TEST_REQUIRE(left.size() == 3U);
  BOOST_TEST(left[0].token == 0);
  BOOST_TEST(left[1].token == 1);
  BOOST_TEST(left[2].token == 20);
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

BOOST_AUTO_TEST_CASE(a_draw_depends_on_seed_and_position_alone) {
  std::mt19937_64 random(9);
  const Row row = random_row(random, 300, false);
  const SamplingParams params = resolve({.top_p = 0.95, .seed = 42});
  Sampler shared(300);
  SamplerState steady(params, {}, 2, 20);
  Tokens tokens = {1, 2};
  for (int step = 0; step < 10; ++step) {
    const auto expected =
        sample_once(params, {}, row, tokens, 2);  // fresh state and sampler, as after a pause
    BOOST_TEST(shared.sample(steady, row.data(), tokens, false).token == expected);
    const Row other = random_row(random, 300, false);
    SamplerState stranger(resolve({.top_k = 5, .seed = 1}), {}, 1, 4);
    (void)shared.sample(stranger, other.data(), Tokens{3}, true);
    tokens.push_back(expected);
  }
}

BOOST_AUTO_TEST_CASE(without_a_seed_equal_requests_draw_equal_tokens) {
  std::mt19937_64 random(3);
  const Row row = random_row(random, 100, false);
  BOOST_TEST(sample_once(resolve({.top_p = 1.0}), {}, row, {0}, 1) ==
             sample_once(resolve({.top_p = 1.0, .seed = 0}), {}, row, {0}, 1));
}

BOOST_AUTO_TEST_CASE(log_probs_are_the_model_s_whatever_the_sampling) {
  std::mt19937_64 random(11);
  const Row row = random_row(random, 1000, false);
  double total = 0.0;
  for (const float logit : row) total += std::exp(double{logit});
  const Tokens tokens = {1, 2, 3};
  for (const auto& config :
       {SamplingConfig{}, SamplingConfig{.top_k = 3}, SamplingConfig{.top_p = 0.5, .temperature = 3.0},
        SamplingConfig{.repetition_penalty = 2.0}}) {
    Sampler sampler(1000);
    TokenConstraints constraints;
    constraints.bad_words = {{static_cast<std::int32_t>(std::ranges::max_element(row) - row.begin())}};
    SamplerState state(resolve(config), constraints, 2, 8);
    const SampledToken sampled = sampler.sample(state, row.data(), tokens, true);
    BOOST_TEST(std::abs(double{sampled.log_prob} - (double{row[sampled.token]} - std::log(total))) < 1e-5);
  }
}

BOOST_AUTO_TEST_CASE(log_probs_of_extreme_logits_are_finite_and_right) {
  Row row(64, -1e30F);
  row[5] = 1e30F;
  Sampler sampler(64);
  SamplerState state(resolve({}), {}, 1, 4);
  BOOST_TEST(sampler.sample(state, row.data(), Tokens{0}, true).log_prob == 0.0F);
  row.assign(64, 0.0F);
  BOOST_TEST(std::abs(sampler.sample(state, row.data(), Tokens{0}, true).log_prob + std::log(64.0F)) < 1e-6F);
}

BOOST_AUTO_TEST_CASE(min_tokens_forbids_the_end) {
  Row row = {5.0F, 1.0F, 0.0F};
  SamplingParams params = resolve({.min_tokens = 2});
  const TokenConstraints constraints{.end_id = 0};
  BOOST_TEST(greedy(row, constraints, params, {2, 2}, 2) == 1);
  BOOST_TEST(greedy(row, constraints, params, {2, 2, 1}, 2) == 1);
  BOOST_TEST(greedy(row, constraints, params, {2, 2, 1, 1}, 2) == 0);
  BOOST_TEST(greedy(row, {}, params, {2, 2}, 2) == 0);
}

BOOST_AUTO_TEST_CASE(bad_words_are_forbidden_at_their_last_token) {
  const Row row = {0.0F, 1.0F, 2.0F, 9.0F};
  TokenConstraints constraints;
  constraints.bad_words = {{1, 2, 3}};
  BOOST_TEST(greedy(row, constraints, {}, {1, 2}, 1) == 2);
  BOOST_TEST(greedy(row, constraints, {}, {1, 2}, 2) == 2);  // begins in the prompt
  BOOST_TEST(greedy(row, constraints, {}, {2, 1}, 1) == 3);
  BOOST_TEST(greedy(row, constraints, {}, {2}, 1) == 3);
  constraints.bad_words.push_back({3});
  BOOST_TEST(greedy(row, constraints, {}, {2, 1}, 1) == 2);
}

BOOST_AUTO_TEST_CASE(penalties_follow_their_definitions) {
  Row row = {2.0F, -2.0F, 1.9F, 0.0F};
  SamplingParams params = resolve({.repetition_penalty = 2.0});
  BOOST_TEST(greedy(row, {}, params, {0, 0}, 2) == 2);  // the prompt counts, once
  params = resolve({.presence_penalty = 0.2});
  BOOST_TEST(greedy(row, {}, params, {0, 0}, 2) == 0);  // the prompt does not count
  BOOST_TEST(greedy(row, {}, params, {0, 0}, 1) == 2);
  params = resolve({.frequency_penalty = 0.06});
  BOOST_TEST(greedy(row, {}, params, {1, 0}, 1) == 0);
  BOOST_TEST(greedy(row, {}, params, {1, 0, 0}, 1) == 2);
}

BOOST_AUTO_TEST_CASE(penalties_count_every_token_once_over_a_generation) {
  std::mt19937_64 random(21);
  const SamplingParams params =
      resolve({.repetition_penalty = 1.3, .presence_penalty = 0.4, .frequency_penalty = 0.3});
  const Reference reference(params, {});
  Sampler sampler(30);
  Tokens tokens = {4, 4, 9};
  SamplerState state(params, {}, 3, 103);
  for (int step = 0; step < 100; ++step) {
    const Row row = random_row(random, 30, false);
    const auto expected = reference.distribution(row, tokens, 3);
    const auto token = sampler.sample(state, row.data(), tokens, false).token;
    BOOST_TEST(token == expected->begin()->first);
    tokens.push_back(token);
  }
}

BOOST_AUTO_TEST_CASE(logits_that_are_no_numbers_end_the_request_by_name) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    for (const std::size_t at : {std::size_t{0}, std::size_t{17}, std::size_t{99}}) {
      Row row(100, 0.0F);
      row[at] = bad;
      Sampler sampler(100);
      for (const auto& config :
           {SamplingConfig{}, SamplingConfig{.top_k = 5}, SamplingConfig{.top_p = 0.5}}) {
        SamplerState state(resolve(config), {}, 1, 4);
        BOOST_CHECK_THROW((void)sampler.sample(state, row.data(), Tokens{0}, true), StepError);
        row[at] = 1.0F;
        BOOST_CHECK_NO_THROW((void)sampler.sample(state, row.data(), Tokens{0}, true));
        row[at] = bad;
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(penalties_that_overflow_end_the_request_by_name) {
  Row row(10, 1e30F);
  Sampler sampler(10);
  SamplerState state(resolve({.presence_penalty = -1e300}), {}, 1, 4);
  BOOST_CHECK_THROW((void)sampler.sample(state, row.data(), Tokens{0, 1}, false), StepError);
}

BOOST_AUTO_TEST_CASE(when_every_token_is_forbidden_the_request_ends_by_name) {
  Sampler sampler(3);
  TokenConstraints constraints;
  constraints.bad_words = {{0}, {1}, {2}};
  SamplerState state(resolve({}), constraints, 1, 4);
  BOOST_CHECK_THROW((void)sampler.sample(state, Row(3, 0.0F).data(), Tokens{0}, false), StepError);
  SamplerState free(resolve({}), {}, 1, 4);
  BOOST_CHECK_THROW((void)sampler.sample(free, Row(3, kForbidden).data(), Tokens{0}, false), StepError);
}

BOOST_AUTO_TEST_CASE(extreme_values_are_sampled_without_fault) {
  const std::vector<Row> rows = {{3e38F, -3e38F, 0.0F, kForbidden},
                                 {1e-45F, 0.0F, -1e-45F, kForbidden},
                                 {kForbidden, kForbidden, 1.0F, kForbidden},
                                 {5.0F, 5.0F, 5.0F, 5.0F},
                                 {-3e38F, -3e38F, kForbidden, -3e38F}};
  for (const auto& row : rows) {
    for (const double temperature : {1e-300, 1e-30, 1.0, 1e30, 1e300}) {
      for (const auto& config : {SamplingConfig{.top_k = 2, .temperature = temperature},
                                 SamplingConfig{.top_p = 0.5, .temperature = temperature},
                                 SamplingConfig{.top_p = 1.0, .temperature = temperature},
                                 SamplingConfig{.temperature = temperature, .min_p = 0.5}}) {
        const auto token = sample_once(resolve(config), {}, row, {0}, 1);
        BOOST_TEST(row[token] != kForbidden);
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(a_vocabulary_of_one_token_works) {
  BOOST_TEST(sample_once(resolve({.top_k = 4, .top_p = 0.5}), {}, {0.0F}, {0}, 1) == 0);
  BOOST_CHECK_THROW(Sampler(0), ConfigError);
}

BOOST_AUTO_TEST_CASE(constraints_are_checked_against_the_vocabulary) {
  TokenConstraints constraints;
  BOOST_TEST(constraints.validate(10).empty());
  constraints.end_id = 10;
  constraints.bad_words = {{}, {1, -1}, {10}};
  constraints.embedding_bias = std::make_shared<Row>(Row{1.0F, std::numeric_limits<float>::quiet_NaN()});
  const auto problems = constraints.validate(10).list();
  BOOST_TEST_REQUIRE(problems.size() == 6U);
  BOOST_TEST(problems[0].starts_with("end_id"));
  BOOST_TEST(problems[1].starts_with("bad_words[0]"));
  BOOST_TEST(problems[2].starts_with("bad_words[1]"));
  BOOST_TEST(problems[3].starts_with("bad_words[2]"));
  BOOST_TEST(problems[4].starts_with("embedding_bias has 2 values"));
  BOOST_TEST(problems[5].starts_with("embedding_bias[1]"));
}

BOOST_AUTO_TEST_CASE(a_bias_of_minus_infinity_forbids_a_token) {
  TokenConstraints constraints;
  constraints.embedding_bias = std::make_shared<Row>(Row{0.0F, kForbidden, 0.5F});
  BOOST_TEST(constraints.validate(3).empty());
  BOOST_TEST(greedy({1.0F, 9.0F, 1.0F}, constraints) == 2);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt
