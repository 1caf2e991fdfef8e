// Requests with beams: the results equal a plain search over the model, alone and with other requests.

#include <algorithm>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/sample/log_softmax.h"
#include "sequences.h"

namespace adaptrt::test::beams_test {
namespace {

constexpr std::int64_t kVocabulary = 101;

ExecutorConfig with_beams(std::int32_t max_beam_width = 4) {
  ExecutorConfig config;
  config.max_beam_width = max_beam_width;
  return config;
}

FakeEngine::Options engine_with_beams(std::int32_t max_beam_width = 4) {
  FakeEngine::Options options;
  options.max_beam_width = max_beam_width;
  return options;
}

std::unique_ptr<Executor> make_searching(ExecutorConfig config = with_beams(), FakeEngine::Hook hook = {}) {
  return make_executor(config, engine_with_beams(), std::move(hook));
}

Request searched(std::vector<TokenId> prompt, std::int32_t max_tokens, std::int32_t beam_width) {
  Request request = make_request(std::move(prompt), max_tokens);
  request.sampling_config.beam_width = beam_width;
  request.sampling_config.length_penalty = 1.0;
  request.sampling_config.early_stopping = 0;
  request.output_config.return_log_probs = true;
  return request;
}

struct Found {
  std::vector<TokenId> tokens;
  double score = 0.0;
  bool ended_by_id = false;
};

/// transformers' search with early_stopping = False over FakeEngine's model, with whole sequences.
std::vector<Found> search_plainly(const Request& request, std::uint64_t task_id = 0) {
  const auto width = static_cast<std::size_t>(request.sampling_config.beam_width);
  const double length_penalty = request.sampling_config.length_penalty.value_or(0.0);
  const auto value_of = [&](const Found& found) {
    return found.score / std::pow(static_cast<double>(found.tokens.size()), length_penalty);
  };
  std::vector<Found> beams(1);
  std::vector<Found> ended;
  while (!beams.empty()) {
    std::vector<Found> candidates;
    for (const Found& beam : beams) {
      auto history = request.input_token_ids;
      history.insert(history.end(), beam.tokens.begin(), beam.tokens.end());
      const auto logits = FakeEngine::logits_after(history, task_id, kVocabulary);
      const LogSoftmax softmax(logits);
      for (TokenId token = 0; token < kVocabulary; ++token) {
        Found next = beam;
        next.tokens.push_back(token);
        next.score += double{softmax.log_prob(token)};
        next.ended_by_id = token == request.end_id;
        candidates.push_back(std::move(next));
      }
    }
    std::ranges::stable_sort(candidates, std::ranges::greater(), &Found::score);
    candidates.resize(std::min(candidates.size(), 2 * width));
    beams.clear();
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      const bool is_last = std::cmp_equal(candidates[i].tokens.size(), request.max_tokens);
      if (!candidates[i].ended_by_id && !is_last) {
        if (beams.size() < width) beams.push_back(candidates[i]);
      } else if (i < width) {
        ended.push_back(candidates[i]);
      }
    }
    std::ranges::stable_sort(ended, std::ranges::greater(), value_of);
    if (ended.size() > width) ended.resize(width);
    if (ended.size() == width && !beams.empty() && value_of(beams.front()) <= value_of(ended.back())) break;
  }
  for (Found& found : ended) {
    if (found.ended_by_id) found.tokens.pop_back();
  }
  return ended;
}

void check_result(const Result& result, const std::vector<Found>& expected, std::size_t count) {
  BOOST_TEST_REQUIRE(result.output_token_ids.size() == count);
  BOOST_TEST_REQUIRE(result.finish_reasons.size() == count);
  for (std::size_t i = 0; i < count; ++i) {
    BOOST_TEST(result.output_token_ids[i] == expected[i].tokens, boost::test_tools::per_element());
    BOOST_CHECK(result.finish_reasons[i] ==
                (expected[i].ended_by_id ? FinishReason::kEndId : FinishReason::kLength));
    if (!result.cum_log_probs) continue;
    BOOST_TEST((*result.cum_log_probs)[i] == static_cast<float>(expected[i].score));
    BOOST_TEST((*result.log_probs)[i].size() == expected[i].tokens.size());
  }
}

bool is_same(const Result& a, const Result& b) {
  return a.output_token_ids == b.output_token_ids && a.cum_log_probs == b.cum_log_probs &&
         a.log_probs == b.log_probs && a.finish_reasons == b.finish_reasons;
}

BOOST_AUTO_TEST_SUITE(beams)

BOOST_AUTO_TEST_CASE(the_beams_are_those_of_a_plain_search) {
  const auto executor = make_searching();
  for (const std::int32_t width : {2, 3, 4}) {
    for (const std::int32_t max_tokens : {1, 2, 9, 17}) {
      for (const std::int32_t num_returned : {1, 2}) {
        Request request = searched(kPrompt, max_tokens, width);
        request.sampling_config.num_return_sequences = num_returned;
        const auto free_running = search_plainly(request);
        request.end_id = free_running[0].tokens[free_running[0].tokens.size() / 2];
        const Result result = collect_result(*executor, executor->enqueue_request(request));
        BOOST_TEST(result.is_final);
        BOOST_TEST(result.sequence_index == 0);
        check_result(result, search_plainly(request), static_cast<std::size_t>(num_returned));
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(adapters_are_searched_with) {
  const auto executor = make_searching();
  Request request = searched(kPrompt, 11, 4);
  const auto of_base = search_plainly(request);
  request.lora_config = fake_adapter(3);
  const auto expected = search_plainly(request, 3);
  BOOST_TEST((of_base[0].tokens != expected[0].tokens));
  check_result(collect_result(*executor, executor->enqueue_request(request)), expected, 4);
}

BOOST_AUTO_TEST_CASE(how_many_are_returned) {
  const auto executor = make_searching();
  Request request = searched(kPrompt, 5, 4);
  const auto count = [&] {
    return collect_result(*executor, executor->enqueue_request(request)).output_token_ids.size();
  };
  BOOST_TEST(count() == 4U);
  request.num_return_sequences = 3;
  BOOST_TEST(count() == 3U);
  request.sampling_config.num_return_sequences = 3;
  BOOST_TEST(count() == 3U);
  request.num_return_sequences = 1;
  request.sampling_config.num_return_sequences = 1;
  BOOST_TEST(count() == 1U);
}

BOOST_AUTO_TEST_CASE(the_prompt_and_what_is_returned_of_it) {
  const auto executor = make_searching();
  Request request = searched(kPrompt, 5, 3);
  request.output_config.exclude_input_from_output = false;
  request.output_config.return_context_logits = true;
  request.output_config.return_prompt_log_probs = true;
  request.output_config.top_log_probs = 2;
  const Result result = collect_result(*executor, executor->enqueue_request(request));
  const auto expected = search_plainly(request);
  BOOST_TEST(result.prompt_log_probs->size() == kPrompt.size() - 1);
  BOOST_TEST(result.context_logits->shape[0] == static_cast<std::int64_t>(kPrompt.size()));
  for (std::size_t i = 0; i < 3; ++i) {
    auto tokens = kPrompt;
    tokens.insert(tokens.end(), expected[i].tokens.begin(), expected[i].tokens.end());
    BOOST_TEST(result.output_token_ids[i] == tokens, boost::test_tools::per_element());
    // Each token's log prob belongs to its own history, with the most likely tokens next to it.
    auto history = kPrompt;
    for (std::size_t k = 0; k < expected[i].tokens.size(); ++k) {
      const auto logits = FakeEngine::logits_after(history, 0, kVocabulary);
      const LogSoftmax softmax(logits);
      history.push_back(expected[i].tokens[k]);
      BOOST_TEST((*result.log_probs)[i][k] == softmax.log_prob(history.back()));
      std::vector<TokenLogProb> most_likely(2);
      softmax.find_most_likely(most_likely);
      BOOST_CHECK((*result.top_log_probs)[i][k] == most_likely);
    }
  }
}

BOOST_AUTO_TEST_CASE(streamed_beams_come_whole_after_each_step) {
  const auto executor = make_searching();
  Request request = searched(kPrompt, 7, 3);
  const auto expected = search_plainly(request);
  request.streaming = true;
  const auto responses = collect(*executor, executor->enqueue_request(request));
  BOOST_TEST_REQUIRE(responses.size() == 7U);
  for (std::size_t i = 0; i < responses.size(); ++i) {
    const Result& result = responses[i].result;
    BOOST_TEST(result.output_token_ids.size() == 3U);
    BOOST_TEST(result.is_final == (i == 6));
    BOOST_TEST(result.decoding_iter == static_cast<std::int32_t>(i) + 1);
    if (i == 6) continue;
    for (std::size_t k = 0; k < 3; ++k) {
      BOOST_TEST(result.output_token_ids[k].size() == i + 1);
      BOOST_CHECK(result.finish_reasons[k] == FinishReason::kNotFinished);
    }
  }
  check_result(responses.back().result, expected, 3);
}

BOOST_AUTO_TEST_CASE(penalties_and_words_act_on_each_beam) {
  const auto executor = make_searching();
  Request request = searched(kPrompt, 12, 4);
  const auto free_running = search_plainly(request);
  request.sampling_config.no_repeat_ngram_size = 1;
  request.sampling_config.repetition_penalty = 1.5;
  request.sampling_config.frequency_penalty = 0.5;
  request.bad_words = {{free_running[0].tokens[1]}, {free_running[0].tokens[0], free_running[1].tokens[1]}};
  const Result result = collect_result(*executor, executor->enqueue_request(request));
  for (const auto& tokens : result.output_token_ids) {
    std::vector<TokenId> seen = kPrompt;
    for (const TokenId token : tokens) {
      BOOST_TEST((std::ranges::find(seen, token) == seen.end()));
      BOOST_TEST(token != free_running[0].tokens[1]);
      seen.push_back(token);
    }
  }
  const auto alone = make_searching(with_beams());
  BOOST_TEST(is_same(result, collect_result(*alone, alone->enqueue_request(request))));
}

BOOST_AUTO_TEST_CASE(few_allowed_tokens_are_fewer_beams_in_the_beginning) {
  const auto executor = make_searching();
  Request request = searched({5, 9}, 3, 4);
  std::vector<float> bias(kVocabulary, -std::numeric_limits<float>::infinity());
  bias[7] = bias[8] = 0.0F;
  request.embedding_bias = bias_of(bias);
  const Result result = collect_result(*executor, executor->enqueue_request(request));
  BOOST_TEST_REQUIRE(result.output_token_ids.size() == 4U);
  for (std::size_t i = 0; i < 4; ++i) {
    BOOST_TEST(result.output_token_ids[i].size() == 3U);
    for (const TokenId token : result.output_token_ids[i]) BOOST_TEST((token == 7 || token == 8));
    for (std::size_t k = 0; k < i; ++k)
      BOOST_TEST((result.output_token_ids[i] != result.output_token_ids[k]));
  }
  bias[7] = bias[8] = -std::numeric_limits<float>::infinity();
  request.embedding_bias = bias_of(bias);
  const auto responses = collect(*executor, executor->enqueue_request(request));
  BOOST_TEST(responses.at(0).error_msg == "every token is forbidden");
  BOOST_TEST(collect_result(*executor, executor->enqueue_request(searched(kPrompt, 3, 2))).is_final);
}

BOOST_AUTO_TEST_CASE(stop_words_end_beams_and_stay_in_them) {
  const auto executor = make_searching();
  Request request = searched(kPrompt, 9, 3);
  const auto free_running = search_plainly(request);
  const auto& best = free_running[0].tokens;
  request.stop_words = {{best[3], best[4]}};
  const Result result = collect_result(*executor, executor->enqueue_request(request));
  bool any_stopped = false;
  for (std::size_t i = 0; i < result.output_token_ids.size(); ++i) {
    const auto& tokens = result.output_token_ids[i];
    const auto found = std::ranges::search(tokens, request.stop_words->front());
    const bool is_stopped = result.finish_reasons[i] == FinishReason::kStopWords;
    BOOST_TEST(is_stopped == !found.empty());
    if (is_stopped) BOOST_TEST((found.end() == tokens.end()));
    any_stopped = any_stopped || is_stopped;
  }
  BOOST_TEST(any_stopped);
}

BOOST_AUTO_TEST_CASE(cancelling_returns_the_best_so_far) {
  const auto gate = std::make_shared<Gate>();
  const auto executor = make_searching(with_beams(), [gate](std::int64_t step) {
    if (step == 4) gate->wait();
  });
  const RequestId id = executor->enqueue_request(searched(kPrompt, 50, 3));
  gate->await_visitor();
  executor->cancel_request(id);
  gate->open();
  const Result result = collect_result(*executor, id);
  BOOST_TEST(result.is_final);
  BOOST_TEST_REQUIRE(result.output_token_ids.size() == 3U);
  Request short_one = searched(kPrompt, 5, 3);
  const auto expected = search_plainly(short_one);
  for (std::size_t i = 0; i < 3; ++i) {
    BOOST_CHECK(result.finish_reasons[i] == FinishReason::kCancelled);
    BOOST_TEST(result.output_token_ids[i] == expected[i].tokens, boost::test_tools::per_element());
  }
  BOOST_TEST(collect_result(*executor, executor->enqueue_request(searched(kPrompt, 3, 2))).is_final);
}

BOOST_AUTO_TEST_CASE(a_failing_step_fails_the_search_and_no_other_request) {
  ExecutorConfig config = with_beams();
  config.max_num_tokens = 8;
  const auto executor = make_searching(config, [](std::int64_t step) {
    if (step == 3) throw StepError("the engine stumbles");
  });
  const RequestId id = executor->enqueue_request(searched(kPrompt, 9, 4));
  BOOST_TEST(collect(*executor, id).back().error_msg == "the engine stumbles");
  const Request next = searched(kPrompt, 9, 4);
  check_result(collect_result(*executor, executor->enqueue_request(next)), search_plainly(next), 4);
}

BOOST_DATA_TEST_CASE(a_crowd_changes_no_beam, boost::unit_test::data::xrange(24), seed) {
  std::mt19937 random(static_cast<unsigned>(seed));
  const auto below = [&](std::int32_t n) {
    return static_cast<std::int32_t>(random() % static_cast<unsigned>(n));
  };
  ExecutorConfig config = with_beams();
  config.scheduler_config.capacity_scheduler_policy = static_cast<CapacitySchedulerPolicy>(below(3));
  config.enable_chunked_context = true;
  config.max_num_tokens = 1 + below(20);
  config.max_batch_size = 4 + below(5);
  config.kv_cache_config.enable_block_reuse = below(2) == 0;
  config.kv_cache_config.max_tokens = below(2) == 0 ? 200 : 2000;
  std::vector<Request> requests;
  for (int i = 0; i < 10; ++i) {
    std::vector<TokenId> prompt(static_cast<std::size_t>(1 + below(20)));
    for (TokenId& token : prompt) token = below(3);
    Request request = searched(prompt, 1 + below(16), 1 + below(4));
    request.sampling_config.length_penalty = below(2);
    request.sampling_config.early_stopping = below(3);
    if (below(2) == 0) request.sampling_config.repetition_penalty = 1.3;
    if (below(3) == 0) request.sampling_config.beam_search_diversity_rate = 0.3;
    if (below(2) == 0) request.end_id = below(kVocabulary);
    if (below(2) == 0) request.lora_config = fake_adapter(static_cast<std::uint64_t>(1 + below(2)));
    requests.push_back(request);
  }
  const auto executor = make_searching(config);
  const auto ids = executor->enqueue_requests(requests);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const auto alone = make_searching();
    BOOST_TEST(is_same(collect_result(*executor, ids[i]),
                       collect_result(*alone, alone->enqueue_request(requests[i]))));
  }
}

BOOST_AUTO_TEST_CASE(options_that_exclude_beams_are_refused_by_name) {
  const auto executor = make_searching(with_beams(2));
  const auto check = [&](const std::string& part, const auto& change) {
    Request request = searched(kPrompt, 3, 2);
    change(request);
    BOOST_CHECK_EXCEPTION(executor->enqueue_request(request), RequestError, [&](const RequestError& error) {
      BOOST_TEST_MESSAGE(error.what());
      return std::string(error.what()).find(part) != std::string::npos;
    });
  };
  check("sampling_config.beam_width is 5; the engine was built for max_beam_width 4",
        [](Request& r) { r.sampling_config.beam_width = 5; });
  check("sampling_config.beam_width is 3; the executor's max_beam_width is 2, the engine's is 4",
        [](Request& r) { r.sampling_config.beam_width = 3; });
  check("num_return_sequences is 3; accepted: at most sampling_config.beam_width, which is 2",
        [](Request& r) { r.num_return_sequences = 3; });
  check("sampling_config.num_return_sequences is 3 with beam_width 2",
        [](Request& r) { r.sampling_config.num_return_sequences = 3; });
  check("sampling_config.top_k is 5 with beam_width 2; accepted: None, 0",
        [](Request& r) { r.sampling_config.top_k = 5; });
  check("sampling_config.temperature is 0 with beam_width 2",
        [](Request& r) { r.sampling_config.temperature = 0.0; });
  check("output_config.return_generation_logits is given with sampling_config.beam_width 2",
        [](Request& r) { r.output_config.return_generation_logits = true; });
  check("logits_post_processor_name is given", [](Request& r) { r.logits_post_processor_name = "any"; });
  check("guided_decoding_params is given with sampling_config.beam_width 2",
        [](Request& r) { r.guided_decoding_params = GuidedDecodingParams{}; });
  check(
      "lookahead_config is given with sampling_config.beam_width 2; accepted: None or "
      "LookaheadDecodingConfig(1, 1, 0), because beams have no drafts",
      [](Request& r) { r.lookahead_config = LookaheadDecodingConfig{4, 3, 4}; });
  check("external_draft_tokens_config is given with sampling_config.beam_width 2",
        [](Request& r) { r.external_draft_tokens_config.emplace().tokens = {1}; });
  ExecutorConfig config = with_beams(5);
  BOOST_CHECK_EXCEPTION(make_searching(config), ConfigError, [](const ConfigError& error) {
    return std::string(error.what()).find("max_beam_width is 5; the engine was built for 4 at most") !=
           std::string::npos;
  });
  config.max_beam_width = 0;
  BOOST_CHECK_THROW(make_searching(config), ConfigError);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::test::beams_test
