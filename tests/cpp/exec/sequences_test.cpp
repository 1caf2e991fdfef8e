// Requests of several sequences: each equals the only sequence of a request with its seed.

#include "sequences.h"

#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "adaptrt/core/error.h"
#include "crowd_setting.h"

namespace adaptrt::test::sequences_test {
namespace {

using namespace std::chrono_literals;

BOOST_AUTO_TEST_SUITE(sequences)

BOOST_AUTO_TEST_CASE(each_sequence_is_that_of_a_request_with_its_seed) {
  for (const bool by_sampling_config : {false, true}) {
    auto request = sampled(kPrompt, 12, 40);
    if (by_sampling_config) {
      request.sampling_config.num_return_sequences = 4;
    } else {
      request.num_return_sequences = 4;
    }
    const auto executor = make_executor();
    const auto results = results_of(*executor, executor->enqueue_request(request));
    BOOST_TEST_REQUIRE(results.size() == 4U);
    const auto expected = each_alone(request);
    for (std::int32_t i = 0; i < 4; ++i) {
      BOOST_TEST(results.at(i).size() == 1U);
      BOOST_TEST(tokens_of(results.at(i)) == expected.at(static_cast<std::size_t>(i)),
                 boost::test_tools::per_element());
    }
    BOOST_TEST((expected[0] != expected[1]));
  }
}

BOOST_AUTO_TEST_CASE(greedy_sequences_are_equal_and_share_their_blocks) {
  const auto executor = make_executor();
  const auto results = results_of(*executor, executor->enqueue_request(several(make_request(kPrompt, 9), 3)));
  for (const auto& [index, result] : results)
    BOOST_TEST(tokens_of(result) == expected_tokens(kPrompt, 9), boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(the_prompt_is_computed_once_and_its_rest_copied_for_each) {
  auto engine = std::make_shared<FakeEngine>();
  Executor executor(engine, {}, kAvailableMemory, check_every_step);
  static_cast<void>(results_of(executor, executor.enqueue_request(several(sampled(kPrompt, 3, 1), 4))));
  BOOST_TEST(engine->num_copies() == 3);
  const auto steps = executor.get_latest_iteration_stats();
  std::int32_t prompt_tokens = 0;
  for (const auto& step : steps) prompt_tokens += step.inflight_batching_stats->num_ctx_tokens;
  BOOST_TEST(prompt_tokens == 7);
  BOOST_TEST(steps.size() == 3U);
}

BOOST_AUTO_TEST_CASE(streamed_sequences_come_token_by_token) {
  auto request = several(sampled(kPrompt, 6, 3), 3);
  request.streaming = true;
  request.output_config.return_log_probs = true;
  const auto executor = make_executor();
  const auto results = results_of(*executor, executor->enqueue_request(request));
  const auto expected = each_alone(request);
  BOOST_TEST_REQUIRE(results.size() == 3U);
  for (std::int32_t i = 0; i < 3; ++i) {
    const auto& pieces = results.at(i);
    BOOST_TEST_REQUIRE(pieces.size() == 6U);
    for (std::size_t k = 0; k < pieces.size(); ++k) {
      BOOST_TEST(pieces[k].output_token_ids.at(0).size() == 1U);
      BOOST_TEST(pieces[k].log_probs->at(0).size() == k + 1);
      BOOST_TEST(pieces[k].decoding_iter == static_cast<std::int32_t>(k) + 1);
    }
    BOOST_TEST(tokens_of(pieces) == expected.at(static_cast<std::size_t>(i)),
               boost::test_tools::per_element());
  }
}

BOOST_AUTO_TEST_CASE(logits_and_log_probs_are_each_sequences_own_and_the_prompts_come_with_the_first) {
  for (const bool streaming : {false, true}) {
    auto request = several(sampled(kPrompt, 4, 3), 2);
    request.streaming = streaming;
    request.output_config.return_log_probs = true;
    request.output_config.return_generation_logits = true;
    request.output_config.return_context_logits = true;
    request.output_config.return_prompt_log_probs = true;
    request.output_config.top_log_probs = 2;
    const auto executor = make_executor();
    const auto results = results_of(*executor, executor->enqueue_request(request));
    for (const auto& [index, pieces] : results) {
      auto history = kPrompt;
      for (const TokenId token : tokens_of(pieces)) history.push_back(token);
      const Result& last = pieces.back();
      float sum = 0.0F;
      for (const float log_prob : last.log_probs->at(0)) sum += log_prob;
      BOOST_TEST(last.cum_log_probs->at(0) == sum);
      history.pop_back();
      const auto expected = FakeEngine::logits_after(history, 0, 101);
      const auto& logits = *last.generation_logits->values;
      BOOST_TEST(std::equal(expected.begin(), expected.end(), logits.end() - 101));
      BOOST_TEST(last.top_log_probs->at(0).size() == (streaming ? 1U : 4U));
      BOOST_TEST(pieces.front().prompt_log_probs.has_value() == (index == 0));
      BOOST_TEST(pieces.front().prompt_top_log_probs.has_value() == (index == 0));
      BOOST_TEST(pieces.front().context_logits.has_value());
    }
    BOOST_TEST(results.at(0).front().prompt_log_probs->size() == kPrompt.size() - 1);
  }
}

BOOST_AUTO_TEST_CASE(sequences_end_on_their_own) {
  auto request = several(sampled(kPrompt, 20, 7), 4);
  const auto free_running = each_alone(request);
  request.stop_words = {{free_running[1][4]}, {free_running[2][0]}};
  request.end_id = free_running[3][2];
  const auto expected = each_alone(request);
  BOOST_TEST(expected[2].size() == 1U);  // never forked
  const auto executor = make_executor();
  const auto results = results_of(*executor, executor->enqueue_request(request));
  for (std::int32_t i = 0; i < 4; ++i) {
    BOOST_TEST(tokens_of(results.at(i)) == expected.at(static_cast<std::size_t>(i)),
               boost::test_tools::per_element());
  }
  BOOST_TEST((results.at(2).back().finish_reasons.at(0) == FinishReason::kStopWords));
}

BOOST_AUTO_TEST_CASE(the_first_sequence_may_end_first) {
  auto request = several(sampled(kPrompt, 8, 7), 3);
  const TokenId first_token = each_alone(request)[0][0];
  request.stop_words.emplace().push_back({first_token});
  const auto expected = each_alone(request);
  BOOST_TEST_REQUIRE(expected[0].size() == 1U);
  const auto executor = make_executor();
  const auto results = results_of(*executor, executor->enqueue_request(request));
  for (std::int32_t i = 0; i < 3; ++i) {
    BOOST_TEST(tokens_of(results.at(i)) == expected.at(static_cast<std::size_t>(i)),
               boost::test_tools::per_element());
  }
}

BOOST_AUTO_TEST_CASE(one_token_each_needs_no_fork) {
  auto engine = std::make_shared<FakeEngine>();
  Executor executor(engine, {}, kAvailableMemory, check_every_step);
  const auto request = several(sampled(kPrompt, 1, 2), 5);
  const auto results = results_of(executor, executor.enqueue_request(request));
  const auto expected = each_alone(request);
  for (std::int32_t i = 0; i < 5; ++i)
    BOOST_TEST(tokens_of(results.at(i)) == expected.at(static_cast<std::size_t>(i)),
               boost::test_tools::per_element());
  BOOST_TEST(engine->num_copies() == 0);
}

BOOST_AUTO_TEST_CASE(cancelling_ends_all_sequences_running_or_waiting) {
  const auto gate = std::make_shared<Gate>();
  ExecutorConfig config;
  config.max_queue_size = 1;
  FakeEngine::Options options;
  options.max_batch_size = 4;
  const auto executor = make_executor(config, options, [gate](std::int64_t step) {
    if (step == 3) gate->wait();
  });
  const auto running = executor->enqueue_request(several(sampled(kPrompt, 30, 1), 3));
  gate->await_visitor();
  const auto waiting = executor->enqueue_request(several(sampled(kPrompt, 30, 1), 2));
  // The limit counts requests, not sequences.
  BOOST_CHECK_THROW(executor->enqueue_request(make_request(kPrompt, 1)), QueueFullError);
  executor->cancel_request(running);
  executor->cancel_request(waiting);
  gate->open();
  const auto of_running = results_of(*executor, running);
  const auto of_waiting = results_of(*executor, waiting);
  BOOST_TEST(of_running.size() == 3U);
  BOOST_TEST(of_waiting.size() == 2U);
  for (const auto& [index, results] : of_running) {
    BOOST_TEST((results.back().finish_reasons.at(0) == FinishReason::kCancelled));
    BOOST_TEST(tokens_of(results).size() == 4U);
  }
  for (const auto& [index, results] : of_waiting) {
    BOOST_TEST((results.back().finish_reasons.at(0) == FinishReason::kCancelled));
    BOOST_TEST(tokens_of(results).empty());
  }
  static_cast<void>(results_of(*executor, executor->enqueue_request(make_request(kPrompt, 1))));
}

BOOST_AUTO_TEST_CASE(the_allotted_time_is_the_requests) {
  const auto executor = make_executor({}, {}, [](std::int64_t) { std::this_thread::sleep_for(2ms); });
  auto request = several(sampled(kPrompt, 100, 1), 3);
  request.allotted_time_ms = 40ms;
  const auto results = results_of(*executor, executor->enqueue_request(request));
  BOOST_TEST(results.size() == 3U);
  for (const auto& [index, of_sequence] : results)
    BOOST_TEST((of_sequence.back().finish_reasons.at(0) == FinishReason::kTimedOut));
}

BOOST_AUTO_TEST_CASE(a_failing_step_is_one_error_and_no_other_requests) {
  for (const std::int64_t at : {0, 1, 3}) {
    const auto executor = make_executor({}, {}, [at](std::int64_t step) {
      if (step == at) throw StepError("the step fails");
    });
    const auto id = executor->enqueue_request(several(sampled(kPrompt, 9, 1), 3));
    const auto responses = collect(*executor, id);
    BOOST_TEST(responses.size() == 1U);
    BOOST_TEST(responses.back().error_msg == "the step fails");
    const auto again = several(sampled(kPrompt, 9, 1), 3);
    const auto results = results_of(*executor, executor->enqueue_request(again));
    BOOST_TEST(tokens_of(results.at(2)) == each_alone(again).at(2), boost::test_tools::per_element());
  }
}

BOOST_AUTO_TEST_CASE(numbers_of_sequences_that_cannot_be_are_refused) {
  const auto executor = make_executor();
  const auto refused = [&](const Request& request, const std::string& words) {
    BOOST_CHECK_EXCEPTION(executor->enqueue_request(request), RequestError, [&](const RequestError& error) {
      BOOST_TEST_INFO(error.what());
      return std::string(error.what()).find(words) != std::string::npos;
    });
  };
  refused(several(make_request(kPrompt, 4), 0), "num_return_sequences is 0; accepted: 1 or more");
  refused(several(make_request(kPrompt, 4), 9), "9 sequences; accepted: 1 to max_batch_size = 8");
  auto request = several(make_request(kPrompt, 4), 2);
  request.sampling_config.num_return_sequences = 3;
  refused(request, "num_return_sequences is 2, and that of sampling_config is 3");
  request.sampling_config.num_return_sequences = -1;
  refused(request, "num_return_sequences is -1; it must be at least 1");
  ExecutorConfig config;
  config.kv_cache_config.max_tokens = 40;
  const auto small = make_executor(config);
  BOOST_CHECK_EXCEPTION(small->enqueue_request(several(make_request(kPrompt, 20), 3)), RequestError,
                        [](const RequestError& error) {
                          return std::string(error.what()).find("3 sequences needs 19 KV blocks") !=
                                 std::string::npos;
                        });
}

BOOST_AUTO_TEST_CASE(statistics_count_requests) {
  ExecutorConfig config;
  config.request_stats_max_iterations = 100;
  const auto executor = make_executor(config);
  const auto ids = executor->enqueue_requests({several(sampled(kPrompt, 4, 1), 3), sampled({1, 2}, 4, 1)});
  for (const auto id : ids) static_cast<void>(results_of(*executor, id));
  const auto steps = executor->get_latest_iteration_stats();
  BOOST_TEST_REQUIRE(steps.size() == 4U);
  for (const auto& step : steps) {
    BOOST_TEST(step.num_active_requests == 2);
    BOOST_TEST(step.inflight_batching_stats->num_scheduled_requests == 2);
  }
  BOOST_TEST(steps[0].num_new_active_requests == 2);
  BOOST_TEST(steps[0].inflight_batching_stats->num_context_requests == 2);
  BOOST_TEST(steps[0].inflight_batching_stats->num_ctx_tokens == 9);
  BOOST_TEST(steps[1].inflight_batching_stats->num_gen_requests == 2);
  BOOST_TEST(steps[1].inflight_batching_stats->avg_num_decoded_tokens_per_iter == 2.0);
  BOOST_TEST(steps[3].num_completed_requests == 2);
  const auto of_requests = executor->get_latest_request_stats();
  BOOST_TEST_REQUIRE(of_requests.size() == 4U);
  const RequestStats& at_first = of_requests[0].request_stats.at(0);
  BOOST_TEST(at_first.num_generated_tokens == 3);
  BOOST_TEST(at_first.scheduled);
  BOOST_TEST(at_first.context_prefill_position == 7);
  BOOST_TEST(at_first.alloc_new_blocks_per_request == 2 + 2);
  const RequestStats& at_last = of_requests[3].request_stats.at(0);
  BOOST_TEST((at_last.stage == RequestStage::kGenerationComplete));
  BOOST_TEST(at_last.num_generated_tokens == 12);
  BOOST_TEST(at_last.avg_num_decoded_tokens_per_iter == 3.0);
}

const std::vector<CrowdSetting> kSettings = {
    {CapacitySchedulerPolicy::kGuaranteedNoEvict, 512, 64, true},
    {CapacitySchedulerPolicy::kGuaranteedNoEvict, 160, 5, false},
    {CapacitySchedulerPolicy::kMaxUtilization, 64, 64, true},
    {CapacitySchedulerPolicy::kMaxUtilization, 64, 3, false},
    {CapacitySchedulerPolicy::kStaticBatch, 256, 32, true},
};

BOOST_DATA_TEST_CASE(a_crowd_changes_no_token, boost::unit_test::data::make(kSettings), setting) {
  const auto executor = make_guided(config_of(setting));
  std::mt19937 random(5);
  const auto draw = [&](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
  std::vector<Request> requests;
  for (int i = 0; i < 25; ++i) {
    std::vector<TokenId> prompt(static_cast<std::size_t>(draw(1, 30)), i % 3);
    auto request = several(sampled(prompt, draw(1, 12), static_cast<std::uint64_t>(i)), draw(1, 4));
    request.streaming = draw(0, 1) == 1;
    if (draw(0, 2) == 0) request.lora_config = fake_adapter(static_cast<std::uint64_t>(draw(1, 3)));
    request.sampling_config.repetition_penalty = 1.2;
    if (i % 5 == 4) request = guided(std::move(request), std::to_string(draw(0, 14)));
    requests.push_back(std::move(request));
  }
  const auto ids = executor->enqueue_requests(requests);
  executor->cancel_request(ids[7]);
  for (std::size_t r = 0; r < requests.size(); ++r) {
    const auto results = results_of(*executor, ids[r]);
    BOOST_TEST(results.size() == static_cast<std::size_t>(requests[r].num_return_sequences));
    if (r == 7) continue;
    requests[r].streaming = false;
    const auto expected = each_alone(requests[r]);
    for (const auto& [index, of_sequence] : results) {
      BOOST_TEST(tokens_of(of_sequence) == expected.at(static_cast<std::size_t>(index)),
                 boost::test_tools::per_element());
    }
  }
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::test::sequences_test
