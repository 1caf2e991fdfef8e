#include "adaptrt/exec/executor.h"

#include <algorithm>
#include <atomic>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <future>
#include <numeric>
#include <set>
#include <thread>

#include "adaptrt/core/error.h"
#include "fake_engine.h"

namespace adaptrt::test::executor_test {
namespace {

using namespace std::chrono_literals;

const std::vector<TokenId> kPrompt = {5, 17, 3, 99, 42, 7, 1};

std::vector<float> softmax_logs(const std::vector<float>& logits) {
  const double max = *std::ranges::max_element(logits);
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - max);
  std::vector<float> result;
  for (const float logit : logits) result.push_back(static_cast<float>(logit - max - std::log(sum)));
  return result;
}

/// An engine that works on another thread between begin_step() and await_step(), as one on a device does.
class OverlappingEngine final : public FakeEngine {
 public:
  void begin_step(const StepInput& input) override {
    logits_.clear();
    step_ = std::async(std::launch::async, [this, &input] {
      FakeEngine::step(input,
                       [this](std::int64_t first_row, std::int64_t rows, const float* logits) {
                         const std::int64_t width = info().logits_width();
                         logits_.push_back({first_row, rows, {logits, logits + rows * width}});
                       },
                       {});
    });
  }
  void await_step(const LogitsSink& sink, const HiddenSink& /*hidden_sink*/) override {
    step_.get();
    ++num_awaited_;
    for (const auto& [first_row, rows, logits] : logits_) sink(first_row, rows, logits.data());
  }

  [[nodiscard]] std::int64_t num_awaited() const { return num_awaited_; }

 private:
  struct Slice {
    std::int64_t first_row;
    std::int64_t rows;
    std::vector<float> logits;
  };
  std::future<void> step_;
  std::vector<Slice> logits_;
  std::atomic<std::int64_t> num_awaited_ = 0;
};

BOOST_AUTO_TEST_SUITE(executor)

BOOST_AUTO_TEST_CASE(a_step_is_begun_and_awaited_apart) {
  const auto engine = std::make_shared<OverlappingEngine>();
  Executor executor(engine, {}, kAvailableMemory, check_every_step);
  const auto result = collect_result(executor, executor.enqueue_request(make_request(kPrompt, 9)));
  BOOST_TEST(result.output_token_ids.at(0) == expected_tokens(kPrompt, 9), boost::test_tools::per_element());
  BOOST_TEST(engine->num_awaited() == 9);
}

BOOST_AUTO_TEST_CASE(one_request_gives_the_greedy_tokens) {
  const auto executor = make_executor();
  const auto result = collect_result(*executor, executor->enqueue_request(make_request(kPrompt, 9)));
  BOOST_TEST(result.output_token_ids.at(0) == expected_tokens(kPrompt, 9), boost::test_tools::per_element());
  BOOST_TEST(result.is_final);
  BOOST_TEST(result.is_sequence_final);
  BOOST_TEST((result.finish_reasons.at(0) == FinishReason::kLength));
  BOOST_TEST(result.decoding_iter == 9);
  BOOST_TEST(!result.log_probs.has_value());
  BOOST_TEST(!result.context_logits.has_value());
  BOOST_TEST(!result.generation_logits.has_value());
}

BOOST_AUTO_TEST_CASE(the_output_has_the_prompt_unless_it_is_excluded) {
  const auto executor = make_executor();
  auto request = make_request(kPrompt, 2);
  request.output_config.exclude_input_from_output = false;
  auto expected = kPrompt;
  for (const TokenId token : expected_tokens(kPrompt, 2)) expected.push_back(token);
  const auto result = collect_result(*executor, executor->enqueue_request(request));
  BOOST_TEST(result.output_token_ids.at(0) == expected, boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(streaming_gives_one_token_a_response_and_never_the_prompt) {
  const auto executor = make_executor();
  auto request = make_request(kPrompt, 5);
  request.streaming = true;
  request.client_id = 77;
  request.output_config.exclude_input_from_output = false;
  const auto expected = expected_tokens(kPrompt, 5);
  const auto responses = collect(*executor, executor->enqueue_request(request));
  BOOST_REQUIRE_EQUAL(responses.size(), 5);
  for (std::size_t i = 0; i < 5; ++i) {
    BOOST_TEST(responses[i].client_id.value() == 77);
    BOOST_REQUIRE_EQUAL(responses[i].result.output_token_ids.at(0).size(), 1);
    BOOST_TEST(responses[i].result.output_token_ids[0][0] == expected[i]);
    BOOST_TEST(responses[i].result.is_final == (i == 4));
    BOOST_TEST((responses[i].result.finish_reasons.at(0) ==
                (i == 4 ? FinishReason::kLength : FinishReason::kNotFinished)));
  }
}

BOOST_AUTO_TEST_CASE(streaming_with_all_generated_tokens) {
  const auto executor = make_executor();
  auto request = make_request(kPrompt, 4);
  request.streaming = true;
  request.return_all_generated_tokens = true;
  request.output_config.return_generation_logits = true;
  const auto expected = expected_tokens(kPrompt, 4);
  const auto responses = collect(*executor, executor->enqueue_request(request));
  BOOST_REQUIRE_EQUAL(responses.size(), 4);
  for (std::size_t i = 0; i < 4; ++i) {
    BOOST_TEST(
        responses[i].result.output_token_ids.at(0) ==
            std::vector<TokenId>(expected.begin(), expected.begin() + static_cast<std::ptrdiff_t>(i) + 1),
        boost::test_tools::per_element());
    BOOST_TEST(responses[i].result.generation_logits->shape ==
                   (std::vector<std::int64_t>{static_cast<std::int64_t>(i) + 1, 1, 101}),
               boost::test_tools::per_element());
  }
}

BOOST_AUTO_TEST_CASE(logits_and_log_probs_are_those_of_the_engine) {
  const auto executor = make_executor();
  auto request = make_request(kPrompt, 3);
  request.output_config.return_context_logits = true;
  request.output_config.return_generation_logits = true;
  request.output_config.return_log_probs = true;
  const auto result = collect_result(*executor, executor->enqueue_request(request));
  const auto tokens = expected_tokens(kPrompt, 3);

  BOOST_TEST(result.context_logits->shape == (std::vector<std::int64_t>{7, 101}),
             boost::test_tools::per_element());
  BOOST_TEST(result.generation_logits->shape == (std::vector<std::int64_t>{1, 3, 101}),
             boost::test_tools::per_element());
  std::vector<TokenId> history;
  for (std::size_t row = 0; row < kPrompt.size(); ++row) {
    history.push_back(kPrompt[row]);
    const auto logits = FakeEngine::logits_after(history, 0, 101);
    BOOST_TEST(std::ranges::equal(logits, std::span(*result.context_logits->values).subspan(row * 101, 101)));
  }
  double sum = 0;
  for (std::size_t row = 0; row < 3; ++row) {
    const auto logits = FakeEngine::logits_after(history, 0, 101);
    BOOST_TEST(
        std::ranges::equal(logits, std::span(*result.generation_logits->values).subspan(row * 101, 101)));
    const float expected = softmax_logs(logits)[static_cast<std::size_t>(tokens[row])];
    BOOST_TEST(result.log_probs->at(0).at(row) == expected, boost::test_tools::tolerance(1e-4F));
    sum += result.log_probs->at(0)[row];
    history.push_back(tokens[row]);
  }
  BOOST_TEST(static_cast<double>(result.cum_log_probs->at(0)) == sum, boost::test_tools::tolerance(1e-5));
}

BOOST_AUTO_TEST_CASE(streamed_logits_come_once_each) {
  const auto executor = make_executor();
  auto request = make_request(kPrompt, 3);
  request.streaming = true;
  request.output_config.return_context_logits = true;
  request.output_config.return_generation_logits = true;
  request.output_config.return_log_probs = true;
  const auto responses = collect(*executor, executor->enqueue_request(request));
  BOOST_REQUIRE_EQUAL(responses.size(), 3);
  auto history = kPrompt;
  for (std::size_t i = 0; i < 3; ++i) {
    const Result& result = responses[i].result;
    BOOST_TEST(
        std::ranges::equal(FakeEngine::logits_after(history, 0, 101), *result.generation_logits->values));
    BOOST_TEST(result.generation_logits->shape == (std::vector<std::int64_t>{1, 1, 101}),
               boost::test_tools::per_element());
    BOOST_TEST(result.context_logits->values->size() == 7 * 101);
    BOOST_TEST(result.log_probs->at(0).size() == i + 1);
    history.push_back(result.output_token_ids.at(0).at(0));
  }
}

BOOST_AUTO_TEST_CASE(end_id_ends_and_is_not_part_of_the_output) {
  const auto executor = make_executor();
  const auto tokens = expected_tokens(kPrompt, 6);
  const auto first = std::ranges::find(tokens, tokens[4]) - tokens.begin();
  auto request = make_request(kPrompt, 6);
  request.end_id = tokens[4];
  request.output_config.return_log_probs = true;
  request.output_config.return_generation_logits = true;
  const auto result = collect_result(*executor, executor->enqueue_request(request));
  BOOST_TEST((result.finish_reasons.at(0) == FinishReason::kEndId));
  BOOST_TEST(result.output_token_ids.at(0) == std::vector<TokenId>(tokens.begin(), tokens.begin() + first),
             boost::test_tools::per_element());
  BOOST_TEST(std::cmp_equal(result.log_probs->at(0).size(), first));
  BOOST_TEST(result.generation_logits->shape == (std::vector<std::int64_t>{1, first, 101}),
             boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(stop_words_end_and_are_part_of_the_output) {
  const auto executor = make_executor();
  const auto tokens = expected_tokens(kPrompt, 6);
  auto request = make_request(kPrompt, 6);
  request.stop_words = {{tokens[2], tokens[3]}};
  const auto result = collect_result(*executor, executor->enqueue_request(request));
  BOOST_TEST((result.finish_reasons.at(0) == FinishReason::kStopWords));
  BOOST_TEST(result.output_token_ids.at(0) == std::vector<TokenId>(tokens.begin(), tokens.begin() + 4),
             boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(a_stop_word_does_not_begin_in_the_prompt) {
  const auto executor = make_executor();
  const auto tokens = expected_tokens(kPrompt, 6);
  auto request = make_request(kPrompt, 6);
  request.stop_words = {{kPrompt.back(), tokens[0]}};
  const auto result = collect_result(*executor, executor->enqueue_request(request));
  BOOST_TEST((result.finish_reasons.at(0) == FinishReason::kLength));
  BOOST_TEST(result.output_token_ids.at(0) == tokens, boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(prompts_of_different_salts_share_nothing) {
  const auto executor = make_executor();
  const auto count_reused = [&](std::uint64_t salt) {
    auto request = make_request(kPrompt, 1);
    request.cache_salt_id = salt;
    static_cast<void>(collect_result(*executor, executor->enqueue_request(request)));
    return executor->get_latest_iteration_stats().back().kv_cache_stats->reused_blocks;
  };
  BOOST_TEST(count_reused(1) == 0);
  BOOST_TEST(count_reused(2) == 0);
  BOOST_TEST(count_reused(1) == 1);
}

BOOST_AUTO_TEST_CASE(bad_words_and_bias_change_the_tokens) {
  const auto executor = make_executor();
  const auto tokens = expected_tokens(kPrompt, 1);
  auto request = make_request(kPrompt, 1);
  request.bad_words = std::vector<std::vector<TokenId>>{{tokens[0]}};
  const auto other =
      collect_result(*executor, executor->enqueue_request(request)).output_token_ids.at(0).at(0);
  BOOST_TEST(other != tokens[0]);
  request.bad_words.reset();
  std::vector<float> bias(101, 0.0F);
  bias[13] = 100.0F;
  request.embedding_bias = bias_of(bias);
  BOOST_TEST(collect_result(*executor, executor->enqueue_request(request)).output_token_ids.at(0).at(0) ==
             13);
}

BOOST_AUTO_TEST_CASE(a_bias_of_another_shape_is_its_requests_error) {
  ExecutorConfig config;
  config.max_queue_size = 2;
  const auto executor = make_executor(config);
  const auto good = make_request(kPrompt, 2);
  auto bad = good;
  bad.client_id = 7;
  for (const std::vector<std::int64_t>& shape :
       {std::vector<std::int64_t>{100}, std::vector<std::int64_t>{1, 101}, std::vector<std::int64_t>{}}) {
    bad.embedding_bias = bias_of(std::vector<float>(101, 0.0F));
    bad.embedding_bias->shape = shape;
    const auto ids = executor->enqueue_requests({bad, good});
    const auto responses = executor->await_responses(ids[0], std::nullopt);
    BOOST_REQUIRE_EQUAL(responses.size(), 1);
    BOOST_TEST(responses[0].error_msg.starts_with("embedding bias shape is not as expected"));
    BOOST_TEST(responses[0].client_id.value() == 7);
    BOOST_TEST(collect_result(*executor, ids[1]).output_token_ids.at(0) == expected_tokens(kPrompt, 2),
               boost::test_tools::per_element());
  }
}

BOOST_AUTO_TEST_CASE(an_adapter_is_sent_once_and_named_afterwards) {
  const auto executor = make_executor();
  auto request = make_request(kPrompt, 5);
  request.lora_config = fake_adapter(3);
  const auto first = collect_result(*executor, executor->enqueue_request(request));
  request.lora_config = task_alone(3);
  const auto second = collect_result(*executor, executor->enqueue_request(request));
  BOOST_TEST(first.output_token_ids.at(0) == expected_tokens(kPrompt, 5, 3),
             boost::test_tools::per_element());
  BOOST_TEST(second.output_token_ids.at(0) == expected_tokens(kPrompt, 5, 3),
             boost::test_tools::per_element());
  BOOST_TEST(executor->lora_cache_stats().device_adapters == 1);
}

BOOST_AUTO_TEST_CASE(a_request_uses_an_adapter_that_an_earlier_one_of_its_list_brings) {
  const auto executor = make_executor();
  std::vector<Request> requests(3, make_request(kPrompt, 5));
  requests[0].lora_config = fake_adapter(3);
  requests[1].lora_config = task_alone(3);
  for (const RequestId id : executor->enqueue_requests(requests)) {
    const std::uint64_t task_id = id == 3 ? 0 : 3;
    BOOST_TEST(collect_result(*executor, id).output_token_ids.at(0) == expected_tokens(kPrompt, 5, task_id),
               boost::test_tools::per_element());
  }
  BOOST_TEST(executor->list_adapters().size() == 1U);
}

BOOST_AUTO_TEST_CASE(an_adapter_of_a_request_that_is_answered_with_an_error_serves_the_rest_of_its_list) {
  const auto executor = make_executor();
  std::vector<Request> requests(2, make_request(kPrompt, 5));
  requests[0].lora_config = fake_adapter(3);
  requests[0].embedding_bias = bias_of(std::vector<float>(3));
  requests[1].lora_config = task_alone(3);
  const auto ids = executor->enqueue_requests(requests);
  BOOST_TEST(collect(*executor, ids[0]).back().has_error());
  BOOST_TEST(collect_result(*executor, ids[1]).output_token_ids.at(0) == expected_tokens(kPrompt, 5, 3),
             boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(a_refused_list_leaves_no_adapter) {
  const auto executor = make_executor();
  executor->put_adapter(fake_adapter(1));
  std::vector<Request> requests(4, make_request(kPrompt, 5));
  requests[0].lora_config = fake_adapter(1);
  requests[1].lora_config = fake_adapter(2);
  requests[2].lora_config = fake_adapter(4);
  requests[3].lora_config = fake_adapter(2, 2, 9.0F);  // different weights under an id in the list
  BOOST_CHECK_THROW(executor->enqueue_requests(requests), AdapterError);
  BOOST_REQUIRE_EQUAL(executor->list_adapters().size(), 1U);
  BOOST_TEST(executor->list_adapters()[0].task_id == 1U);
  // An adapter that a later request adds does not serve an earlier one.
  requests = {make_request(kPrompt, 5), make_request(kPrompt, 5)};
  requests[0].lora_config = task_alone(2);
  requests[1].lora_config = fake_adapter(2);
  BOOST_CHECK_THROW(executor->enqueue_requests(requests), PeftTaskNotCachedError);
  BOOST_TEST(executor->list_adapters().size() == 1U);
}

BOOST_AUTO_TEST_CASE(adapters_can_be_put_pinned_listed_and_unloaded) {
  const auto executor = make_executor();
  executor->put_adapter(fake_adapter(1));
  executor->put_adapter(fake_adapter(2));
  executor->pin_adapter(2);
  const auto entries = executor->list_adapters();
  BOOST_REQUIRE_EQUAL(entries.size(), 2);
  BOOST_TEST(entries[0].task_id == 1);
  BOOST_TEST(!entries[0].pinned);
  BOOST_TEST(entries[1].pinned);
  executor->unpin_adapter(2);
  executor->unload_adapter(1);
  BOOST_TEST(executor->list_adapters().size() == 1);
  BOOST_CHECK_THROW(executor->unload_adapter(1), PeftTaskNotCachedError);
  BOOST_CHECK_THROW(executor->pin_adapter(9), PeftTaskNotCachedError);
}

BOOST_AUTO_TEST_CASE(any_thread_may_wait_for_any_request) {
  const auto executor = make_executor();
  std::vector<RequestId> ids;
  for (int i = 0; i < 12; ++i) ids.push_back(executor->enqueue_request(make_request({i, 2, 3}, 6)));
  std::vector<std::vector<TokenId>> tokens(ids.size());
  std::vector<std::jthread> threads;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    threads.emplace_back([&, i] {
      const auto responses = executor->await_responses(ids[i], std::nullopt);
      tokens[i] = responses.at(0).result.output_token_ids.at(0);
    });
  }
  threads.clear();
  for (std::size_t i = 0; i < ids.size(); ++i) {
    BOOST_TEST(tokens[i] == expected_tokens({static_cast<TokenId>(i), 2, 3}, 6),
               boost::test_tools::per_element());
  }
}

BOOST_AUTO_TEST_CASE(await_without_an_id_gives_all_responses_once) {
  const auto executor = make_executor();
  std::set<RequestId> ids;
  for (int i = 0; i < 5; ++i) ids.insert(executor->enqueue_request(make_request({i}, 3)));
  BOOST_TEST(ids.size() == 5);
  while (!ids.empty()) {
    for (const auto& response : executor->await_responses(std::chrono::minutes(1))) {
      BOOST_TEST(ids.erase(response.request_id) == 1);
    }
  }
  BOOST_TEST(executor->await_responses(std::chrono::milliseconds(1)).empty());
  BOOST_TEST(executor->get_num_responses_ready(std::nullopt) == 0);
}

void check_already_ended(const std::vector<Response>& responses, RequestId id) {
  BOOST_REQUIRE_EQUAL(responses.size(), 1);
  BOOST_TEST(responses[0].request_id == id);
  BOOST_TEST(responses[0].error_msg ==
             "ReqId " + std::to_string(id) + " has already been processed and was terminated.");
}

BOOST_AUTO_TEST_CASE(a_request_whose_last_response_was_taken_has_ended) {
  const auto executor = make_executor();
  const auto id = executor->enqueue_request(make_request({1}, 1));
  static_cast<void>(collect(*executor, id));
  check_already_ended(executor->await_responses(id, std::nullopt), id);
  BOOST_TEST(executor->get_num_responses_ready(id) == 0);
  BOOST_CHECK_THROW(static_cast<void>(executor->await_responses(0, std::nullopt)), RequestError);
  BOOST_CHECK_THROW(static_cast<void>(executor->await_responses(id + 1, std::nullopt)), RequestError);
  BOOST_CHECK_THROW(static_cast<void>(executor->get_num_responses_ready(id + 1)), RequestError);
  executor->cancel_request(id);  // no effect: it has ended
  BOOST_CHECK_THROW(executor->cancel_request(999), RequestError);
}

BOOST_AUTO_TEST_CASE(waiting_for_a_live_and_an_ended_request_loses_nothing) {
  const auto executor = make_executor();
  const auto ended = executor->enqueue_request(make_request({1}, 1));
  static_cast<void>(collect(*executor, ended));
  const auto live = executor->enqueue_request(make_request(kPrompt, 5));
  const auto both = executor->await_responses({live, ended}, std::nullopt);
  BOOST_REQUIRE_EQUAL(both->size(), 2);
  BOOST_REQUIRE_EQUAL(both->at(0).size(), 1);
  BOOST_TEST(both->at(0)[0].result.output_token_ids.at(0) == expected_tokens(kPrompt, 5),
             boost::test_tools::per_element());
  check_already_ended(both->at(1), ended);
  // If the same request is sent twice, each id gets its responses once.
  const auto twice = executor->enqueue_request(make_request({2}, 1));
  const auto again = executor->await_responses({twice, twice}, std::nullopt);
  BOOST_TEST(again->at(0).at(0).result.is_final);
  check_already_ended(again->at(1), twice);
  BOOST_TEST(executor->await_responses(std::vector<RequestId>{}, std::nullopt)->empty());
}

BOOST_AUTO_TEST_CASE(an_unknown_id_among_several_leaves_all_responses_where_they_are) {
  const auto executor = make_executor();
  const auto id = executor->enqueue_request(make_request({1}, 1));
  while (executor->get_num_responses_ready(id) == 0) std::this_thread::yield();
  BOOST_CHECK_THROW(static_cast<void>(executor->await_responses({id, id + 1}, std::nullopt)), RequestError);
  BOOST_TEST(executor->await_responses(id, std::nullopt).at(0).result.is_final);
}

BOOST_AUTO_TEST_CASE(waiting_for_several_takes_what_is_there_when_the_time_is_over_or_nothing) {
  Gate gate;
  FakeEngine::Options options;
  options.max_batch_size = 1;
  const auto executor = make_executor({}, options, [&](std::int64_t step) {
    if (step == 1) gate.wait();
  });
  const auto first = executor->enqueue_request(make_request({1}, 1));
  const auto second = executor->enqueue_request(make_request({2}, 1));
  gate.await_visitor();
  BOOST_TEST(!executor->await_responses({first, second}, 1ms, AtTimeout::kTakeNothing).has_value());
  BOOST_TEST(executor->get_num_responses_ready(first) == 1);
  const auto some = executor->await_responses({second, first}, 1ms);
  BOOST_TEST(some->at(0).empty());
  BOOST_TEST(some->at(1).at(0).result.is_final);
  gate.open();
  const auto rest = executor->await_responses({first, second}, std::nullopt, AtTimeout::kTakeNothing);
  check_already_ended(rest->at(0), first);
  BOOST_TEST(rest->at(1).at(0).result.is_final);
}

BOOST_AUTO_TEST_CASE(higher_priority_starts_first) {
  Gate gate;
  FakeEngine::Options options;
  options.max_batch_size = 1;
  const auto executor = make_executor({}, options, [&](std::int64_t step) {
    if (step == 0) gate.wait();
  });
  const auto first = executor->enqueue_request(make_request({1}, 1));
  gate.await_visitor();
  auto request = make_request({2}, 1);
  request.priority = 0.1F;
  const auto low = executor->enqueue_request(request);
  request.priority = 0.9F;
  const auto high = executor->enqueue_request(request);
  gate.open();
  const auto low_result = collect_result(*executor, low);
  BOOST_TEST(executor->get_num_responses_ready(high) == 1);
  BOOST_TEST(executor->get_num_responses_ready(first) == 1);
}

BOOST_AUTO_TEST_CASE(two_executors_work_at_once) {
  const auto one = make_executor();
  const auto other = make_executor();
  const auto a = one->enqueue_request(make_request(kPrompt, 8));
  const auto b = other->enqueue_request(make_request(kPrompt, 8));
  const auto expected = expected_tokens(kPrompt, 8);
  BOOST_TEST(collect_result(*other, b).output_token_ids.at(0) == expected, boost::test_tools::per_element());
  BOOST_TEST(collect_result(*one, a).output_token_ids.at(0) == expected, boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(iteration_and_request_statistics) {
  ExecutorConfig config;
  config.request_stats_max_iterations = 2;
  const auto executor = make_executor(config);
  const auto id = executor->enqueue_request(make_request(kPrompt, 3));
  static_cast<void>(collect(*executor, id));
  // The last response is sent before its step is recorded; after the next request's end it must be recorded.
  static_cast<void>(collect(*executor, executor->enqueue_request(make_request({1}, 1))));
  const auto iterations = executor->get_latest_iteration_stats();
  BOOST_REQUIRE_GE(iterations.size(), 3);
  BOOST_TEST(iterations[0].iter == 1);
  BOOST_TEST(iterations[0].num_new_active_requests == 1);
  BOOST_TEST(iterations[0].engine_latency_ms > 0.0);
  BOOST_TEST(iterations[0].engine_latency_ms < iterations[0].iter_latency_ms);
  BOOST_TEST(iterations[0].new_active_requests_queue_latency_ms > 0.0);
  BOOST_TEST(iterations[1].new_active_requests_queue_latency_ms == 0.0);
  BOOST_TEST(iterations[0].inflight_batching_stats->num_ctx_tokens == 7);
  BOOST_TEST(iterations[0].inflight_batching_stats->num_context_requests == 1);
  BOOST_TEST(iterations[1].inflight_batching_stats->num_gen_requests == 1);
  BOOST_TEST(iterations[2].num_completed_requests == 1);
  BOOST_TEST(iterations[0].kv_cache_stats->used_num_blocks == 2);
  BOOST_TEST(iterations[0].lora_cache_stats.has_value());
  const auto requests = executor->get_latest_request_stats();
  BOOST_REQUIRE_LE(requests.size(), 2);
  const auto& last = *std::ranges::find(requests, 3, &RequestStatsPerIteration::iter);
  BOOST_REQUIRE_EQUAL(last.request_stats.size(), 1);
  BOOST_TEST((last.request_stats[0].stage == RequestStage::kGenerationComplete));
  BOOST_TEST(last.request_stats[0].num_generated_tokens == 3);
  BOOST_TEST(last.request_stats[0].scheduled);
}

BOOST_AUTO_TEST_CASE(the_newest_statistics_are_kept_in_order) {
  ExecutorConfig config;
  config.iter_stats_max_iterations = 3;
  const auto executor = make_executor(config);
  for (int round = 0; round < 2; ++round) {
    static_cast<void>(collect(*executor, executor->enqueue_request(make_request(kPrompt, 10))));
    const auto iterations = executor->get_latest_iteration_stats();
    BOOST_REQUIRE_EQUAL(iterations.size(), 3);
    for (int i = 0; i < 3; ++i) {
      BOOST_TEST(iterations[static_cast<std::size_t>(i)].iter == 10 * round + 8 + i);
      BOOST_TEST(iterations[static_cast<std::size_t>(i)].timestamp.size() == 26U);
    }
  }
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::test::executor_test
