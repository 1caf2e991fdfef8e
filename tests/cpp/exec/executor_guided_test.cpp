// Requests with guided outputs.

#include <atomic>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <random>
#include <thread>

#include "adaptrt/core/error.h"
#include "adaptrt/exec/executor.h"
#include "fake_engine.h"
#include "fake_grammar.h"

namespace adaptrt::test::executor_guided_test {
namespace {

const std::vector<TokenId> kPrompt = {5, 17, 3};

std::unique_ptr<Executor> make_guided(
    const ExecutorConfig& config = {}, FakeEngine::Hook hook = {}, std::function<void()> in_mask = [] {}) {
  auto executor = make_executor(config, {}, std::move(hook));
  executor->set_grammar_compiler(std::make_shared<FakeCompiler>(std::move(in_mask)));
  return executor;
}

std::vector<TokenId> output_of(Executor& executor, const Request& request) {
  return collect_result(executor, executor.enqueue_request(request)).output_token_ids.at(0);
}

BOOST_AUTO_TEST_SUITE(executor_guided)

BOOST_AUTO_TEST_CASE(outputs_follow_the_guide_and_end_with_it) {
  const auto executor = make_guided();
  for (const auto& end_id : {std::optional<TokenId>{}, std::optional<TokenId>{kStopToken}}) {
    for (const std::int32_t length : {0, 1, 12}) {
      auto request = guided(make_request(kPrompt, 20), std::to_string(length));
      request.end_id = end_id;
      const auto result = collect_result(*executor, executor->enqueue_request(request));
      const auto& tokens = result.output_token_ids.at(0);
      BOOST_TEST(tokens.size() == static_cast<std::size_t>(length));
      BOOST_TEST(follows_the_rule(tokens));
      BOOST_TEST((result.finish_reasons.at(0) == FinishReason::kEndId));
    }
  }
  const auto cut = output_of(*executor, guided(make_request(kPrompt, 4), "12"));
  BOOST_TEST(cut.size() == 4U);
  BOOST_TEST(follows_the_rule(cut));
}

BOOST_AUTO_TEST_CASE(one_that_cannot_be_compiled_fails_alone) {
  const auto executor = make_guided();
  const auto ids =
      executor->enqueue_requests({make_request(kPrompt, 5), guided(make_request(kPrompt, 5), "bad"),
                                  guided(make_request(kPrompt, 5), "3")});
  const auto failed = collect(*executor, ids[1]);
  BOOST_TEST_REQUIRE(failed.size() == 1U);
  BOOST_TEST(failed[0].error_msg == "the guide cannot be compiled: it is bad");
  BOOST_TEST(collect_result(*executor, ids[0]).output_token_ids.at(0) == expected_tokens(kPrompt, 5),
             boost::test_tools::per_element());
  BOOST_TEST(collect_result(*executor, ids[2]).output_token_ids.at(0).size() == 3U);
  BOOST_CHECK_THROW(executor->check_guide({GuideType::kRegex, "bad"}), RequestError);
  BOOST_CHECK_NO_THROW(executor->check_guide({GuideType::kRegex, "1"}));
  BOOST_TEST(executor->has_compiled_guide({GuideType::kRegex, "1"}));
  BOOST_TEST(!executor->has_compiled_guide({GuideType::kRegex, "2"}));
}

BOOST_AUTO_TEST_CASE(one_that_fails_on_its_way_fails_alone) {
  const auto executor = make_guided();
  const auto ids =
      executor->enqueue_requests({make_request(kPrompt, 9), guided(make_request(kPrompt, 9), "broken")});
  BOOST_TEST(collect(*executor, ids[1]).back().error_msg == "guided decoding: it broke");
  BOOST_TEST(collect_result(*executor, ids[0]).output_token_ids.at(0) == expected_tokens(kPrompt, 9),
             boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(guides_and_their_compiler_are_checked) {
  const auto without = make_executor();
  BOOST_CHECK_EXCEPTION(without->enqueue_request(guided(make_request(kPrompt, 1), "1")), RequestError,
                        [](const RequestError& error) {
                          return std::string(error.what()).find("has no GrammarCompiler") !=
                                 std::string::npos;
                        });
  BOOST_CHECK_THROW(without->check_guide({GuideType::kRegex, "1"}), RequestError);
  BOOST_TEST(!without->has_compiled_guide({GuideType::kRegex, "1"}));
  const auto executor = make_guided();
  BOOST_CHECK_THROW(executor->set_grammar_compiler(std::make_shared<FakeCompiler>()), ConfigError);
  auto request = guided(make_request(kPrompt, 1), std::string("1\0", 2));
  BOOST_CHECK_THROW(executor->enqueue_request(request), RequestError);
  request.guided_decoding_params = {.guide_type = GuideType::kJsonSchema};
  BOOST_CHECK_THROW(executor->enqueue_request(request), RequestError);
  request.guided_decoding_params = {.guide_type = GuideType::kJson, .guide = "{}"};
  BOOST_CHECK_THROW(executor->enqueue_request(request), RequestError);
  BOOST_CHECK_THROW(executor->check_guide({GuideType::kRegex, std::nullopt}), RequestError);
}

BOOST_AUTO_TEST_CASE(a_mask_is_made_beside_the_step) {
  // The mask for the second token is needed when the second step's logits arrive. That step waits until
  // another thread has made the mask.
  std::atomic<int> num_masks = 0;
  std::atomic<bool> elsewhere = true;
  std::atomic<std::thread::id> step_thread;
  const auto executor = make_guided(
      {},
      [&](std::int64_t step) {
        step_thread = std::this_thread::get_id();
        while (num_masks < step + 1) std::this_thread::yield();
      },
      [&] {
        if (std::this_thread::get_id() == step_thread.load()) elsewhere = false;
        ++num_masks;
      });
  BOOST_TEST(output_of(*executor, guided(make_request(kPrompt, 20), "6")).size() == 6U);
  BOOST_TEST(num_masks == 7);
  BOOST_TEST(elsewhere);
}

BOOST_AUTO_TEST_CASE(ends_of_all_kinds_leave_nothing_behind) {
  for (int round = 0; round < 20; ++round) {
    const auto executor =
        make_guided({}, {}, [] { std::this_thread::sleep_for(std::chrono::microseconds(200)); });
    std::vector<RequestId> ids;
    for (int i = 0; i < 6; ++i)
      ids.push_back(executor->enqueue_request(guided(make_request(kPrompt, 60), "50")));
    executor->cancel_request(ids[0]);
    BOOST_TEST((collect(*executor, ids[0]).back().result.finish_reasons.at(0) == FinishReason::kCancelled));
    executor->shutdown();
  }
}

BOOST_AUTO_TEST_CASE(a_crowd_changes_no_guided_token) {
  std::mt19937 random(5);
  const auto draw = [&](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
  const auto alone = make_guided();
  std::vector<Request> requests;
  std::vector<std::vector<TokenId>> expected;
  for (int i = 0; i < 60; ++i) {
    std::vector<TokenId> prompt(static_cast<std::size_t>(draw(1, 30)));
    for (auto& token : prompt) token = draw(0, 3);
    auto request = make_request(prompt, draw(1, 20));
    if (draw(0, 2) > 0) request = guided(request, std::to_string(draw(0, 20)));
    if (draw(0, 1) > 0) {
      request.sampling_config.top_p = 0.9;
      request.sampling_config.top_p_decay = 0.9;
      request.sampling_config.seed = static_cast<std::uint64_t>(i);
    }
    if (const auto task_id = static_cast<std::uint64_t>(draw(0, 3)); task_id > 0)
      request.lora_config = fake_adapter(task_id);
    expected.push_back(output_of(*alone, request));
    requests.push_back(std::move(request));
  }
  ExecutorConfig config;
  config.scheduler_config.capacity_scheduler_policy = CapacitySchedulerPolicy::kMaxUtilization;
  config.kv_cache_config.max_tokens = 96;
  config.enable_chunked_context = true;
  config.max_num_tokens = 7;
  const auto executor =
      make_guided(config, {}, [] { std::this_thread::sleep_for(std::chrono::microseconds(20)); });
  const auto ids = executor->enqueue_requests(requests);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const auto tokens = collect_result(*executor, ids[i]).output_token_ids.at(0);
    BOOST_TEST(tokens == expected[i], boost::test_tools::per_element());
  }
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::test::executor_guided_test
