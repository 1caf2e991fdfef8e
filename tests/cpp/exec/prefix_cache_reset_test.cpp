// Executor::reset_prefix_cache(): later requests compute everything again, and no token changes.

#include <boost/test/unit_test.hpp>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/exec/executor.h"
#include "fake_engine.h"
#include "sequences.h"

namespace adaptrt::test::prefix_cache_reset_test {
namespace {

std::vector<TokenId> counting(TokenId count) {
  std::vector<TokenId> tokens;
  for (TokenId i = 0; i < count; ++i) tokens.push_back(i + 1);
  return tokens;
}

/// Checks the request's tokens. Returns the number of prompt tokens that were cached.
std::int32_t cached_by(Executor& executor, RequestId id, const Request& request) {
  const Result result = collect_result(executor, id);
  BOOST_TEST(result.output_token_ids.at(0) == expected_tokens(request.input_token_ids, request.max_tokens),
             boost::test_tools::per_element());
  return result.num_cached_tokens;
}
std::int32_t cached_by(Executor& executor, const Request& request) {
  return cached_by(executor, executor.enqueue_request(request), request);
}

FakeEngine::Options with_states() {
  FakeEngine::Options options;
  options.has_states = true;
  return options;
}

BOOST_AUTO_TEST_SUITE(prefix_cache_reset)

BOOST_AUTO_TEST_CASE(a_prompt_is_computed_again_once) {
  const auto executor = make_executor();
  const Request request = make_request(counting(16), 3);
  BOOST_TEST(cached_by(*executor, request) == 0);
  BOOST_TEST(cached_by(*executor, request) == 15);
  executor->reset_prefix_cache();
  BOOST_TEST(cached_by(*executor, request) == 0);
  BOOST_TEST(cached_by(*executor, request) == 15);
}

BOOST_AUTO_TEST_CASE(snapshots_of_states_are_dropped) {
  const auto executor = make_executor({}, with_states());
  const Request request = make_request(counting(18), 3);
  BOOST_TEST(cached_by(*executor, request) == 0);
  BOOST_TEST(cached_by(*executor, request) == 16);
  executor->reset_prefix_cache();
  BOOST_TEST(cached_by(*executor, request) == 0);
  BOOST_TEST(cached_by(*executor, request) == 16);
  const StatePoolStats stats = executor->get_latest_iteration_stats().back().state_stats.value();
  BOOST_TEST(stats.reused_snapshots == 2);
}

BOOST_AUTO_TEST_CASE(running_requests_keep_their_blocks_and_share_them_no_longer) {
  Gate gate;
  const auto executor = make_executor({}, {}, [&](std::int64_t step) {
    if (step == 2) gate.wait();
  });
  const Request request = make_request(counting(16), 12);
  const RequestId running = executor->enqueue_request(request);
  gate.await_visitor();
  executor->reset_prefix_cache();
  const RequestId later = executor->enqueue_request(request);
  gate.open();
  BOOST_TEST(cached_by(*executor, running, request) == 0);
  BOOST_TEST(cached_by(*executor, later, request) == 0);
  BOOST_TEST(cached_by(*executor, request) == 15);
}

BOOST_AUTO_TEST_CASE(resets_between_many_requests_change_no_token) {
  for (const bool has_states : {false, true}) {
    FakeEngine::Options options;
    options.has_states = has_states;
    ExecutorConfig config;
    config.scheduler_config.capacity_scheduler_policy = CapacitySchedulerPolicy::kMaxUtilization;
    config.kv_cache_config.max_tokens = 200;
    config.enable_chunked_context = true;
    config.max_num_tokens = 16;
    const auto executor = make_executor(config, options);
    std::mt19937 random(5);
    const auto draw = [&](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
    std::vector<std::pair<RequestId, Request>> running;
    for (int i = 0; i < 150; ++i) {
      auto prompt = counting(draw(1, 40));
      prompt.push_back(draw(90, 93));
      const Request request = make_request(prompt, draw(1, 20));
      running.emplace_back(executor->enqueue_request(request), request);
      if (draw(0, 3) == 0) executor->reset_prefix_cache();
      if (draw(0, 4) > 0 && running.size() < 12) continue;
      static_cast<void>(cached_by(*executor, running.front().first, running.front().second));
      running.erase(running.begin());
    }
    for (const auto& [id, request] : running) static_cast<void>(cached_by(*executor, id, request));
  }
}

BOOST_AUTO_TEST_CASE(events_say_that_the_blocks_are_gone) {
  ExecutorConfig config;
  config.kv_cache_config.event_buffer_max_size = 100;
  const auto executor = make_executor(config);
  const auto events = executor->get_kv_cache_event_manager();
  static_cast<void>(cached_by(*executor, make_request(counting(16), 2)));
  static_cast<void>(events->get_latest_events(std::chrono::minutes(1)));
  executor->reset_prefix_cache();
  // Without a step: the executor is idle.
  BOOST_TEST(!events->get_latest_events(std::chrono::minutes(1)).empty());
}

BOOST_AUTO_TEST_CASE(an_executor_that_is_shut_down_has_none) {
  const auto executor = make_executor();
  executor->shutdown();
  BOOST_CHECK_THROW(executor->reset_prefix_cache(), ExecutorClosedError);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::test::prefix_cache_reset_test
