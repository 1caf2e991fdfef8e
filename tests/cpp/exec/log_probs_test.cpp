// Log probs in results: of sampled, most likely, and prompt tokens.

#include <algorithm>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <limits>
#include <ostream>
#include <span>

#include "adaptrt/exec/executor.h"
#include "adaptrt/sample/log_softmax.h"
#include "fake_engine.h"

namespace adaptrt {

std::ostream& operator<<(std::ostream& out, const TokenLogProb& entry) {
  return out << "(" << entry.token_id << ", " << entry.log_prob << ")";
}

}  // namespace adaptrt

namespace adaptrt::test::log_probs_test {
namespace {

using Entries = std::vector<TokenLogProb>;

const std::vector<TokenId> kPrompt = {5, 17, 3, 99, 42, 7, 1, 5, 17};

/// Expected output for the row after some tokens.
struct ExpectedRow {
  ExpectedRow(const std::vector<TokenId>& history, TokenId next, std::size_t count,
              std::int64_t vocab_size = 101)
      : most_likely(count) {
    const auto logits = FakeEngine::logits_after(history, 0, vocab_size);
    const LogSoftmax softmax(logits);
    log_prob = softmax.log_prob(next);
    softmax.find_most_likely(most_likely);
  }
  float log_prob = 0.0F;
  Entries most_likely;
};

Request make_log_prob_request(std::vector<TokenId> prompt, std::int32_t max_tokens, std::int32_t count) {
  auto request = make_request(std::move(prompt), max_tokens);
  request.output_config.return_log_probs = true;
  request.output_config.top_log_probs = count;
  request.output_config.return_prompt_log_probs = true;
  return request;
}

void check_prompt(const Result& result, const std::vector<TokenId>& prompt, std::size_t count) {
  BOOST_TEST_REQUIRE(result.prompt_log_probs.has_value());
  BOOST_TEST_REQUIRE(result.prompt_log_probs->size() == prompt.size() - 1);
  BOOST_TEST_REQUIRE(result.prompt_top_log_probs.has_value() == (count > 0));
  if (count > 0) BOOST_TEST_REQUIRE(result.prompt_top_log_probs->size() == prompt.size() - 1);
  std::vector<TokenId> history;
  for (std::size_t i = 0; i + 1 < prompt.size(); ++i) {
    history.push_back(prompt[i]);
    const ExpectedRow expected(history, prompt[i + 1], count);
    BOOST_TEST((*result.prompt_log_probs)[i] == expected.log_prob);
    if (count == 0) continue;
    BOOST_TEST((*result.prompt_top_log_probs)[i] == expected.most_likely, boost::test_tools::per_element());
  }
}

/// `top_log_probs` belong to the tokens `generated` after `history`.
void check_tokens(std::span<const Entries> top_log_probs, std::vector<TokenId> history,
                  std::span<const TokenId> generated, std::size_t count, std::int64_t vocab_size = 101) {
  BOOST_TEST_REQUIRE(top_log_probs.size() == generated.size());
  for (std::size_t i = 0; i < generated.size(); ++i) {
    const ExpectedRow expected(history, generated[i], count, vocab_size);
    BOOST_TEST(top_log_probs[i] == expected.most_likely, boost::test_tools::per_element());
    history.push_back(generated[i]);
  }
}

BOOST_AUTO_TEST_SUITE(log_probs)

BOOST_AUTO_TEST_CASE(nothing_is_returned_that_is_not_asked_for) {
  const auto executor = make_executor();
  auto request = make_request(kPrompt, 3);
  request.output_config.return_log_probs = true;
  const auto result = collect_result(*executor, executor->enqueue_request(request));
  BOOST_TEST(!result.top_log_probs.has_value());
  BOOST_TEST(!result.prompt_log_probs.has_value());
  BOOST_TEST(!result.prompt_top_log_probs.has_value());
}

BOOST_DATA_TEST_CASE(without_streaming_there_is_a_row_a_generated_token,
                     boost::unit_test::data::make({1, 4, 20}), count) {
  const auto executor = make_executor();
  auto request = make_request(kPrompt, 5);
  request.output_config.top_log_probs = count;
  request.output_config.exclude_input_from_output = false;
  const auto result = collect_result(*executor, executor->enqueue_request(request));
  const auto tokens = std::span(result.output_token_ids.at(0)).subspan(kPrompt.size());
  BOOST_TEST_REQUIRE(result.top_log_probs->size() == 1U);
  check_tokens(result.top_log_probs->at(0), kPrompt, tokens, static_cast<std::size_t>(count));
  BOOST_TEST(!result.log_probs.has_value());
  BOOST_TEST(!result.prompt_log_probs.has_value());
  BOOST_TEST(!result.prompt_top_log_probs.has_value());
}

BOOST_AUTO_TEST_CASE(a_sampled_token_s_log_prob_is_its_entry_s) {
  const auto executor = make_executor();
  int num_among = 0;
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    auto request = make_log_prob_request(kPrompt, 20, 20);
    request.sampling_config.top_k = 40;
    request.sampling_config.temperature = 2.0;
    request.sampling_config.seed = seed;
    const auto result = collect_result(*executor, executor->enqueue_request(request));
    const auto& tokens = result.output_token_ids.at(0);
    check_tokens(result.top_log_probs->at(0), kPrompt, tokens, 20);
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      const auto& row = result.top_log_probs->at(0)[i];
      const auto entry = std::ranges::find(row, tokens[i], &TokenLogProb::token_id);
      if (entry == row.end()) continue;
      ++num_among;
      BOOST_TEST(entry->log_prob == result.log_probs->at(0)[i]);
    }
  }
  BOOST_TEST(num_among > 20);
}

BOOST_AUTO_TEST_CASE(a_small_vocabulary_is_returned_as_a_whole) {
  FakeEngine::Options options;
  options.vocab_size = 7;
  const auto executor = make_executor({}, options);
  const auto result =
      collect_result(*executor, executor->enqueue_request(make_log_prob_request({1, 2, 3}, 4, 20)));
  check_tokens(result.top_log_probs->at(0), {1, 2, 3}, result.output_token_ids.at(0), 7, 7);
  BOOST_TEST(result.prompt_top_log_probs->at(0).size() == 7U);
}

BOOST_AUTO_TEST_CASE(streamed_rows_come_with_their_tokens_and_the_prompt_s_once) {
  const auto executor = make_executor();
  auto request = make_log_prob_request(kPrompt, 6, 3);
  request.streaming = true;
  const auto responses = collect(*executor, executor->enqueue_request(request));
  BOOST_TEST_REQUIRE(responses.size() == 6U);
  auto history = kPrompt;
  for (std::size_t i = 0; i < responses.size(); ++i) {
    const Result& result = responses[i].result;
    const auto& tokens = result.output_token_ids.at(0);
    check_tokens(result.top_log_probs->at(0), history, tokens, 3);
    history.insert(history.end(), tokens.begin(), tokens.end());
    BOOST_TEST(result.log_probs->at(0).size() == i + 1);
    BOOST_TEST(result.prompt_log_probs.has_value() == (i == 0));
    BOOST_TEST(result.prompt_top_log_probs.has_value() == (i == 0));
  }
  check_prompt(responses[0].result, kPrompt, 3);
}

BOOST_AUTO_TEST_CASE(all_generated_tokens_have_all_of_their_rows) {
  const auto executor = make_executor();
  auto request = make_log_prob_request(kPrompt, 4, 2);
  request.streaming = true;
  request.return_all_generated_tokens = true;
  const auto responses = collect(*executor, executor->enqueue_request(request));
  BOOST_TEST_REQUIRE(responses.size() == 4U);
  for (std::size_t i = 0; i < responses.size(); ++i) {
    const Result& result = responses[i].result;
    BOOST_TEST(result.output_token_ids.at(0).size() == i + 1);
    check_tokens(result.top_log_probs->at(0), kPrompt, result.output_token_ids.at(0), 2);
    BOOST_TEST(result.prompt_log_probs.has_value() == (i == 0));
  }
}

BOOST_DATA_TEST_CASE(the_end_id_has_no_row, boost::unit_test::data::make({false, true}), streaming) {
  const auto executor = make_executor();
  const auto tokens = expected_tokens(kPrompt, 6);
  auto request = make_log_prob_request(kPrompt, 6, 2);
  request.end_id = tokens[4];
  request.streaming = streaming;
  const auto responses = collect(*executor, executor->enqueue_request(request));
  std::vector<Entries> rows;
  std::vector<TokenId> generated;
  for (const Response& response : responses) {
    const auto& rows_here = response.result.top_log_probs->at(0);
    const auto& tokens_here = response.result.output_token_ids.at(0);
    BOOST_TEST(rows_here.size() == tokens_here.size());
    rows.insert(rows.end(), rows_here.begin(), rows_here.end());
    generated.insert(generated.end(), tokens_here.begin(), tokens_here.end());
  }
  BOOST_TEST((responses.back().result.finish_reasons.at(0) == FinishReason::kEndId));
  check_tokens(rows, kPrompt, generated, 2);
}

BOOST_DATA_TEST_CASE(a_prompt_s_log_probs_are_those_of_its_rows,
                     boost::unit_test::data::make({0, 3}) * boost::unit_test::data::make({false, true}) *
                         boost::unit_test::data::make({1, 4, 7, 64}),
                     count, with_logits, max_num_tokens) {
  ExecutorConfig config;
  config.enable_chunked_context = true;
  config.max_num_tokens = max_num_tokens;
  const auto executor = make_executor(config);
  auto request = make_log_prob_request(kPrompt, 2, count);
  request.output_config.return_context_logits = with_logits;
  // In the second round, the prefix is in the KV cache.
  for (int time = 0; time < 2; ++time) {
    const auto result = collect_result(*executor, executor->enqueue_request(request));
    check_prompt(result, kPrompt, static_cast<std::size_t>(count));
    BOOST_TEST(result.output_token_ids.at(0) == expected_tokens(kPrompt, 2),
               boost::test_tools::per_element());
    BOOST_TEST(result.context_logits.has_value() == with_logits);
    if (with_logits) BOOST_TEST(result.context_logits->values->size() == kPrompt.size() * 101);
  }
}

BOOST_AUTO_TEST_CASE(a_prompt_of_one_token_has_no_log_probs) {
  const auto executor = make_executor();
  const auto result = collect_result(*executor, executor->enqueue_request(make_log_prob_request({4}, 2, 3)));
  BOOST_TEST_REQUIRE(result.prompt_log_probs.has_value());
  BOOST_TEST(result.prompt_log_probs->empty());
  BOOST_TEST(result.prompt_top_log_probs->empty());
  check_tokens(result.top_log_probs->at(0), {4}, result.output_token_ids.at(0), 3);
}

BOOST_AUTO_TEST_CASE(log_probs_survive_a_preemption) {
  ExecutorConfig config;
  config.scheduler_config.capacity_scheduler_policy = CapacitySchedulerPolicy::kMaxUtilization;
  config.kv_cache_config.max_tokens = 96;
  config.enable_chunked_context = true;
  config.max_num_tokens = 7;
  const auto executor = make_executor(config);
  std::vector<std::vector<TokenId>> prompts;
  std::vector<RequestId> ids;
  for (TokenId i = 0; i < 6; ++i) {
    prompts.push_back(std::vector<TokenId>(20, i));
    ids.push_back(executor->enqueue_request(make_log_prob_request(prompts.back(), 20, 2)));
  }
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const auto result = collect_result(*executor, ids[i]);
    check_prompt(result, prompts[i], 2);
    check_tokens(result.top_log_probs->at(0), prompts[i], result.output_token_ids.at(0), 2);
  }
  std::int32_t most_paused = 0;
  for (const auto& step : executor->get_latest_iteration_stats()) {
    most_paused = std::max(most_paused, step.inflight_batching_stats->num_paused_requests);
  }
  BOOST_TEST(most_paused > 0);
}

BOOST_AUTO_TEST_CASE(a_request_that_ends_within_its_prompt_has_no_log_probs_of_it) {
  ExecutorConfig config;
  config.enable_chunked_context = true;
  config.max_num_tokens = 4;
  Gate gate;
  const auto executor = make_executor(config, {}, [&gate](std::int64_t step) {
    if (step == 1) gate.wait();
  });
  const auto id = executor->enqueue_request(make_log_prob_request(std::vector<TokenId>(20, 3), 2, 1));
  gate.await_visitor();
  executor->cancel_request(id);
  gate.open();
  const auto result = collect_result(*executor, id);
  BOOST_TEST((result.finish_reasons.at(0) == FinishReason::kCancelled));
  BOOST_TEST(!result.prompt_log_probs.has_value());
  BOOST_TEST(!result.prompt_top_log_probs.has_value());
  BOOST_TEST(result.top_log_probs->at(0).empty());
}

/// The logits after one particular token have NaN, near the start of a sequence.
class PoisonedEngine final : public FakeEngine {
 public:
  static constexpr TokenId kPoison = 66;
  void step(const StepInput& input, const LogitsSink& sink, const HiddenSink& hidden_sink) override {
    const auto poison = [&](std::int64_t first_row, std::int64_t num_rows, const float* logits) {
      std::vector<float> rows(logits, logits + num_rows * info().vocab_size);
      for (std::int64_t row = 0; row < num_rows; ++row) {
        const auto token =
            static_cast<std::size_t>(input.logit_rows[static_cast<std::size_t>(first_row + row)]);
        if (input.token_ids[token] != kPoison || input.positions[token] > 4) continue;
        rows[static_cast<std::size_t>(row * info().vocab_size)] = std::numeric_limits<float>::quiet_NaN();
      }
      sink(first_row, num_rows, rows.data());
    };
    FakeEngine::step(input, poison, hidden_sink);
  }
};

BOOST_DATA_TEST_CASE(logits_that_are_no_numbers_fail_their_request_alone,
                     boost::unit_test::data::make({3, 64}), max_num_tokens) {
  ExecutorConfig config;
  config.enable_chunked_context = true;
  config.max_num_tokens = max_num_tokens;
  Executor executor(std::make_shared<PoisonedEngine>(), config, kAvailableMemory, check_every_step);
  const std::vector<TokenId> poisoned = {1, 2, PoisonedEngine::kPoison, 3, PoisonedEngine::kPoison, 4, 5, 6};
  auto harmless = make_request(poisoned, 3);  // does not need the NaN rows
  harmless.output_config.top_log_probs = 2;
  const auto ids =
      executor.enqueue_requests({make_log_prob_request(kPrompt, 3, 2), make_log_prob_request(poisoned, 3, 2),
                                 harmless, make_log_prob_request(kPrompt, 3, 0)});
  const auto responses = collect(executor, ids[1]);
  BOOST_TEST_REQUIRE(responses.size() == 1U);
  BOOST_TEST(responses[0].error_msg == "the engine's logits have NaN or infinity");
  check_prompt(collect_result(executor, ids[0]), kPrompt, 2);
  BOOST_TEST(collect_result(executor, ids[2]).output_token_ids.at(0).size() == 3U);
  check_prompt(collect_result(executor, ids[3]), kPrompt, 0);
  BOOST_TEST(executor.is_alive());
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::test::log_probs_test
