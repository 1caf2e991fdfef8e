// Memory of the step loop: in steady state, its steps allocate nothing.

#include "support/allocations.h"

#include <algorithm>
#include <boost/test/unit_test.hpp>

#include "adaptrt/exec/executor.h"
#include "fake_engine.h"
#include "fake_grammar.h"

namespace adaptrt::test::allocations_test {
namespace {

BOOST_AUTO_TEST_SUITE(allocations)

constexpr std::int32_t kTokens = 90;

/// True if sequences were forked from a prompt; beams are copied later too.
bool has_forks(const StepPlan& plan) {
  return std::ranges::any_of(plan.copies,
                             [](const PlannedCopy& copy) { return copy.sequence->num_generated() == 1; });
}

/// Serves requests with `num_sequences` sequences together. Fails the test if a step in which all of them
/// decode allocates anything. Returns the number of drafts in these steps.
std::int64_t check_steady_steps(std::vector<Request> requests, std::int32_t num_sequences,
                                std::shared_ptr<Engine> draft_engine = nullptr) {
  FakeEngine::Options options;
  options.max_batch_size = num_sequences;
  options.max_num_tokens = 256;
  options.max_beam_width = 4;
  options.finds_best_tokens = true;
  options.finds_highest_logits = true;
  ExecutorConfig config;
  config.max_beam_width = 4;
  std::vector<std::int64_t> of_steps;  // allocations from one plan to the next
  of_steps.reserve(1000);
  std::int64_t before = 0;
  std::int64_t num_drafts = 0;
  const auto count = [&](const StepPlan* plan, const Scheduler& scheduler, const LoraCache*,
                         const DraftEngine*) {
    if (plan == nullptr) return;
    const bool is_steady =
        plan->num_generation_sequences == num_sequences && !has_forks(*plan) && scheduler.waiting().empty();
    if (is_steady && before >= 0) of_steps.push_back(testing::allocations_of_this_thread() - before);
    if (is_steady) num_drafts += plan->num_draft_tokens;
    before = is_steady ? testing::allocations_of_this_thread() : -1;
  };
  before = -1;
  if (draft_engine != nullptr) config.draft_target_decoding_config.emplace();
  Executor executor(std::make_shared<FakeEngine>(options), config, kAvailableMemory, count,
                    std::move(draft_engine));
  executor.set_grammar_compiler(std::make_shared<FakeCompiler>());
  for (Request& request : requests) {
    if (!request.lora_config) continue;
    executor.put_adapter(*request.lora_config);
    executor.pin_adapter(request.lora_config->task_id);
    request.lora_config = task_alone(request.lora_config->task_id);
  }
  for (const RequestId id : executor.enqueue_requests(requests)) static_cast<void>(collect(executor, id));
  BOOST_TEST_REQUIRE(of_steps.size() > 50U);
  BOOST_TEST(of_steps == std::vector<std::int64_t>(of_steps.size(), 0), boost::test_tools::per_element());
  return num_drafts;
}

BOOST_AUTO_TEST_CASE(a_steady_step_allocates_nothing) {
  constexpr std::int32_t kRequests = 16;
  std::vector<Request> requests;
  for (TokenId i = 0; i < kRequests; ++i) {
    auto request = make_request({i, 2, 3}, kTokens);
    request.output_config.return_log_probs = i % 3 == 1;
    request.output_config.top_log_probs = i % 3;
    request.output_config.return_prompt_log_probs = i % 5 == 1;
    if (i % 5 == 2) request.sampling_config.top_k = 40;
    if (i % 4 == 3) request = guided(std::move(request), "99");
    if (i % 2 == 0) request.lora_config = fake_adapter(static_cast<std::uint64_t>(i + 1));
    requests.push_back(std::move(request));
  }
  BOOST_TEST(check_steady_steps(std::move(requests), kRequests) == 0);
}

BOOST_AUTO_TEST_CASE(a_steady_step_of_forked_sequences_allocates_nothing) {
  std::vector<Request> requests;
  for (TokenId i = 0; i < 4; ++i) {
    auto request = make_request({i, 2, 3}, kTokens);
    request.num_return_sequences = i + 1;
    request.sampling_config.top_k = 20;
    request.sampling_config.temperature = 2.0;
    request.sampling_config.presence_penalty = 0.5;
    request.output_config.return_log_probs = true;
    if (i == 3) request = guided(std::move(request), "99");
    if (i % 2 == 0) request.lora_config = fake_adapter(static_cast<std::uint64_t>(i + 1));
    requests.push_back(std::move(request));
  }
  BOOST_TEST(check_steady_steps(std::move(requests), 1 + 2 + 3 + 4) == 0);
}

BOOST_AUTO_TEST_CASE(a_steady_step_with_drafts_allocates_nothing) {
  std::vector<float> few(101, -100.0F);  // few tokens to choose from, so that n-grams repeat
  few[1] = few[2] = 0.0F;
  std::vector<Request> requests;
  for (TokenId i = 0; i < 3; ++i) {
    auto request = make_request({i, 1, 2}, 124);
    request.embedding_bias = bias_of(few);
    request.lookahead_config = LookaheadDecodingConfig{4, 3, 4};
    request.output_config.return_log_probs = true;
    request.output_config.top_log_probs = 2;
    if (i == 1) request.sampling_config.frequency_penalty = 0.01;
    if (i == 2) request.lora_config = fake_adapter(1);
    requests.push_back(std::move(request));
  }
  BOOST_TEST(check_steady_steps(std::move(requests), 3) > 10);
}

BOOST_AUTO_TEST_CASE(a_steady_step_with_a_draft_engine_allocates_nothing) {
  // With sampled tokens some drafts are right; with an adapter, few.
  std::vector<Request> requests;
  for (TokenId i = 0; i < 3; ++i) {
    auto request = make_request({i, 1, 2}, 124);
    request.sampling_config.top_k = 2;
    request.sampling_config.seed = static_cast<std::uint64_t>(i);
    if (i == 2) request.lora_config = fake_adapter(1);
    requests.push_back(std::move(request));
  }
  BOOST_TEST(check_steady_steps(std::move(requests), 3, std::make_shared<FakeEngine>()) > 10);
}

BOOST_AUTO_TEST_CASE(a_steady_step_of_beams_allocates_nothing) {
  std::vector<Request> requests;
  for (TokenId i = 0; i < 4; ++i) {
    auto request = make_request({i, 2, 3}, kTokens);
    request.sampling_config.beam_width = i + 1;
    request.sampling_config.early_stopping = 2;
    request.sampling_config.length_penalty = 5.0;
    request.sampling_config.presence_penalty = 0.5;
    request.sampling_config.no_repeat_ngram_size = 2;
    request.output_config.return_log_probs = i % 2 == 0;
    request.output_config.top_log_probs = i;
    request.end_id = 17;
    if (i % 2 == 0) request.lora_config = fake_adapter(static_cast<std::uint64_t>(i + 1));
    requests.push_back(std::move(request));
  }
  check_steady_steps(std::move(requests), 1 + 2 + 3 + 4);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::test::allocations_test
