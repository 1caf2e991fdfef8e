// Result.request_perf_metrics and Result.num_cached_tokens.

#include "adaptrt/exec/perf_metrics.h"

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include "adaptrt/exec/executor.h"
#include "fake_engine.h"
#include "sequences.h"

namespace adaptrt::test::perf_metrics_test {
namespace {

std::vector<TokenId> counting(TokenId count, TokenId first) {
  std::vector<TokenId> tokens;
  for (TokenId i = 0; i < count; ++i) tokens.push_back(first + i);
  return tokens;
}

Request measured(std::vector<TokenId> prompt, std::int32_t max_tokens) {
  Request request = make_request(std::move(prompt), max_tokens);
  request.output_config.return_perf_metrics = true;
  request.output_config.exclude_input_from_output = true;
  return request;
}

RequestPerfMetrics metrics_of(Executor& executor, const Request& request) {
  return collect_result(executor, executor.enqueue_request(request)).request_perf_metrics.value();
}

BOOST_AUTO_TEST_SUITE(perf_metrics)

BOOST_AUTO_TEST_CASE(only_requests_that_ask_have_them) {
  const auto executor = make_executor();
  const Result result = collect_result(*executor, executor->enqueue_request(make_request(kPrompt, 2)));
  BOOST_TEST(!result.request_perf_metrics.has_value());
}

BOOST_AUTO_TEST_CASE(times_follow_one_another) {
  const auto executor = make_executor();
  const auto before = std::chrono::steady_clock::now();
  const TimingMetrics times = metrics_of(*executor, measured(kPrompt, 4)).timing_metrics;
  const auto after = std::chrono::steady_clock::now();
  BOOST_TEST((times.arrival_time >= before));
  BOOST_TEST((times.first_scheduled_time >= times.arrival_time));
  BOOST_TEST((times.first_token_time > times.first_scheduled_time));
  BOOST_TEST((times.last_token_time > times.first_token_time));
  BOOST_TEST((times.last_token_time <= after));
  BOOST_TEST((times.kv_cache_transfer_start == SteadyTime{} && times.kv_cache_transfer_end == SteadyTime{}));
  BOOST_TEST(times.kv_cache_size == 0U);
}

BOOST_AUTO_TEST_CASE(steps_are_those_of_the_statistics) {
  const auto executor = make_executor();
  for (const std::uint64_t first : {1, 4}) {
    const RequestPerfMetrics metrics = metrics_of(*executor, measured({static_cast<TokenId>(first)}, 3));
    BOOST_TEST(metrics.first_iter.value() == first);
    BOOST_TEST(metrics.iter.value() == first + 2);
    BOOST_TEST(metrics.last_iter.value() == first + 2);
    BOOST_TEST(std::cmp_equal(executor->get_latest_iteration_stats().back().iter, first + 2));
  }
}

BOOST_AUTO_TEST_CASE(streamed_responses_have_those_so_far) {
  const auto executor = make_executor();
  Request request = measured(kPrompt, 4);
  request.streaming = true;
  const auto responses = collect(*executor, executor->enqueue_request(request));
  BOOST_TEST_REQUIRE(responses.size() == 4U);
  SteadyTime newest;
  for (std::size_t i = 0; i < responses.size(); ++i) {
    const RequestPerfMetrics metrics = responses[i].result.request_perf_metrics.value();
    BOOST_TEST(metrics.first_iter.value() == 1U);
    BOOST_TEST(metrics.iter.value() == i + 1);
    BOOST_TEST(metrics.last_iter.has_value() == (i == 3));
    BOOST_TEST((metrics.timing_metrics.last_token_time > newest));
    newest = metrics.timing_metrics.last_token_time;
    const TimingMetrics& first = responses[0].result.request_perf_metrics->timing_metrics;
    BOOST_TEST((metrics.timing_metrics.first_token_time == first.last_token_time));
  }
}

BOOST_AUTO_TEST_CASE(reused_blocks_are_counted_and_so_are_the_tokens_that_were_cached) {
  const auto executor = make_executor();
  const Request request = measured(counting(16, 1), 2);
  Result result = collect_result(*executor, executor->enqueue_request(request));
  BOOST_TEST(result.num_cached_tokens == 0);
  KvCacheMetrics blocks = result.request_perf_metrics->kv_cache_metrics;
  BOOST_TEST(blocks.num_total_allocated_blocks == 5);
  BOOST_TEST(blocks.num_new_allocated_blocks == 5);
  BOOST_TEST(blocks.num_reused_blocks == 0);
  BOOST_TEST(blocks.num_missed_blocks == 3);
  BOOST_TEST(blocks.kv_cache_hit_rate == 0.0F);

  // Two blocks and two tokens of the third are equal.
  auto other = counting(10, 1);
  other.insert(other.end(), {90, 91, 92, 93, 94});
  result = collect_result(*executor, executor->enqueue_request(measured(other, 3)));
  BOOST_TEST(result.output_token_ids.at(0) == expected_tokens(other, 3), boost::test_tools::per_element());
  BOOST_TEST(result.num_cached_tokens == 10);
  blocks = result.request_perf_metrics->kv_cache_metrics;
  BOOST_TEST(blocks.num_total_allocated_blocks == 5);
  BOOST_TEST(blocks.num_new_allocated_blocks == 3);
  BOOST_TEST(blocks.num_reused_blocks == 2);
  BOOST_TEST(blocks.num_missed_blocks == 1);
  BOOST_TEST(blocks.kv_cache_hit_rate == 2.0F / 3.0F);
}

BOOST_AUTO_TEST_CASE(all_sequences_and_responses_tell_the_cached_tokens) {
  const auto executor = make_executor();
  Request request = several(make_request(counting(16, 1), 3), 2);
  request.streaming = true;
  for (const std::int32_t cached : {0, 15}) {
    for (const auto& [index, results] : results_of(*executor, executor->enqueue_request(request))) {
      for (const Result& result : results) BOOST_TEST(result.num_cached_tokens == cached);
    }
  }
  request = make_request(counting(16, 1), 3);
  request.output_config.return_prompt_log_probs = true;  // the whole prompt is computed
  BOOST_TEST(collect_result(*executor, executor->enqueue_request(request)).num_cached_tokens == 0);
}

BOOST_AUTO_TEST_CASE(snapshots_of_states_save_the_tokens_before_them) {
  FakeEngine::Options options;
  options.has_states = true;
  const auto engine = std::make_shared<FakeEngine>(options);
  Executor executor(engine, {}, kAvailableMemory, check_every_step);
  std::vector<TokenId> history(33, 4);
  for (int turn = 0; turn < 2; ++turn) {
    const std::int64_t before = engine->num_tokens();
    const auto length = static_cast<std::int64_t>(history.size());
    Request request = make_request(history, 14);
    request.output_config.exclude_input_from_output = true;
    const Result result = collect_result(executor, executor.enqueue_request(request));
    BOOST_TEST(result.num_cached_tokens == length + 13 - (engine->num_tokens() - before));
    BOOST_TEST((result.num_cached_tokens > 0) == (turn > 0));
    const auto& answer = result.output_token_ids.at(0);
    history.insert(history.end(), answer.begin(), answer.end());
    history.insert(history.end(), 3, static_cast<TokenId>(turn));
  }
}

BOOST_AUTO_TEST_CASE(a_preempted_request_counts_all_blocks_that_it_got) {
  ExecutorConfig config;
  config.scheduler_config.capacity_scheduler_policy = CapacitySchedulerPolicy::kMaxUtilization;
  config.kv_cache_config.max_tokens = 60;
  const auto executor = make_executor(config);
  std::vector<Request> requests;
  for (TokenId first = 0; first < 4; ++first) {
    std::vector<TokenId> prompt(10, 7);
    prompt[0] = first;
    requests.push_back(measured(prompt, 30));
  }
  const auto ids = executor->enqueue_requests(requests);
  KvCacheStats total;
  bool is_preempted = false;
  for (const RequestId id : ids) {
    const Result result = collect_result(*executor, id);
    BOOST_TEST(result.num_cached_tokens == 0);  // what it finds after a preemption is its own
    const KvCacheMetrics blocks = result.request_perf_metrics->kv_cache_metrics;
    BOOST_TEST(blocks.num_total_allocated_blocks ==
               blocks.num_new_allocated_blocks + blocks.num_reused_blocks);
    total.alloc_new_blocks += blocks.num_new_allocated_blocks;
    total.reused_blocks += blocks.num_reused_blocks;
    total.missed_blocks += blocks.num_missed_blocks;
    is_preempted = is_preempted || blocks.num_total_allocated_blocks > 10;
  }
  BOOST_TEST(is_preempted);
  const auto stats = executor->get_latest_iteration_stats().back().kv_cache_stats.value();
  BOOST_TEST(total.alloc_new_blocks == stats.alloc_new_blocks);
  BOOST_TEST(total.reused_blocks == stats.reused_blocks);
  BOOST_TEST(total.missed_blocks == stats.missed_blocks);
}

BOOST_AUTO_TEST_CASE(drafts_and_those_that_were_right_are_counted) {
  const auto expected = expected_tokens(kPrompt, 9);
  auto drafts = expected;
  drafts[3] = (drafts[3] + 1) % 101;
  Request request = measured(kPrompt, 9);
  request.external_draft_tokens_config.emplace().tokens = drafts;
  const auto executor = make_executor();
  const RequestPerfMetrics metrics = metrics_of(*executor, request);
  BOOST_TEST(metrics.speculative_decoding.total_draft_tokens == 8);
  BOOST_TEST(metrics.speculative_decoding.total_accepted_draft_tokens == 3);
  BOOST_TEST(metrics.speculative_decoding.acceptance_rate == 0.375F);
  BOOST_TEST(metrics.last_iter.value() == 6U);  // four tokens in the first step
  const RequestPerfMetrics without = metrics_of(*executor, measured(kPrompt, 9));
  BOOST_TEST((without.speculative_decoding == SpeculativeDecodingMetrics{}));
}

BOOST_AUTO_TEST_CASE(a_request_that_never_ran_has_no_other_time_than_its_arrival) {
  FakeEngine::Options options;
  options.max_batch_size = 1;
  Gate gate;
  const auto executor = make_executor({}, options, [&](std::int64_t step) {
    if (step == 0) gate.wait();
  });
  const auto running = executor->enqueue_request(make_request(kPrompt, 2));
  gate.await_visitor();
  const auto waiting = executor->enqueue_request(measured({1, 2}, 2));
  executor->cancel_request(waiting);
  gate.open();
  static_cast<void>(collect_result(*executor, running));
  const RequestPerfMetrics metrics = collect_result(*executor, waiting).request_perf_metrics.value();
  BOOST_TEST((metrics.timing_metrics.arrival_time > SteadyTime{}));
  TimingMetrics rest = metrics.timing_metrics;
  rest.arrival_time = {};
  BOOST_TEST((rest == TimingMetrics{}));
  BOOST_TEST((!metrics.first_iter && !metrics.iter && !metrics.last_iter));
}

BOOST_AUTO_TEST_CASE(beams_have_them_together) {
  FakeEngine::Options options;
  options.max_beam_width = 3;
  ExecutorConfig config;
  config.max_beam_width = 3;
  const auto executor = make_executor(config, options);
  Request request = measured(kPrompt, 5);
  request.sampling_config.beam_width = 3;
  const RequestPerfMetrics metrics = metrics_of(*executor, request);
  BOOST_TEST(metrics.first_iter.value() == 1U);
  BOOST_TEST((metrics.last_iter == metrics.iter && metrics.iter > metrics.first_iter));
  BOOST_TEST((metrics.timing_metrics.last_token_time > metrics.timing_metrics.first_token_time));
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::test::perf_metrics_test
