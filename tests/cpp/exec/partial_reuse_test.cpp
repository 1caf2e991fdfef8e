// Partial reuse of KV blocks: their first tokens are copied instead of computed.

#include <boost/test/unit_test.hpp>
#include <memory>
#include <vector>

#include "adaptrt/exec/executor.h"
#include "fake_engine.h"

namespace adaptrt::test::partial_reuse_test {
namespace {

std::vector<TokenId> counting(TokenId count, TokenId first) {
  std::vector<TokenId> tokens;
  for (TokenId i = 0; i < count; ++i) tokens.push_back(first + i);
  return tokens;
}

/// An executor and its engine, whose blocks hold 4 tokens.
struct Served {
  explicit Served(bool enable = true, bool copy = true) {
    ExecutorConfig config;
    config.kv_cache_config.enable_partial_reuse = enable;
    config.kv_cache_config.copy_on_partial_reuse = copy;
    executor = std::make_unique<Executor>(engine, config, kAvailableMemory, check_every_step);
  }
  /// Returns the number of tokens that the request reused.
  std::int64_t reused_by(const Request& request, std::uint64_t task_id = 0) {
    const auto result = collect_result(*executor, executor->enqueue_request(request));
    BOOST_TEST(result.output_token_ids.at(0) ==
                   expected_tokens(request.input_token_ids, request.max_tokens, task_id),
               boost::test_tools::per_element());
    const auto before = stats.reused_tokens;
    stats = executor->get_latest_iteration_stats().back().kv_cache_stats.value();
    return stats.reused_tokens - before;
  }

  std::shared_ptr<FakeEngine> engine = std::make_shared<FakeEngine>();
  std::unique_ptr<Executor> executor;
  KvCacheStats stats;
};

std::vector<TokenId> prompt_like(TokenId num_common) {
  auto prompt = counting(num_common, 1);
  for (TokenId i = 0; i < 5; ++i) prompt.push_back(90 + i);
  return prompt;
}

BOOST_AUTO_TEST_SUITE(executor_partial_reuse)

BOOST_AUTO_TEST_CASE(the_beginning_of_a_block_is_copied) {
  Served served;
  BOOST_TEST(served.reused_by(make_request(counting(16, 1), 2)) == 0);
  BOOST_TEST(served.reused_by(make_request(prompt_like(10), 3)) == 10);
  BOOST_TEST(served.engine->num_copies() == 1);
  BOOST_TEST(served.reused_by(make_request(prompt_like(3), 3)) == 3);
  BOOST_TEST(served.reused_by(make_request(counting(16, 1), 2)) == 15);
  BOOST_TEST(served.reused_by(make_request(prompt_like(8), 3)) == 8);
  BOOST_TEST(served.engine->num_copies() == 3);
  BOOST_TEST(served.stats.partially_reused_blocks == 3);
}

BOOST_AUTO_TEST_CASE(not_under_another_adapter) {
  Served served;
  auto request = make_request(counting(16, 1), 2);
  BOOST_TEST(served.reused_by(request) == 0);
  request = make_request(prompt_like(10), 2);
  request.lora_config = fake_adapter(4);
  BOOST_TEST(served.reused_by(request, 4) == 0);
  request = make_request(prompt_like(11), 2);
  request.lora_config = task_alone(4);
  BOOST_TEST(served.reused_by(request, 4) == 10);
}

BOOST_AUTO_TEST_CASE(or_the_block_is_taken_over) {
  Served served(true, false);
  BOOST_TEST(served.reused_by(make_request(counting(12, 1), 1)) == 0);
  BOOST_TEST(served.reused_by(make_request(prompt_like(10), 1)) == 10);
  BOOST_TEST(served.reused_by(make_request(counting(12, 1), 1)) == 10);  // from the block that took it over
  BOOST_TEST(served.reused_by(make_request(prompt_like(2), 1)) == 0);    // blocks after it are cached
  BOOST_TEST(served.engine->num_copies() == 0);
}

BOOST_AUTO_TEST_CASE(full_blocks_alone_are_shared_without_it) {
  Served served(false);
  BOOST_TEST(served.reused_by(make_request(counting(16, 1), 2)) == 0);
  BOOST_TEST(served.reused_by(make_request(prompt_like(10), 3)) == 8);
  BOOST_TEST(served.engine->num_copies() == 0);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::test::partial_reuse_test
