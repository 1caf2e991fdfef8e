// KV cache events from an executor.

#include "adaptrt/kv/kv_cache_events.h"

#include <boost/test/unit_test.hpp>
#include <chrono>
#include <memory>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/exec/executor.h"
#include "fake_engine.h"

namespace adaptrt::test::kv_cache_events_test {
namespace {

constexpr std::chrono::nanoseconds kNow{0};

ExecutorConfig with_events(std::size_t max_size = 100) {
  ExecutorConfig config;
  config.kv_cache_config.event_buffer_max_size = max_size;
  return config;
}

std::vector<TokenId> counting(TokenId count, TokenId first) {
  std::vector<TokenId> tokens;
  for (TokenId i = 0; i < count; ++i) tokens.push_back(first + i);
  return tokens;
}

BOOST_AUTO_TEST_SUITE(executor_kv_cache_events)

BOOST_AUTO_TEST_CASE(there_are_none_without_a_buffer) {
  const auto executor = make_executor();
  BOOST_TEST(executor->get_kv_cache_event_manager() == nullptr);
}

BOOST_AUTO_TEST_CASE(a_buffer_without_reuse_tells_the_size_alone) {
  ExecutorConfig config = with_events();
  config.kv_cache_config.enable_block_reuse = false;
  const auto executor = make_executor(config);
  static_cast<void>(collect_result(*executor, executor->enqueue_request(make_request(counting(20, 1), 5))));
  const auto events = executor->get_kv_cache_event_manager()->get_latest_events(kNow);
  BOOST_TEST_REQUIRE(events.size() == 1U);
  BOOST_TEST(std::holds_alternative<KVCacheCreatedData>(events[0].data));
}

BOOST_AUTO_TEST_CASE(the_events_of_a_request_are_there_before_its_last_response) {
  const auto executor = make_executor(with_events());
  const auto manager = executor->get_kv_cache_event_manager();
  const auto created = manager->get_latest_events(std::nullopt);
  BOOST_TEST_REQUIRE(created.size() == 1U);
  BOOST_TEST(created[0].window_size == 128);

  auto request = make_request(counting(9, 1), 4);
  request.lora_config = fake_adapter(7);
  request.cache_salt_id = 5;
  request.kv_cache_retention_config = KvCacheRetentionConfig{
      .token_range_retention_configs = {{.token_start = 0, .token_end = 4, .priority = 90}},
      .decode_retention_priority = 10};
  static_cast<void>(collect_result(*executor, executor->enqueue_request(request)));
  const auto events = manager->get_latest_events(kNow);
  // The prompt's two blocks, and the block that three generated tokens complete.
  BOOST_TEST_REQUIRE(events.size() == 2U);
  const auto& prompt = std::get<KVCacheStoredData>(events[0].data);
  const auto& output = std::get<KVCacheStoredData>(events[1].data);
  BOOST_TEST_REQUIRE(prompt.blocks.size() == 2U);
  BOOST_TEST_REQUIRE(output.blocks.size() == 1U);
  BOOST_TEST(!prompt.parent_hash.has_value());
  BOOST_TEST(output.parent_hash.value() == prompt.blocks[1].block_hash);
  BOOST_TEST(prompt.blocks[0].lora_id.value() == 7U);
  BOOST_TEST(prompt.blocks[0].cache_salt_id.value() == 5U);
  BOOST_TEST(prompt.blocks[0].priority == 90);
  BOOST_TEST(prompt.blocks[1].priority == kDefaultRetentionPriority);
  BOOST_TEST(output.blocks[0].priority == kDefaultRetentionPriority);  // its first token belongs to the
                                                                       // prompt
  BOOST_TEST(output.blocks[0].tokens[0].token_id == 9);
}

BOOST_AUTO_TEST_CASE(evicted_blocks_are_removed) {
  ExecutorConfig config = with_events();
  config.kv_cache_config.max_tokens = 6 * 4;
  const auto executor = make_executor(config);
  const auto manager = executor->get_kv_cache_event_manager();
  static_cast<void>(collect_result(*executor, executor->enqueue_request(make_request(counting(16, 1), 1))));
  const auto before = manager->get_latest_events(kNow);
  const auto stored = std::get<KVCacheStoredData>(before.back().data);
  BOOST_TEST_REQUIRE(stored.blocks.size() == 4U);
  static_cast<void>(collect_result(*executor, executor->enqueue_request(make_request(counting(16, 50), 1))));
  const auto events = manager->get_latest_events(kNow);
  BOOST_TEST_REQUIRE(events.size() == 2U);
  const auto& removed = std::get<KVCacheRemovedData>(events[0].data);
  BOOST_TEST(removed.block_hashes ==
                 std::vector<std::uint64_t>({stored.blocks[3].block_hash, stored.blocks[2].block_hash}),
             boost::test_tools::per_element());
  BOOST_TEST(std::holds_alternative<KVCacheStoredData>(events[1].data));
}

BOOST_AUTO_TEST_CASE(a_full_buffer_drops_its_oldest) {
  const auto executor = make_executor(with_events(2));
  for (TokenId first = 0; first < 5; ++first) {
    static_cast<void>(
        collect_result(*executor, executor->enqueue_request(make_request(counting(5, first * 10), 1))));
  }
  const auto events = executor->get_kv_cache_event_manager()->get_latest_events(kNow);
  BOOST_TEST_REQUIRE(events.size() == 2U);
  BOOST_TEST(events[0].event_id == 4U);
  BOOST_TEST(events[1].event_id == 5U);
}

BOOST_AUTO_TEST_CASE(events_outlive_the_executor) {
  auto executor = make_executor(with_events());
  const auto manager = executor->get_kv_cache_event_manager();
  static_cast<void>(collect_result(*executor, executor->enqueue_request(make_request(counting(5, 1), 1))));
  executor->shutdown();
  BOOST_CHECK_THROW(static_cast<void>(executor->get_kv_cache_event_manager()), ExecutorClosedError);
  executor.reset();
  BOOST_TEST(manager->get_latest_events(std::nullopt).size() == 2U);
  BOOST_TEST(manager->get_latest_events(std::nullopt).empty());
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::test::kv_cache_events_test
