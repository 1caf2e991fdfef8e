#include "adaptrt/sample/sampling_config.h"

#include <boost/test/unit_test.hpp>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace adaptrt::sampling_config_test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

BOOST_AUTO_TEST_SUITE(sampling_config)

BOOST_AUTO_TEST_CASE(defaults_are_valid_and_greedy) {
  BOOST_TEST(SamplingConfig{}.validate().empty());
  const SamplingParams params = resolve({});
  BOOST_TEST(params.greedy);
  BOOST_TEST(params.seed == 0U);
  BOOST_TEST(params.temperature == 1.0);
}

BOOST_AUTO_TEST_CASE(each_bad_field_is_refused_by_name) {
  using Change = std::function<void(SamplingConfig&)>;
  const std::vector<std::pair<std::string, Change>> cases = {
      {"beam_width", [](auto& c) { c.beam_width = -2; }},
      {"beam_width", [](auto& c) { c.beam_width = 0; }},
      {"length_penalty", [](auto& c) { c.length_penalty = kNan; }},
      {"length_penalty", [](auto& c) { c.length_penalty = -kInfinity; }},
      {"beam_search_diversity_rate", [](auto& c) { c.beam_search_diversity_rate = -0.1; }},
      {"beam_search_diversity_rate", [](auto& c) { c.beam_search_diversity_rate = kNan; }},
      {"beam_search_diversity_rate", [](auto& c) { c.beam_search_diversity_rate = kInfinity; }},
      {"top_k", [](auto& c) { c.beam_width = 2, c.top_k = 1; }},
      {"top_p", [](auto& c) { c.beam_width = 2, c.top_p = 0.5; }},
      {"top_p_decay", [](auto& c) { c.beam_width = 2, c.top_p = 1.0, c.top_p_decay = 0.5; }},
      {"min_p", [](auto& c) { c.beam_width = 2, c.min_p = 0.5; }},
      {"temperature", [](auto& c) { c.beam_width = 2, c.temperature = 0.0; }},
      {"num_return_sequences", [](auto& c) { c.beam_width = 2, c.num_return_sequences = 3; }},
      {"top_k", [](auto& c) { c.top_k = -1; }},
      {"top_p", [](auto& c) { c.top_p = 0.0; }},
      {"top_p", [](auto& c) { c.top_p = 1.0001; }},
      {"top_p", [](auto& c) { c.top_p = kNan; }},
      {"top_p_min", [](auto& c) { c.top_p_min = 0.0; }},
      {"top_p_min", [](auto& c) { c.top_p_min = 1.1; }},
      {"top_p_min", [](auto& c) { c.top_p_min = kNan; }},
      {"top_p_reset_ids", [](auto& c) { c.top_p_reset_ids = -2; }},
      {"top_p_decay", [](auto& c) { c.top_p_decay = 0.5; }},  // without top_p
      {"top_p_decay", [](auto& c) { c.top_p = 0.5, c.top_p_decay = 0.0; }},
      {"top_p_decay", [](auto& c) { c.top_p = 0.5, c.top_p_decay = 1.1; }},
      {"top_p_decay", [](auto& c) { c.top_p = 0.5, c.top_p_decay = kNan; }},
      {"temperature", [](auto& c) { c.temperature = -0.1; }},
      {"temperature", [](auto& c) { c.temperature = kNan; }},
      {"temperature", [](auto& c) { c.temperature = kInfinity; }},
      {"min_tokens", [](auto& c) { c.min_tokens = -1; }},
      {"repetition_penalty", [](auto& c) { c.repetition_penalty = 0.0; }},
      {"repetition_penalty", [](auto& c) { c.repetition_penalty = kNan; }},
      {"presence_penalty", [](auto& c) { c.presence_penalty = kInfinity; }},
      {"frequency_penalty", [](auto& c) { c.frequency_penalty = kNan; }},
      {"no_repeat_ngram_size", [](auto& c) { c.no_repeat_ngram_size = -1; }},
      {"num_return_sequences", [](auto& c) { c.num_return_sequences = 0; }},
      {"min_p", [](auto& c) { c.min_p = -0.1; }},
      {"min_p", [](auto& c) { c.min_p = 1.1; }},
      {"min_p", [](auto& c) { c.min_p = kNan; }},
      {"beam_width_array", [](auto& c) { c.beam_width_array = std::vector<std::int32_t>{1}; }},
  };
  for (const auto& [field, change] : cases) {
    SamplingConfig config;
    change(config);
    const Problems problems = config.validate();
    BOOST_TEST_REQUIRE(problems.list().size() == 1U, field);
    BOOST_TEST(problems.list()[0].starts_with(field + " is "), problems.list()[0]);
    BOOST_CHECK_THROW((void)resolve(config), ConfigError);
  }
}

BOOST_AUTO_TEST_CASE(all_problems_are_told_at_once) {
  SamplingConfig config;
  config.beam_width = -4;
  config.top_k = -1;
  config.top_p_min = 1.5;
  BOOST_TEST(config.validate().list().size() == 3U);
}

BOOST_AUTO_TEST_CASE(options_for_beams_only_are_accepted_for_one_beam) {
  SamplingConfig config;
  config.beam_search_diversity_rate = 0.5;
  config.length_penalty = 0.5;
  config.early_stopping = 1;
  BOOST_TEST(config.validate().empty());
  BOOST_TEST(resolve(config).greedy);
}

BOOST_AUTO_TEST_CASE(how_beams_are_searched) {
  SamplingConfig config;
  config.beam_width = 3;
  config.top_k = 0;
  config.top_p = 1.0;
  config.min_p = 0.0;
  config.temperature = 0.3;
  config.num_return_sequences = 3;
  BOOST_TEST(config.validate().empty());
  BeamSearchParams params = resolve_beams(config);
  BOOST_TEST(params.beam_width == 3);
  BOOST_TEST(params.length_penalty == 0.0);
  BOOST_TEST(params.diversity_rate == 0.0);
  BOOST_CHECK(params.early_stopping == EarlyStopping::kWhenEnoughHaveEnded);
  config.length_penalty = -2.0;
  config.beam_search_diversity_rate = 0.5;
  params = resolve_beams(config);
  BOOST_TEST(params.length_penalty == -2.0);
  BOOST_TEST(params.diversity_rate == 0.5);
  const auto stopping = [&](std::int32_t early_stopping) {
    config.early_stopping = early_stopping;
    return resolve_beams(config).early_stopping;
  };
  BOOST_CHECK(stopping(1) == EarlyStopping::kWhenEnoughHaveEnded);
  BOOST_CHECK(stopping(0) == EarlyStopping::kByEstimate);
  BOOST_CHECK(stopping(2) == EarlyStopping::kNever);
  BOOST_CHECK(stopping(-1) == EarlyStopping::kNever);
}

BOOST_AUTO_TEST_CASE(the_ends_of_the_ranges_are_accepted) {
  SamplingConfig config;
  config.top_k = 0;
  config.top_p = 1.0;
  config.top_p_decay = 1.0;
  config.top_p_min = 1.0;
  config.top_p_reset_ids = -1;
  config.min_p = 1.0;
  config.temperature = 0.0;
  config.repetition_penalty = 1e-6;
  config.min_tokens = 0;
  config.no_repeat_ngram_size = 0;
  config.num_return_sequences = 1;
  BOOST_TEST(config.validate().empty());
}

BOOST_AUTO_TEST_CASE(greedy_unless_a_filter_asks_for_a_draw) {
  const auto greedy = [](const std::function<void(SamplingConfig&)>& change) {
    SamplingConfig config;
    change(config);
    return resolve(config).greedy;
  };
  BOOST_TEST(greedy([](auto& c) { c.temperature = 0.7; }));
  BOOST_TEST(greedy([](auto& c) { c.top_k = 1; }));
  BOOST_TEST(greedy([](auto& c) { c.top_k = 0; }));
  BOOST_TEST(greedy([](auto& c) { c.min_p = 0.0; }));
  BOOST_TEST(greedy([](auto& c) { c.top_p = 0.9, c.temperature = 0.0; }));
  BOOST_TEST(greedy([](auto& c) { c.top_p = 0.9, c.top_k = 1; }));
  BOOST_TEST(!greedy([](auto& c) { c.top_k = 2; }));
  BOOST_TEST(!greedy([](auto& c) { c.top_p = 1.0; }));
  BOOST_TEST(!greedy([](auto& c) { c.min_p = 0.1; }));
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::sampling_config_test
