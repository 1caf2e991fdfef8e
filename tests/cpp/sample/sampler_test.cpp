#include "adaptrt/sample/sampler.h"

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "adaptrt/core/error.h"
#include "reference_sampler.h"

namespace adaptrt::testing::sampler_test {
namespace {

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

BOOST_AUTO_TEST_CASE(the_lowest_token_of_equal_logits_wins) {
  BOOST_TEST(greedy({1.0F, 3.0F, 2.0F, 3.0F}) == 1);
  BOOST_TEST(greedy(Row(1000, -4.5F)) == 0);
  BOOST_TEST(greedy({-0.0F, 0.0F}) == 0);
  BOOST_TEST(greedy({0.0F, -0.0F}) == 0);
  for (std::size_t at = 0; at < 100; ++at) {
    Row row(100, 0.0F);
    row[at] = 1.0F;
    BOOST_TEST(greedy(row) == static_cast<std::int32_t>(at));
  }
  // Rows that need several blocks.
  for (const std::size_t size : {256, 257, 1000}) {
    for (std::size_t at = 0; at < size; ++at) {
      Row row(size, 0.0F);
      row[at] = row[size - 1] = 1.0F;
      BOOST_TEST(greedy(row) == static_cast<std::int32_t>(at));
    }
  }
}

BOOST_AUTO_TEST_CASE(a_request_needs_the_highest_logits_if_nothing_changes_its_rows) {
  constexpr std::int32_t kAll = -1;
  const auto needed = [&](const SamplingConfig& config, const TokenConstraints& constraints = {},
                          std::size_t num_generated = 0, std::int32_t vocabulary_change = 0) {
    return SamplerState(resolve(config), constraints, 2, 10, vocabulary_change)
        .num_highest_needed(2 + num_generated)
        .value_or(kAll);
  };
  BOOST_TEST(needed({}) == 1);
  BOOST_TEST(needed({.top_k = 1, .temperature = 2.0}) == 1);
  BOOST_TEST(needed({.top_k = 9, .top_p = 0.5, .temperature = 0.0}) == 1);
  BOOST_TEST(needed({.top_k = 2}) == 2);
  BOOST_TEST(needed({.top_k = 50, .top_p = 0.5, .temperature = 2.0, .min_p = 0.1}) == 50);
  BOOST_TEST(needed({.top_p = 0.5}) == kAll);
  BOOST_TEST(needed({.top_k = 0, .min_p = 0.5}) == kAll);
  BOOST_TEST(needed({.repetition_penalty = 1.1}) == kAll);
  BOOST_TEST(needed({.top_k = 5, .presence_penalty = 0.1}) == kAll);
  BOOST_TEST(needed({.frequency_penalty = -0.1}) == kAll);
  BOOST_TEST(needed({.no_repeat_ngram_size = 3}) == kAll);
  BOOST_TEST(needed({.top_k = 5}, {.bad_words = {{1, 2}}}) == kAll);
  BOOST_TEST(needed({}, {.embedding_bias = std::make_shared<const std::vector<float>>(4)}) == kAll);
  BOOST_TEST(needed({}, {.end_id = 1, .stop_ids = {2}}) == 1);
  BOOST_TEST(needed({.min_tokens = 3}) == 1);
  BOOST_TEST(needed({.top_k = 5, .min_tokens = 3}, {.end_id = 1}, 2) == kAll);
  BOOST_TEST(needed({.min_tokens = 3}, {.stop_ids = {1}}, 2) == kAll);
  BOOST_TEST(needed({.top_k = 5, .min_tokens = 3}, {.end_id = 1, .stop_ids = {1}}, 3) == 5);
  BOOST_TEST(needed({}, {}, 0, 1) == kAll);
  BOOST_TEST(needed({.top_k = 5}, {}, 0, -1) == kAll);
}

BOOST_AUTO_TEST_CASE(virtual_tokens_of_a_prompt_have_no_logits) {
  constexpr std::int32_t kVirtual = 1 << 28;
  const Row row = {1.0F, 4.0F, 3.0F};
  const Tokens tokens = {1, kVirtual, 1};
  SamplingParams params = resolve({.repetition_penalty = 2.0});
  BOOST_TEST(greedy(row, {}, params, tokens, 3) == 2);
  params = resolve({});
  params.no_repeat_ngram_size = 2;
  BOOST_TEST(greedy(row, {}, params, tokens, 3) == 1);
  BOOST_TEST(greedy(row, {}, params, {1, kVirtual, 1, 1, 1}, 3) == 2);
}

BOOST_AUTO_TEST_CASE(rows_end_with_the_requests_new_tokens) {
  Sampler sampler(40, 5);
  Row row(45, 0.0F);
  row[39] = 1.0F;
  row[42] = 3.0F;
  row[44] = 4.0F;
  const Tokens tokens{0};
  const auto sample = [&](std::int32_t num_new_tokens, TokenConstraints constraints = {},
                          std::span<const std::uint32_t> allowed = {}) {
    SamplerState state({}, std::move(constraints), 1, 10, num_new_tokens);
    return sampler.sample(state, row.data(), tokens, false, {}, {.allowed = allowed}).token;
  };
  BOOST_TEST(sample(0) == 39);
  BOOST_TEST(sample(3) == 42);
  BOOST_TEST(sample(5) == 44);
  BOOST_TEST(sample(5, {.bad_words = {{44}}}) == 42);
  // A guide knows only the vocabulary; further mask bits are ignored.
  const std::vector<std::uint32_t> all(2, ~std::uint32_t{0});
  BOOST_TEST(sample(5, {}, all) == 39);
  const auto bias = std::make_shared<std::vector<float>>(43, 0.0F);
  bias->back() = -9.0F;
  BOOST_TEST(sample(3, {.embedding_bias = bias}) == 39);
  // New tokens of other rows are not read.
  row[43] = std::numeric_limits<float>::quiet_NaN();
  BOOST_TEST(sample(3) == 42);
  BOOST_CHECK_THROW(static_cast<void>(sample(4)), StepError);
}

BOOST_AUTO_TEST_CASE(rows_end_before_the_tokens_that_the_request_lacks) {
  Sampler sampler(40);
  Row row(40, 0.0F);
  row[5] = 1.0F;
  row[31] = 2.0F;
  row[37] = 3.0F;
  const auto sample = [&](std::int32_t change, std::span<const std::uint32_t> allowed = {}) {
    SamplerState state({}, {}, 1, 10, change);
    return sampler.sample(state, row.data(), Tokens{0}, false, {}, {.allowed = allowed}).token;
  };
  BOOST_TEST(sample(0) == 37);
  BOOST_TEST(sample(-3) == 31);
  BOOST_TEST(sample(-2) == 37);
  BOOST_TEST(sample(-9) == 5);
  // A guide knows the whole vocabulary, in as many words.
  const std::vector<std::uint32_t> all(2, ~std::uint32_t{0});
  BOOST_TEST(sample(-3, all) == 31);
  BOOST_TEST(sample(-9, all) == 5);
  const std::vector<std::uint32_t> last{0, 1U << 5};
  BOOST_TEST(sample(-2, last) == 37);
  BOOST_CHECK_THROW(static_cast<void>(sample(-3, last)), StepError);
  row[37] = std::numeric_limits<float>::quiet_NaN();
  BOOST_TEST(sample(-3) == 31);
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

BOOST_AUTO_TEST_CASE(top_p_decays_from_token_to_token_and_is_reset) {
  // If eight tokens are equal, top_p keeps the first ones that make up its share.
  const Row row(8, 0.0F);
  const SamplingParams params =
      resolve({.top_p = 1.0, .top_p_min = 0.2, .top_p_reset_ids = 5, .top_p_decay = 0.5});
  Sampler sampler(8);
  const std::vector<std::pair<Tokens, std::size_t>> kept = {{{5, 1}, 8},
                                                            {{5, 1, 0}, 4},
                                                            {{5, 1, 0, 0}, 2},
                                                            {{5, 1, 0, 0, 0}, 2},
                                                            {{5, 1, 0, 0, 0, 5}, 8},
                                                            {{5, 1, 0, 0, 0, 5, 5}, 8},
                                                            {{5, 1, 0, 0, 0, 5, 5, 1}, 4}};
  SamplerState steady(params, {}, 2, 20);
  for (const auto& [tokens, count] : kept) {
    BOOST_TEST(sampler.distribution(steady, row.data(), tokens).size() == count);
    BOOST_TEST(sampler.distribution(steady, row.data(), tokens).size() == count);
    SamplerState fresh(params, {}, 2, 20);
    BOOST_TEST(sampler.distribution(fresh, row.data(), tokens).size() == count);
  }
  // A lowest value above top_p holds from the second token on.
  SamplerState raised(resolve({.top_p = 0.25, .top_p_min = 0.5}), {}, 1, 4);
  BOOST_TEST(sampler.distribution(raised, row.data(), Tokens{0}).size() == 2U);
  BOOST_TEST(sampler.distribution(raised, row.data(), Tokens{0, 0}).size() == 4U);
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
  for (const TokenConstraints& both :
       {TokenConstraints{.end_id = 0, .stop_ids = {1}}, TokenConstraints{.stop_ids = {0, 1}}}) {
    BOOST_TEST(greedy(row, both, params, {2, 2, 2}, 2) == 2);
    BOOST_TEST(greedy(row, both, params, {2, 2, 2, 2}, 2) == 0);
  }
  BOOST_TEST(TokenConstraints{.stop_ids = {3}}.validate(3).list().size() == 1U);
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

BOOST_AUTO_TEST_CASE(a_mask_forbids_what_a_bias_of_minus_infinity_does) {
  std::mt19937_64 random(31);
  for (const std::size_t vocab : {1, 31, 32, 33, 64, 100, 1000}) {
    Sampler sampler(static_cast<std::int64_t>(vocab));
    for (int round = 0; round < 40; ++round) {
      const Row row = random_row(random, vocab, round % 2 == 0);
      std::vector<std::uint32_t> mask((vocab + 31) / 32);
      for (auto& word : mask) {
        word = round % 5 == 0 ? ~0U : round % 5 == 1 ? 0U : static_cast<std::uint32_t>(random());
      }
      const std::size_t one = random() % vocab;
      mask[one / 32] |= 1U << one % 32;
      Row bias(vocab, 0.0F);
      for (std::size_t i = 0; i < vocab; ++i)
        bias[i] = (mask[i / 32] >> i % 32 & 1U) != 0 ? 0.0F : kForbidden;
      const SamplingParams params =
          resolve(round % 3 == 0 ? SamplingConfig{} : SamplingConfig{.top_p = 0.9, .seed = random()});
      SamplerState masked(params, {}, 1, 4);
      SamplerState biased(params, {.embedding_bias = std::make_shared<Row>(bias)}, 1, 4);
      TokenLogProb likely;
      const auto actual =
          sampler.sample(masked, row.data(), Tokens{0}, true, {&likely, 1}, {.allowed = mask});
      const auto expected = sampler.sample(biased, row.data(), Tokens{0}, true);
      BOOST_TEST(actual.token == expected.token);
      BOOST_TEST(actual.log_prob == expected.log_prob);
      BOOST_TEST(likely.token_id == greedy(row));  // the model's, even if forbidden
    }
  }
  Sampler sampler(40);
  SamplerState state({}, {}, 1, 4);
  const std::vector<std::uint32_t> nothing(2);
  BOOST_CHECK_THROW(
      (void)sampler.sample(state, Row(40, 0.0F).data(), Tokens{0}, false, {}, {.allowed = nothing}),
      StepError);
}

BOOST_AUTO_TEST_CASE(only_allowed_tokens_need_finite_changed_logits) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr std::size_t kVocab = 40;
  Sampler sampler(kVocab);
  SamplerState state({}, {}, 1, 4);
  const Row row(kVocab, 1.0F);
  for (std::size_t allowed = 0; allowed < kVocab; ++allowed) {
    std::vector<std::uint32_t> mask(2);
    mask[allowed / 32] = 1U << allowed % 32;
    for (const float bad : {kNan, std::numeric_limits<float>::infinity()}) {
      Row changed(kVocab, bad);
      const auto sample = [&] {
        return sampler.sample(state, row.data(), Tokens{0}, false, {},
                              {.allowed = mask, .logits = changed.data()});
      };
      BOOST_CHECK_THROW((void)sample(), StepError);
      changed[allowed] = -3.0F;
      BOOST_TEST(std::cmp_equal(sample().token, allowed));
    }
  }
}

BOOST_AUTO_TEST_CASE(changed_logits_choose_the_token_and_the_model_s_give_log_probs) {
  const Row row = {1.0F, 3.0F, 2.0F};
  const Row changed = {5.0F, kForbidden, 6.0F};
  Sampler sampler(3);
  SamplerState state({}, {.embedding_bias = std::make_shared<Row>(Row{2.0F, 0.0F, 0.0F})}, 1, 4);
  const auto sampled = sampler.sample(state, row.data(), Tokens{0}, true, {}, {.logits = changed.data()});
  BOOST_TEST(sampled.token == 0);
  BOOST_TEST(sampled.log_prob == LogSoftmax(row).log_prob(0));
  const std::vector<std::uint32_t> mask = {0b100};
  BOOST_TEST(
      sampler.sample(state, row.data(), Tokens{0}, false, {}, {.allowed = mask, .logits = changed.data()})
          .token == 2);
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    const Row broken = {bad, 0.0F, 0.0F};
    BOOST_CHECK_THROW(
        (void)sampler.sample(state, row.data(), Tokens{0}, false, {}, {.logits = broken.data()}), StepError);
  }
  const Row none(3, kForbidden);
  BOOST_CHECK_THROW((void)sampler.sample(state, row.data(), Tokens{0}, false, {}, {.logits = none.data()}),
                    StepError);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::sampler_test
