// Adapter loads while a batch runs.

#include <boost/test/unit_test.hpp>
#include <future>
#include <thread>

#include "adaptrt/core/error.h"
#include "adaptrt/exec/executor.h"
#include "fake_engine.h"
#include "lora/hooked_pages.h"

namespace adaptrt::test::executor_loading_test {
namespace {

using namespace std::chrono_literals;
using testing::Counter;
using testing::Door;

const std::vector<TokenId> kPrompt = {5, 17, 3};

FakeEngine::Options with_loads(std::function<void()> in_load) {
  FakeEngine::Options options;
  options.in_load = std::move(in_load);
  return options;
}

Request with_adapter(std::uint64_t task_id, std::int32_t max_tokens) {
  auto request = make_request(kPrompt, max_tokens);
  request.lora_config = fake_adapter(task_id);
  return request;
}

void check_tokens(Executor& executor, RequestId id, std::int32_t count, std::uint64_t task_id = 0) {
  BOOST_TEST(collect_result(executor, id).output_token_ids.at(0) == expected_tokens(kPrompt, count, task_id),
             boost::test_tools::per_element());
}

BOOST_AUTO_TEST_SUITE(executor_loading)

BOOST_AUTO_TEST_CASE(requests_run_while_adapters_are_loaded) {
  Door door;
  const auto executor = make_executor({}, with_loads([&] { door.pass(); }));
  check_tokens(*executor, executor->enqueue_request(with_adapter(1, 3)), 3, 1);
  door.shut();
  const auto cold = executor->enqueue_request(with_adapter(2, 4));
  door.await_waiting(1);
  check_tokens(*executor, executor->enqueue_request(make_request(kPrompt, 9)), 9);
  check_tokens(*executor, executor->enqueue_request(with_adapter(1, 9)), 9, 1);
  const auto iterations = executor->get_latest_iteration_stats();
  BOOST_TEST(iterations.back().lora_cache_stats->loads_in_flight == 1);
  BOOST_TEST(executor->get_num_responses_ready(cold) == 0);
  door.open();
  check_tokens(*executor, cold, 4, 2);
  BOOST_TEST(executor->lora_cache_stats().device_misses == 2);
}

BOOST_AUTO_TEST_CASE(adapters_are_loaded_during_the_step_that_runs_when_their_requests_come) {
  Counter loads;
  Gate in_step;
  Gate end_step;
  FakeEngine::Options options = with_loads([&] { loads.add(); });
  options.max_batch_size = 2;
  const auto executor = make_executor({}, options, [&](std::int64_t step) {
    if (step != 0) return;
    in_step.open();
    end_step.wait();
  });
  const auto base = executor->enqueue_request(make_request(kPrompt, 4));
  in_step.wait();
  std::vector<RequestId> cold;
  for (std::uint64_t task = 1; task <= 3; ++task)
    cold.push_back(executor->enqueue_request(with_adapter(task, 2)));
  loads.await(2);
  std::this_thread::sleep_for(20ms);  // time to do something wrong
  // The third could not run together with the first two.
  BOOST_TEST(executor->lora_cache_stats().device_misses == 2);
  end_step.open();
  check_tokens(*executor, base, 4);
  for (std::uint64_t task = 1; task <= 3; ++task) check_tokens(*executor, cold[task - 1], 2, task);
  BOOST_TEST(executor->lora_cache_stats().device_misses == 3);
}

BOOST_AUTO_TEST_CASE(the_executor_sleeps_while_there_are_only_loads) {
  Door door;
  std::atomic<int> plans = 0;
  const auto count_plans = [&](const StepPlan* plan, const Scheduler& scheduler, const LoraCache* cache,
                               const DraftEngine* draft_engine) {
    check_every_step(plan, scheduler, cache, draft_engine);
    if (plan != nullptr) ++plans;
  };
  door.shut();
  Executor executor(std::make_shared<FakeEngine>(with_loads([&] { door.pass(); })), {}, kAvailableMemory,
                    count_plans);
  const auto cold = executor.enqueue_request(with_adapter(2, 1));
  door.await_waiting(1);
  std::this_thread::sleep_for(50ms);  // time to do something wrong
  BOOST_TEST(plans == 1);
  door.open();
  check_tokens(executor, cold, 1, 2);
  BOOST_TEST(plans == 2);
}

BOOST_AUTO_TEST_CASE(a_failed_load_fails_its_requests_by_name_and_no_others) {
  Door door;
  std::atomic<bool> fails = true;
  const auto executor = make_executor({}, with_loads([&] {
                                        door.pass();
                                        if (fails) throw StepError("the bus is down");
                                      }));
  door.shut();
  const auto base = executor->enqueue_request(make_request(kPrompt, 30));
  const auto first = executor->enqueue_request(with_adapter(7, 3));
  const auto second = executor->enqueue_request(with_adapter(7, 3));
  door.await_waiting(1);
  // The loop has taken both once it has run a later request.
  check_tokens(*executor, executor->enqueue_request(make_request(kPrompt, 1)), 1);
  door.open();
  for (const auto id : {first, second}) {
    BOOST_TEST(collect(*executor, id).back().error_msg == "adapter 7 could not be loaded: the bus is down");
  }
  check_tokens(*executor, base, 30);
  BOOST_TEST(executor->lora_cache_stats().failed_loads == 1);
  fails = false;
  check_tokens(*executor, executor->enqueue_request(with_adapter(7, 3)), 3, 7);
}

BOOST_AUTO_TEST_CASE(a_failed_load_of_the_executor_s_own_thread_fails_its_request) {
  bool fails = true;
  ExecutorConfig config;
  config.peft_cache_config.emplace().num_ensure_workers = 0;
  const auto executor = make_executor(config, with_loads([&] {
                                        if (std::exchange(fails, false)) throw std::bad_alloc();
                                      }));
  const auto id = executor->enqueue_request(with_adapter(7, 3));
  BOOST_TEST(collect(*executor, id).back().error_msg.starts_with("adapter 7 could not be loaded: "));
  check_tokens(*executor, executor->enqueue_request(with_adapter(7, 3)), 3, 7);
}

BOOST_AUTO_TEST_CASE(requests_end_while_their_adapters_are_loaded) {
  Door door;
  door.shut();
  const auto executor = make_executor({}, with_loads([&] { door.pass(); }));
  const auto cancelled = executor->enqueue_request(with_adapter(1, 3));
  auto timed = with_adapter(2, 3);
  timed.allotted_time_ms = 20ms;
  const auto overdue = executor->enqueue_request(timed);
  door.await_waiting(1);
  executor->cancel_request(cancelled);
  BOOST_TEST((collect_result(*executor, cancelled).finish_reasons.at(0) == FinishReason::kCancelled));
  BOOST_TEST((collect_result(*executor, overdue).finish_reasons.at(0) == FinishReason::kTimedOut));
  executor->unload_adapter(1);
  BOOST_TEST(executor->list_adapters().size() == 1);
  door.open();
  check_tokens(*executor, executor->enqueue_request(with_adapter(1, 3)), 3, 1);
}

BOOST_AUTO_TEST_CASE(shutdown_does_not_wait_for_loads) {
  Door door;
  door.shut();
  auto executor = make_executor({}, with_loads([&] { door.pass(); }));
  for (std::uint64_t task = 1; task <= 3; ++task) executor->enqueue_request(with_adapter(task, 3));
  door.await_waiting(1);
  executor->shutdown();
  BOOST_TEST(!executor->is_alive());
  auto destroyed = std::async(std::launch::async, [&] { executor.reset(); });
  std::this_thread::sleep_for(20ms);  // its memory stays until the load has ended
  door.open();
  destroyed.get();
}

BOOST_AUTO_TEST_CASE(pins_and_replacements_while_loads_are_under_way) {
  Door door;
  const auto executor = make_executor({}, with_loads([&] { door.pass(); }));
  door.shut();
  const auto old = executor->enqueue_request(with_adapter(1, 3));
  door.await_waiting(1);
  auto other = with_adapter(1, 3);
  other.lora_config = fake_adapter(1, 4, 2.0F);
  other.lora_config->replace = true;
  const auto fresh = executor->enqueue_request(other);
  executor->put_adapter(fake_adapter(2));
  auto pinned = std::async(std::launch::async, [&] { executor->pin_adapter(2); });
  door.open();
  pinned.get();
  check_tokens(*executor, old, 3, 1);
  check_tokens(*executor, fresh, 3, 1);
  BOOST_TEST(executor->list_adapters().at(1).on_device);
}

BOOST_AUTO_TEST_CASE(an_engine_with_a_device_sizes_the_caches_by_its_memory) {
  ExecutorConfig config;
  config.peft_cache_config.emplace().device_cache_percent = 0.5;
  config.peft_cache_config->num_copy_streams = 2;
  FakeEngine::Options options;
  options.free_device_memory = std::size_t{1} << 20;
  const auto executor = make_executor(config, options);
  check_tokens(*executor, executor->enqueue_request(with_adapter(1, 3)), 3, 1);
  const auto stats = executor->get_latest_iteration_stats().at(0);
  const LoraCacheStats& lora = *stats.lora_cache_stats;
  const std::size_t level = static_cast<std::size_t>(lora.device_pages_total) * lora.page_bytes;
  BOOST_TEST(level <= *options.free_device_memory / 2);
  BOOST_TEST(level + lora.page_bytes > *options.free_device_memory / 2);
  BOOST_TEST(stats.gpu_mem_usage >= level);
  BOOST_TEST(stats.cpu_mem_usage == lora.host_bytes_used);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::test::executor_loading_test
