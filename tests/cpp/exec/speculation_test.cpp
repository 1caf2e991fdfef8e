// Requests with drafts: the same results in fewer steps.

#include <algorithm>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <numeric>
#include <random>
#include <string>

#include "adaptrt/exec/executor.h"
#include "crowd_setting.h"
#include "fake_engine.h"
#include "fake_grammar.h"
#include "sequences.h"

namespace adaptrt::test::speculation_test {
namespace {

constexpr LookaheadDecodingConfig kLookahead{
    .max_window_size = 6, .max_ngram_size = 4, .max_verification_set_size = 4};

Request with_drafts(Request request, std::vector<TokenId> drafts) {
  request.external_draft_tokens_config.emplace().tokens = std::move(drafts);
  return request;
}

std::vector<TokenId> first_of(const std::vector<TokenId>& tokens, std::size_t count) {
  return {tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(count)};
}

/// Everything that a sequence returned, except how it was split into responses and steps.
struct Outcome {
  std::vector<TokenId> tokens;
  std::vector<float> log_probs;
  std::vector<float> logits;
  std::vector<std::vector<TokenLogProb>> top;
  FinishReason reason = FinishReason::kNotFinished;
  std::string error;

  bool operator==(const Outcome&) const = default;
};

/// Keyed by sequence index; an error applies to all sequences.
std::map<std::int32_t, Outcome> outcomes_of(Executor& executor, const Request& request) {
  std::map<std::int32_t, Outcome> outcomes;
  for (std::int32_t i = 0; i < request.num_sequences(); ++i) outcomes[i];
  for (const Response& response : collect(executor, executor.enqueue_request(request))) {
    if (!response.error_msg.empty()) {
      for (auto& [index, outcome] : outcomes) outcome.error = response.error_msg;
      continue;
    }
    const Result& result = response.result;
    Outcome& outcome = outcomes.at(result.sequence_index);
    const auto append = [](auto& all, const auto& some) { all.insert(all.end(), some.begin(), some.end()); };
    append(outcome.tokens, result.output_token_ids.at(0));
    outcome.log_probs = result.log_probs.value_or(std::vector<std::vector<float>>(1)).at(0);
    if (result.generation_logits) append(outcome.logits, *result.generation_logits->values);
    if (result.top_log_probs) append(outcome.top, result.top_log_probs->at(0));
    outcome.reason = result.finish_reasons.at(0);
  }
  return outcomes;
}

/// Checks that the request gives the same result with and without these drafts.
void check_the_same(const Request& request, const std::vector<TokenId>& drafts) {
  const auto executor = make_guided();
  const auto expected = outcomes_of(*executor, request);
  const auto found = outcomes_of(*executor, with_drafts(request, drafts));
  for (const auto& [index, outcome] : expected) {
    BOOST_TEST(found.at(index).tokens == outcome.tokens, boost::test_tools::per_element());
    BOOST_TEST(found.at(index).error == outcome.error);
    BOOST_TEST((found.at(index) == outcome));
  }
}

SpecDecodingStats total_of(Executor& executor) {
  SpecDecodingStats total;
  for (const IterationStats& step : executor.get_latest_iteration_stats()) {
    if (!step.spec_decoding_stats) continue;
    total.num_draft_tokens += step.spec_decoding_stats->num_draft_tokens;
    total.num_accepted_tokens += step.spec_decoding_stats->num_accepted_tokens;
    total.num_requests_with_draft_tokens += step.spec_decoding_stats->num_requests_with_draft_tokens;
  }
  return total;
}

/// Greedy sampling over so few tokens that n-grams repeat often.
FakeEngine::Options few_tokens() {
  FakeEngine::Options options;
  options.vocab_size = 3;
  return options;
}

Request everything(Request request) {
  request.output_config.return_log_probs = true;
  request.output_config.return_generation_logits = true;
  request.output_config.top_log_probs = 2;
  return request;
}

BOOST_AUTO_TEST_SUITE(speculation)

BOOST_AUTO_TEST_CASE(right_drafts_come_in_one_step) {
  const auto expected = expected_tokens(kPrompt, 9);
  const auto executor = make_executor();
  const Result result = collect_result(
      *executor, executor->enqueue_request(with_drafts(make_request(kPrompt, 9), first_of(expected, 8))));
  BOOST_TEST(result.output_token_ids.at(0) == expected, boost::test_tools::per_element());
  BOOST_TEST(result.decoding_iter == 1);
  const auto steps = executor->get_latest_iteration_stats();
  BOOST_TEST_REQUIRE(steps.size() == 1U);
  BOOST_TEST_REQUIRE(steps[0].spec_decoding_stats.has_value());
  const SpecDecodingStats& stats = *steps[0].spec_decoding_stats;
  BOOST_TEST(stats.num_draft_tokens == 8);
  BOOST_TEST(stats.num_accepted_tokens == 8);
  BOOST_TEST(stats.num_requests_with_draft_tokens == 1);
  BOOST_TEST(stats.acceptance_length == 9.0);
  BOOST_TEST(stats.iter_latency_ms >= 0.0);
  BOOST_TEST((stats.draft_overhead >= 0.0 && stats.draft_overhead <= 1.0));
  BOOST_TEST(to_json_str(steps[0]).find(
                 R"("specDecodingStats":{"numDraftTokens":8,"numAcceptedTokens":8,)") != std::string::npos);
}

BOOST_AUTO_TEST_CASE(drafts_count_up_to_the_first_wrong_one) {
  const auto expected = expected_tokens(kPrompt, 9);
  auto drafts = expected;
  drafts[3] = (drafts[3] + 1) % 101;
  const auto executor = make_executor();
  const Result result =
      collect_result(*executor, executor->enqueue_request(with_drafts(make_request(kPrompt, 9), drafts)));
  BOOST_TEST(result.output_token_ids.at(0) == expected, boost::test_tools::per_element());
  BOOST_TEST(result.decoding_iter == 6);  // four tokens, then one at a time
  const SpecDecodingStats total = total_of(*executor);
  BOOST_TEST(total.num_draft_tokens == 8);
  BOOST_TEST(total.num_accepted_tokens == 3);
}

BOOST_AUTO_TEST_CASE(statistics_count_what_a_decode_gained) {
  // The prompt's step has no room for the drafts.
  const auto expected = expected_tokens(kPrompt, 9);
  ExecutorConfig config;
  config.max_num_tokens = 7;
  config.request_stats_max_iterations = 100;
  const auto executor = make_executor(config);
  const Request request = with_drafts(make_request(kPrompt, 9), expected);
  BOOST_TEST(collect_result(*executor, executor->enqueue_request(request)).decoding_iter == 3);
  const auto steps = executor->get_latest_iteration_stats();
  BOOST_TEST_REQUIRE(steps.size() == 3U);
  BOOST_TEST(!steps[0].spec_decoding_stats.has_value());
  BOOST_TEST(steps[1].inflight_batching_stats->avg_num_decoded_tokens_per_iter == 7.0);
  BOOST_TEST(steps[2].inflight_batching_stats->avg_num_decoded_tokens_per_iter == 1.0);
  const auto requests = executor->get_latest_request_stats();
  BOOST_TEST(requests.back().request_stats.at(0).avg_num_decoded_tokens_per_iter == 3.0);
}

BOOST_AUTO_TEST_CASE(streams_have_several_tokens_in_a_response) {
  const auto expected = expected_tokens(kPrompt, 6);
  auto request = with_drafts(everything(make_request(kPrompt, 6)), first_of(expected, 3));
  request.streaming = true;
  const auto executor = make_executor();
  const auto responses = collect(*executor, executor->enqueue_request(request));
  BOOST_TEST_REQUIRE(responses.size() == 3U);
  BOOST_TEST(responses[0].result.output_token_ids.at(0) == first_of(expected, 4),
             boost::test_tools::per_element());
  BOOST_TEST(responses[0].result.generation_logits->shape == (std::vector<std::int64_t>{4, 1, 101}),
             boost::test_tools::per_element());
  BOOST_TEST(responses[0].result.top_log_probs->at(0).size() == 4U);
  BOOST_TEST(responses[0].result.log_probs->at(0).size() == 4U);
  BOOST_TEST(responses[2].result.decoding_iter == 3);
}

BOOST_AUTO_TEST_CASE(responses_are_the_same_as_without_drafts) {
  const auto expected = expected_tokens(kPrompt, 12);
  std::vector<Request> requests;
  requests.push_back(everything(make_request(kPrompt, 12)));
  requests.push_back(requests[0]);
  requests.back().output_config.return_context_logits = true;
  requests.push_back(requests[0]);
  requests.back().end_id = expected[5];
  requests.push_back(requests[0]);
  requests.back().stop_words = {{expected[3], expected[4]}};
  requests.push_back(requests.back());
  requests.back().sampling_config.repetition_penalty = 1.2;
  requests.back().sampling_config.presence_penalty = 0.3;
  requests.push_back(requests[0]);
  requests.back().end_id = expected[2];
  requests.back().sampling_config.min_tokens = 7;
  requests.push_back(guided(requests[0], "7"));
  for (Request& request : requests) {
    for (const bool streaming : {false, true}) {
      request.streaming = streaming;
      const auto executor = make_guided();
      const auto right = outcomes_of(*executor, request).at(0).tokens;
      for (std::size_t num_right = 0; num_right < right.size(); ++num_right) {
        auto drafts = right;
        drafts[num_right] = (drafts[num_right] + 1) % 101;
        check_the_same(request, drafts);
      }
      auto longer = right;
      longer.insert(longer.end(), 9, 1);
      check_the_same(request, longer);
    }
  }
}

BOOST_AUTO_TEST_CASE(an_error_comes_after_the_tokens_before_it) {
  // The guide breaks after the third token.
  auto request = everything(guided(make_request(kPrompt, 9), "broken"));
  request.streaming = true;
  const auto executor = make_guided();
  const auto without = outcomes_of(*executor, request).at(0);
  BOOST_TEST(without.tokens.size() == 3U);
  BOOST_TEST(without.error != "");
  check_the_same(request, without.tokens);
}

BOOST_AUTO_TEST_CASE(each_sequence_verifies_the_drafts_on_its_own) {
  const Request request = several(everything(sampled(kPrompt, 8, 3)), 3);
  const auto executor = make_guided();
  const auto expected = outcomes_of(*executor, request);
  for (const auto& [index, outcome] : expected) check_the_same(request, outcome.tokens);
  const auto drafting = make_guided();
  static_cast<void>(outcomes_of(*drafting, with_drafts(request, expected.at(1).tokens)));
  BOOST_TEST(total_of(*drafting).num_accepted_tokens >= 6);  // after the first token, which the fork gets
}

BOOST_AUTO_TEST_CASE(n_grams_of_the_text_are_drafts) {
  ExecutorConfig config;
  config.decoding_config.emplace().lookahead_decoding_config = kLookahead;
  const auto executor = make_executor(config, few_tokens());
  const std::vector<TokenId> prompt = {0, 1, 2, 0, 1};
  for (const bool is_off : {false, true}) {
    auto request = make_request(prompt, 100);
    if (is_off) request.lookahead_config = LookaheadDecodingConfig{1, 1, 0};
    const Result result = collect_result(*executor, executor->enqueue_request(request));
    BOOST_TEST(result.output_token_ids.at(0) == expected_tokens(prompt, 100, 0, 3),
               boost::test_tools::per_element());
    const SpecDecodingStats total = total_of(*executor);
    BOOST_TEST((total.num_accepted_tokens > 0) == !is_off);
    BOOST_TEST(total.num_draft_tokens >= total.num_accepted_tokens);
    BOOST_TEST(result.decoding_iter == 100 - total.num_accepted_tokens);
  }
}

BOOST_AUTO_TEST_CASE(one_request_may_have_them_alone) {
  const auto executor = make_executor({}, few_tokens());
  auto request = make_request({0, 1, 2, 0, 1}, 100);
  static_cast<void>(collect_result(*executor, executor->enqueue_request(request)));
  BOOST_TEST(total_of(*executor).num_draft_tokens == 0);
  request.lookahead_config = kLookahead;
  static_cast<void>(collect_result(*executor, executor->enqueue_request(request)));
  BOOST_TEST(total_of(*executor).num_accepted_tokens > 0);
}

BOOST_AUTO_TEST_CASE(requests_with_post_processors_have_no_drafts) {
  class Nothing final : public LogitsPostProcessor {
   public:
    std::shared_ptr<void> enter() override { return nullptr; }
    void process(PostProcessedRow& /*row*/) override {}
    void process_batch(std::span<PostProcessedRow> /*rows*/) override {}
    [[nodiscard]] bool equals(const LogitsPostProcessor& other) const override { return this == &other; }
  };
  const auto expected = expected_tokens(kPrompt, 6);
  auto request = with_drafts(make_request(kPrompt, 6), expected);
  request.logits_post_processor = PostProcessorFunction{std::make_shared<Nothing>()};
  const auto executor = make_executor();
  BOOST_TEST(collect_result(*executor, executor->enqueue_request(request)).output_token_ids.at(0) == expected,
             boost::test_tools::per_element());
  BOOST_TEST(total_of(*executor).num_draft_tokens == 0);
}

const std::vector<CrowdSetting> kSettings = {
    {CapacitySchedulerPolicy::kGuaranteedNoEvict, 1024, 64, true},
    {CapacitySchedulerPolicy::kGuaranteedNoEvict, 160, 6, false},
    {CapacitySchedulerPolicy::kMaxUtilization, 128, 64, true},
    {CapacitySchedulerPolicy::kMaxUtilization, 128, 9, false},
    {CapacitySchedulerPolicy::kStaticBatch, 512, 32, true},
};

/// Uses few tokens, so that some drafts are right and some wrong. Each request is compared with its result
/// alone and without drafts.
BOOST_DATA_TEST_CASE(drafts_change_nothing_in_a_crowd, boost::unit_test::data::make(kSettings), setting) {
  ExecutorConfig config = config_of(setting);
  config.iter_stats_max_iterations = 10000;
  config.decoding_config.emplace().lookahead_decoding_config = kLookahead;
  const auto executor = make_executor(config, few_tokens());
  const auto alone = make_executor({}, few_tokens());
  std::mt19937 random(5);
  const auto draw = [&](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
  std::vector<Request> requests;
  std::vector<RequestId> ids;
  for (int i = 0; i < 40; ++i) {
    std::vector<TokenId> prompt(static_cast<std::size_t>(draw(1, 40)));
    for (auto& token : prompt) token = draw(0, 2);
    auto request = make_request(prompt, draw(1, 40));
    request.output_config.return_log_probs = true;
    request.num_return_sequences = draw(0, 3) == 0 ? 2 : 1;
    if (const int task_id = draw(0, 3); task_id > 0)
      request.lora_config = fake_adapter(static_cast<std::uint64_t>(task_id));
    if (draw(0, 1) == 0) {
      request.sampling_config.top_p = 0.9;
      request.sampling_config.temperature = 0.5;
      request.sampling_config.seed = static_cast<std::uint64_t>(i);
      request.sampling_config.frequency_penalty = 0.1;
    }
    if (draw(0, 3) == 0) request.stop_words = {{0, 1, 1, 2}};
    requests.push_back(request);
    if (draw(0, 3) == 0)
      request = with_drafts(request, std::vector<TokenId>(static_cast<std::size_t>(draw(1, 9)), 1));
    ids.push_back(executor->enqueue_request(request));
  }
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const auto found = results_of(*executor, ids[i]);
    const auto expected = results_of(*alone, alone->enqueue_request(requests[i]));
    for (const auto& [index, results] : expected) {
      BOOST_TEST(tokens_of(found.at(index)) == tokens_of(results), boost::test_tools::per_element());
      BOOST_TEST((found.at(index).back().log_probs == results.back().log_probs));
      BOOST_TEST((found.at(index).back().finish_reasons == results.back().finish_reasons));
    }
  }
  const SpecDecodingStats total = total_of(*executor);
  BOOST_TEST(total.num_accepted_tokens > 20);
  BOOST_TEST(total.num_accepted_tokens < total.num_draft_tokens);
}

BOOST_AUTO_TEST_CASE(invalid_options_are_refused_by_name) {
  const auto executor = make_executor();
  const auto check = [&](auto set, const std::string& part) {
    Request request = make_request(kPrompt, 4);
    set(request);
    BOOST_CHECK_EXCEPTION(executor->enqueue_request(request), RequestError, [&](const RequestError& error) {
      return std::string(error.what()).find(part) != std::string::npos;
    });
  };
  const auto check_drafts = [&](std::vector<TokenId> tokens, auto set, const std::string& problem) {
    const auto set_config = [&](Request& request) {
      set(request.external_draft_tokens_config.emplace());
      request.external_draft_tokens_config->tokens = tokens;
    };
    check(set_config, "external_draft_tokens_config." + problem);
  };
  using Config = ExternalDraftTokensConfig;
  check_drafts({}, [](Config&) {}, "tokens is empty; accepted: one token or more");
  check_drafts({1, 101}, [](Config&) {}, "tokens[1] is 101; the vocabulary is 0 to 100");
  check_drafts({-1}, [](Config&) {}, "tokens[0] is -1");
  check_drafts({1}, [](Config& config) { config.logits = given("X"); }, "logits is given");
  check_drafts(
      {1}, [](Config& config) { config.acceptance_threshold = 0.5; }, "acceptance_threshold is given");
  check_drafts({1}, [](Config& config) { config.fast_logits = true; }, "fast_logits is True");
  check([](Request& request) { request.lookahead_config = LookaheadDecodingConfig{0, 2, 1}; },
        "lookahead_config.max_window_size is 0; accepted: 1 or more");

  const auto check_config = [&](auto set, const std::string& part) {
    ExecutorConfig config;
    set(config.decoding_config.emplace());
    BOOST_CHECK_EXCEPTION(
        static_cast<void>(make_executor(config)), ConfigError,
        [&](const ConfigError& error) { return std::string(error.what()).find(part) != std::string::npos; });
  };
  check_config([](DecodingConfig& config) { config.decoding_mode = "Medusa"; },
               "decoding_config.decoding_mode is Medusa; accepted: None, Auto or Lookahead");
  check_config([](DecodingConfig& config) { config.decoding_mode = "Lookahead"; },
               "lookahead_decoding_config None; accepted: a LookaheadDecodingConfig");
  check_config(
      [](DecodingConfig& config) {
        config.decoding_mode = "Auto";
        config.lookahead_decoding_config = kLookahead;
      },
      "decoding_config.decoding_mode is Auto and lookahead_decoding_config is given");
  check_config([](DecodingConfig& config) { config.medusa_choices = given("X"); },
               "decoding_config.medusa_choices is given");
  check_config([](DecodingConfig& config) { config.eagle_config = given("X"); },
               "decoding_config.eagle_config is given");
  check_config(
      [](DecodingConfig& config) { config.lookahead_decoding_config = LookaheadDecodingConfig{2, 1, 0}; },
      "decoding_config.lookahead_decoding_config.max_window_size is 2 and max_ngram_size 1; accepted: 1, or");
  ExecutorConfig fine;
  fine.decoding_config.emplace().decoding_mode = "Auto";
  BOOST_TEST(fine.validate().empty());
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::test::speculation_test
