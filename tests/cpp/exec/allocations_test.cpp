// The step loop's memory: once a batch runs, its steps allocate nothing.

#include "support/allocations.h"

#include <boost/test/unit_test.hpp>

#include "adaptrt/exec/executor.h"
#include "fake_engine.h"
#include "fake_grammar.h"

namespace adaptrt::test {
namespace {

BOOST_AUTO_TEST_SUITE(allocations)

BOOST_AUTO_TEST_CASE(a_steady_step_allocates_nothing) {
  constexpr std::int32_t kRequests = 16;
  constexpr std::int32_t kTokens = 90;
  FakeEngine::Options options;
  options.max_batch_size = kRequests;
  options.max_num_tokens = 256;
  std::vector<std::int64_t> of_steps;  // allocations from one plan to the next
  of_steps.reserve(1000);
  std::int64_t before = 0;
  const auto count = [&](const StepPlan* plan, const Scheduler& scheduler, const BlockPool&,
                         const LoraCache*) {
    if (plan == nullptr) return;
    const bool is_steady = plan->num_generation_sequences == kRequests && scheduler.waiting().empty();
    if (is_steady && before >= 0) of_steps.push_back(testing::allocations_of_this_thread() - before);
    before = is_steady ? testing::allocations_of_this_thread() : -1;
  };
  before = -1;
  Executor executor(std::make_shared<FakeEngine>(options), {}, kAvailableMemory, count);
  executor.set_grammar_compiler(std::make_shared<FakeCompiler>());
  std::vector<Request> requests;
  for (TokenId i = 0; i < kRequests; ++i) {
    auto request = make_request({i, 2, 3}, kTokens);
    request.output_config.return_log_probs = i % 3 == 1;
    request.output_config.top_log_probs = i % 3;
    request.output_config.return_prompt_log_probs = i % 5 == 1;
    if (i % 4 == 3) request = guided(std::move(request), "99");
    if (i % 2 == 0) {
      const auto task_id = static_cast<std::uint64_t>(i + 1);
      executor.put_adapter(fake_adapter(task_id));
      executor.pin_adapter(task_id);
      request.lora_config = task_alone(task_id);
    }
    requests.push_back(std::move(request));
  }
  for (const RequestId id : executor.enqueue_requests(requests)) static_cast<void>(collect(executor, id));
  BOOST_TEST_REQUIRE(of_steps.size() > 50U);
  BOOST_TEST(of_steps == std::vector<std::int64_t>(of_steps.size(), 0), boost::test_tools::per_element());
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::test
