// Random crowds: a request's tokens equal those that it gets alone, whatever runs with it and however memory
// runs out.

#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <random>
#include <thread>

#include "adaptrt/exec/executor.h"
#include "crowd_setting.h"
#include "fake_engine.h"
#include "support/sanitized.h"

namespace adaptrt::test::executor_crowd_test {
namespace {

struct Guest {
  Request request;
  std::vector<TokenId> expected;
};

/// Requests with shared prefixes, with and without adapters. Sampled ones are checked against an idle
/// executor.
std::vector<Guest> draw_crowd(std::mt19937& random, int count, bool sampled) {
  const auto draw = [&](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
  std::vector<TokenId> common(80);
  for (auto& token : common) token = draw(0, 100);
  std::vector<Guest> crowd;
  for (int i = 0; i < count; ++i) {
    std::vector<TokenId> prompt(common.begin(), common.begin() + draw(0, 60));
    for (int own = draw(1, 10); own > 0; --own) prompt.push_back(draw(0, 3));
    const int max_tokens = draw(1, 20);
    const auto task_id = static_cast<std::uint64_t>(draw(0, 5));
    Guest guest{make_request(prompt, max_tokens), expected_tokens(prompt, max_tokens, task_id)};
    if (task_id > 0)
      guest.request.lora_config = fake_adapter(task_id, 1 + static_cast<std::int32_t>(task_id));
    guest.request.priority = static_cast<float>(draw(0, 4)) / 4.0F;
    if (sampled) {
      guest.request.sampling_config.top_k = 20;
      guest.request.sampling_config.temperature = 1.5;
      guest.request.sampling_config.seed = static_cast<std::uint64_t>(i);
      guest.request.sampling_config.repetition_penalty = 1.3;
      const auto alone = make_executor();
      guest.expected = collect_result(*alone, alone->enqueue_request(guest.request)).output_token_ids.at(0);
    }
    crowd.push_back(std::move(guest));
  }
  return crowd;
}

void check_crowd(Executor& executor, const std::vector<Guest>& crowd) {
  std::vector<RequestId> ids;
  for (const auto& guest : crowd) ids.push_back(executor.enqueue_request(guest.request));
  for (std::size_t i = 0; i < crowd.size(); ++i) {
    const auto result = collect_result(executor, ids[i]);
    BOOST_TEST(result.output_token_ids.at(0) == crowd[i].expected, boost::test_tools::per_element());
  }
}

const std::vector<CrowdSetting> kSettings = {
    {CapacitySchedulerPolicy::kGuaranteedNoEvict, 1024, 64, true, 8},
    {CapacitySchedulerPolicy::kGuaranteedNoEvict, 128, 5, true, 8},
    {CapacitySchedulerPolicy::kGuaranteedNoEvict, 128, 64, false, 2},
    {CapacitySchedulerPolicy::kMaxUtilization, 96, 64, true, 8},
    {CapacitySchedulerPolicy::kMaxUtilization, 96, 7, false, 8},
    {CapacitySchedulerPolicy::kMaxUtilization, 112, 3, true, 3},
    {CapacitySchedulerPolicy::kStaticBatch, 256, 32, true, 4},
};

BOOST_AUTO_TEST_SUITE(executor_crowds)

BOOST_DATA_TEST_CASE(a_crowd_changes_no_token, boost::unit_test::data::make(kSettings), setting) {
  for (unsigned seed = 0; seed < sanitized(3U, 4U); ++seed) {
    std::mt19937 random(seed);
    const auto crowd = draw_crowd(random, sanitized(20, 40), false);
    ExecutorConfig config = config_of(setting);
    config.kv_cache_config.enable_partial_reuse = seed > 0;
    config.kv_cache_config.copy_on_partial_reuse = seed > 1;
    const auto executor = make_executor(config);
    check_crowd(*executor, crowd);
  }
}

BOOST_DATA_TEST_CASE(a_crowd_changes_no_draw, boost::unit_test::data::make({kSettings[1], kSettings[4]}),
                     setting) {
  std::mt19937 random(11);
  const auto crowd = draw_crowd(random, 20, true);
  const auto executor = make_executor(config_of(setting));
  check_crowd(*executor, crowd);
}

BOOST_DATA_TEST_CASE(a_small_lora_cache_is_shared_by_turns, boost::unit_test::data::make({0, 1, 3}),
                     num_workers) {
  std::mt19937 random(3);
  const auto crowd = draw_crowd(random, 40, false);
  auto config = config_of(kSettings[0]);
  config.peft_cache_config.emplace().num_device_module_layer = 8;  // one adapter of maximal rank
  config.peft_cache_config->num_ensure_workers = num_workers;
  FakeEngine::Options options;
  options.in_load = [] { std::this_thread::sleep_for(std::chrono::microseconds(300)); };
  const auto executor = make_executor(config, options);
  check_crowd(*executor, crowd);
  BOOST_TEST(executor->lora_cache_stats().device_evictions > 0);
}

BOOST_AUTO_TEST_CASE(context_logits_survive_a_preemption) {
  auto config = config_of(kSettings[4]);
  const auto executor = make_executor(config);
  std::vector<RequestId> ids;
  std::vector<std::vector<TokenId>> prompts;
  for (TokenId i = 0; i < 6; ++i) {
    prompts.push_back(std::vector<TokenId>(20, i));
    auto request = make_request(prompts.back(), 20);
    request.output_config.return_context_logits = true;
    ids.push_back(executor->enqueue_request(request));
  }
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const auto result = collect_result(*executor, ids[i]);
    BOOST_TEST(result.output_token_ids.at(0) == expected_tokens(prompts[i], 20),
               boost::test_tools::per_element());
    std::vector<TokenId> history;
    for (std::size_t row = 0; row < 20; ++row) {
      history.push_back(prompts[i][row]);
      const auto expected = FakeEngine::logits_after(history, 0, 101);
      BOOST_TEST(std::equal(expected.begin(), expected.end(),
                            result.context_logits->values->begin() + static_cast<std::ptrdiff_t>(row * 101)));
    }
  }
}

BOOST_AUTO_TEST_CASE(many_threads_enqueue_await_and_cancel) {
  const auto executor = make_executor(config_of(kSettings[3]));
  std::vector<std::vector<Guest>> crowds;
  for (unsigned thread = 0; thread < 6; ++thread) {
    std::mt19937 random(100 + thread);
    crowds.push_back(draw_crowd(random, 15, false));
  }
  std::atomic<int> num_wrong = 0;
  {
    std::vector<std::jthread> threads;
    for (const auto& crowd : crowds) {
      threads.emplace_back([&] {
        for (std::size_t i = 0; i < crowd.size(); ++i) {
          const auto id = executor->enqueue_request(crowd[i].request);
          if (i % 4 == 3) executor->cancel_request(id);
          const auto responses = executor->await_responses(id, std::chrono::minutes(1));
          const auto& result = responses.at(0).result;
          const auto& tokens = result.output_token_ids.at(0);
          const bool is_prefix = tokens.size() <= crowd[i].expected.size() &&
                                 std::equal(tokens.begin(), tokens.end(), crowd[i].expected.begin());
          const bool is_whole = tokens.size() == crowd[i].expected.size();
          if (!is_prefix || (!is_whole && result.finish_reasons.at(0) != FinishReason::kCancelled))
            ++num_wrong;
        }
      });
    }
  }
  BOOST_TEST(num_wrong == 0);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::test::executor_crowd_test
