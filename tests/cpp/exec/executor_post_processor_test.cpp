// Requests with logits post-processors.

#include <boost/test/unit_test.hpp>
#include <limits>
#include <string>

#include "adaptrt/exec/executor.h"
#include "fake_engine.h"
#include "fake_grammar.h"

namespace adaptrt::test::executor_post_processor_test {
namespace {

const std::vector<TokenId> kPrompt = {5, 17, 3};

/// Allows only the token that `choose` returns, and records its calls. An empty result fails the request.
class FakeProcessor final : public LogitsPostProcessor {
 public:
  explicit FakeProcessor(TokenId token) : token_(token) {}

  std::shared_ptr<void> enter() override {
    ++num_entered;
    return {nullptr, [this](void*) { ++num_left; }};
  }
  void process(PostProcessedRow& row) override {
    ++num_calls;
    change(row);
  }
  void process_batch(std::span<PostProcessedRow> rows) override {
    ++num_batches;
    largest_batch = std::max(largest_batch, rows.size());
    for (auto& row : rows) change(row);
  }
  [[nodiscard]] bool equals(const LogitsPostProcessor& other) const override { return this == &other; }

  int num_entered = 0;
  int num_left = 0;
  int num_calls = 0;
  int num_batches = 0;
  std::size_t largest_batch = 0;
  std::size_t tokens_to_fail_at = 0;

 private:
  void change(PostProcessedRow& row) const {
    if (row.tokens.size() == tokens_to_fail_at) row.error = "enough of it";
    for (float& logit : *row.logits) logit = -std::numeric_limits<float>::infinity();
    (*row.logits)[static_cast<std::size_t>(token_)] = 0.0F;
  }

  TokenId token_;
};

std::vector<TokenId> output_of(Executor& executor, RequestId id) {
  return collect_result(executor, id).output_token_ids.at(0);
}

BOOST_AUTO_TEST_SUITE(executor_post_processors)

BOOST_AUTO_TEST_CASE(each_request_has_its_own_and_the_others_none) {
  const auto first = std::make_shared<FakeProcessor>(11);
  const auto second = std::make_shared<FakeProcessor>(12);
  ExecutorConfig config;
  config.logits_post_processor_config.emplace().processor_map = {{"second", PostProcessorFunction{second}}};
  const auto executor = make_executor(config);
  auto own = make_request(kPrompt, 4);
  own.logits_post_processor = PostProcessorFunction{first};
  own.output_config.return_generation_logits = true;
  auto named = make_request(kPrompt, 4);
  named.logits_post_processor_name = "second";
  const auto ids = executor->enqueue_requests({make_request(kPrompt, 4), own, named});
  BOOST_TEST(output_of(*executor, ids[0]) == expected_tokens(kPrompt, 4), boost::test_tools::per_element());
  const auto result = collect_result(*executor, ids[1]);
  BOOST_TEST(result.output_token_ids.at(0) == std::vector<TokenId>(4, 11), boost::test_tools::per_element());
  // Returned logits are the engine's.
  const auto expected = FakeEngine::logits_after(kPrompt, 0, 101);
  BOOST_TEST(std::equal(expected.begin(), expected.end(), result.generation_logits->values->begin()));
  BOOST_TEST(output_of(*executor, ids[2]) == std::vector<TokenId>(4, 12), boost::test_tools::per_element());
  BOOST_TEST(first->num_calls == 4);
  BOOST_TEST(second->num_calls == 4);
  // At most once per step for both.
  BOOST_TEST(first->num_entered + second->num_entered <= 8);
  BOOST_TEST(first->num_entered == first->num_left);
}

BOOST_AUTO_TEST_CASE(a_batch_is_processed_at_once) {
  const auto batched = std::make_shared<FakeProcessor>(21);
  ExecutorConfig config;
  config.logits_post_processor_config.emplace().processor_batched = PostProcessorFunction{batched};
  Gate gate;
  const auto executor = make_executor(config, {}, [&](std::int64_t step) {
    if (step == 0) gate.wait();
  });
  auto request = make_request(kPrompt, 5);
  request.logits_post_processor_name = kBatchedPostProcessorName;
  const auto other = executor->enqueue_request(make_request(kPrompt, 3));
  gate.await_visitor();
  const auto ids = executor->enqueue_requests({request, request, request});
  gate.open();
  for (const RequestId id : ids)
    BOOST_TEST(output_of(*executor, id) == std::vector<TokenId>(5, 21), boost::test_tools::per_element());
  BOOST_TEST(output_of(*executor, other) == expected_tokens(kPrompt, 3), boost::test_tools::per_element());
  BOOST_TEST(batched->num_calls == 0);
  BOOST_TEST(batched->num_batches == 5);
  BOOST_TEST(batched->largest_batch == 3U);
}

BOOST_AUTO_TEST_CASE(a_failing_one_fails_its_request_alone) {
  const auto failing = std::make_shared<FakeProcessor>(11);
  failing->tokens_to_fail_at = kPrompt.size() + 2;
  const auto executor = make_executor();
  auto request = make_request(kPrompt, 4);
  request.logits_post_processor = PostProcessorFunction{failing};
  const auto ids = executor->enqueue_requests({request, make_request(kPrompt, 4)});
  BOOST_TEST(collect(*executor, ids[0]).back().error_msg == "enough of it");
  BOOST_TEST(failing->num_calls == 3);
  BOOST_TEST(output_of(*executor, ids[1]) == expected_tokens(kPrompt, 4), boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(a_guide_and_a_bias_come_after_it) {
  const auto processor = std::make_shared<FakeProcessor>(12);
  const auto executor = make_executor();
  executor->set_grammar_compiler(std::make_shared<FakeCompiler>());
  auto request = guided(make_request(kPrompt, 4), "3");
  request.logits_post_processor = PostProcessorFunction{processor};
  // 12 may come three times; then only the end is left, which the processor forbids.
  BOOST_TEST(collect(*executor, executor->enqueue_request(request)).back().error_msg ==
             "every token is forbidden");
  request.max_tokens = 3;
  BOOST_TEST(output_of(*executor, executor->enqueue_request(request)) == std::vector<TokenId>(3, 12),
             boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(names_are_checked) {
  const auto processor = std::make_shared<FakeProcessor>(1);
  ExecutorConfig config;
  config.logits_post_processor_config.emplace().processor_map = {
      {kBatchedPostProcessorName, PostProcessorFunction{processor}}};
  BOOST_TEST(config.validate().list().size() == 1U);
  config.logits_post_processor_config->processor_map = {{"one", PostProcessorFunction{processor}}};
  const auto executor = make_executor(config);
  auto request = make_request(kPrompt, 1);
  for (const char* name : {"two", kBatchedPostProcessorName, ""}) {
    request.logits_post_processor_name = name;
    BOOST_CHECK_THROW(executor->enqueue_request(request), RequestError);
  }
  request.logits_post_processor_name = "one";
  BOOST_TEST(output_of(*executor, executor->enqueue_request(request)).at(0) == 1);
  request.logits_post_processor = PostProcessorFunction{processor};
  BOOST_CHECK_THROW(executor->enqueue_request(request), RequestError);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::test::executor_post_processor_test
