// Executors whose KV cache has a second level.

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/exec/executor.h"
#include "adaptrt/kv_file/kv_file.h"
#include "fake_engine.h"
#include "support/temporary_directory.h"

namespace adaptrt::test::second_level_test {
namespace {

constexpr std::chrono::nanoseconds kNow{0};

std::vector<TokenId> counting(TokenId count, TokenId first) {
  std::vector<TokenId> tokens;
  for (TokenId i = 0; i < count; ++i) tokens.push_back(first + i);
  return tokens;
}

/// Executors that use a directory one after another. Their pools have 6 blocks of 4 tokens.
struct Served {
  Served() {
    config.kv_cache_config.max_tokens = 6 * 4;
    config.kv_cache_config.host_cache_size = std::size_t{1} << 20;
    config.kv_cache_config.host_cache_dir = directory.path().string();
    config.kv_cache_config.event_buffer_max_size = 1000;
    options.kv_identity = "engine";
  }
  void start() {
    executor.reset();
    engine = std::make_shared<FakeEngine>(options);
    executor = std::make_unique<Executor>(engine, config, kAvailableMemory, check_every_step);
    events = executor->get_kv_cache_event_manager();
  }
  /// Returns the number of tokens computed for the request, after checking that its result is the one it gets
  /// alone.
  std::int64_t computed_by(const Request& request, std::uint64_t task_id = 0) {
    const std::int64_t before = engine->num_tokens();
    const auto result = collect_result(*executor, executor->enqueue_request(request));
    BOOST_TEST(result.output_token_ids.at(0) ==
                   expected_tokens(request.input_token_ids, request.max_tokens, task_id),
               boost::test_tools::per_element());
    return engine->num_tokens() - before;
  }
  SecondLevelStats stats() {
    const auto all = executor->get_latest_iteration_stats();
    if (!all.empty()) newest = all.back().kv_cache_stats.value();
    return newest.second_level.value();
  }

  testing::TemporaryDirectory directory;
  ExecutorConfig config;
  FakeEngine::Options options;
  std::shared_ptr<FakeEngine> engine;
  std::unique_ptr<Executor> executor;
  std::shared_ptr<KVCacheEventManager> events;
  KvCacheStats newest;
};

BOOST_AUTO_TEST_SUITE(executor_second_level)

BOOST_AUTO_TEST_CASE(evicted_blocks_are_read_back) {
  Served served;
  served.start();
  BOOST_TEST(served.computed_by(make_request(counting(17, 1), 1)) == 17);
  BOOST_TEST(served.computed_by(make_request(counting(22, 50), 1)) == 22);  // evicts the first
  BOOST_TEST(served.computed_by(make_request(counting(17, 1), 1)) == 1);
  const SecondLevelStats stats = served.stats();
  BOOST_TEST(stats.read_blocks == 4);
  BOOST_TEST(stats.error == "");
  BOOST_TEST(served.newest.reused_blocks == 4);
  BOOST_TEST(served.newest.missed_blocks == 4 + 5);
  BOOST_TEST(served.newest.reused_tokens == 16);
}

BOOST_AUTO_TEST_CASE(blocks_outlive_the_executor_under_their_adapter_and_salt) {
  Served served;
  served.start();
  Request salted = make_request(counting(9, 1), 1);
  salted.cache_salt_id = 3;
  Request adapted = make_request(counting(9, 1), 1);
  adapted.lora_config = fake_adapter(7);
  served.computed_by(salted);
  served.computed_by(adapted, 7);
  served.start();
  adapted.lora_config = fake_adapter(7);
  BOOST_TEST(served.computed_by(make_request(counting(9, 1), 1)) == 9);
  BOOST_TEST(served.computed_by(salted) == 1);
  BOOST_TEST(served.computed_by(adapted, 7) == 1);
  served.start();
  Request other_weights = make_request(counting(9, 1), 1);
  other_weights.lora_config = fake_adapter(7, 4, 2.0F);
  BOOST_TEST(served.computed_by(other_weights, 7) == 9);
}

/// Returns the statistics of the file of snapshots.
SecondLevelStats stats_of_states(Served& served) {
  return served.executor->get_latest_iteration_stats().back().state_stats.value().second_level.value();
}

/// Makes steps, which evict nothing, until so many blocks are written. Later evictions then have all buffers.
void await_written_blocks(Served& served, std::int64_t num_blocks) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  do {
    BOOST_TEST_REQUIRE((std::chrono::steady_clock::now() < deadline));
    served.computed_by(make_request(counting(1, 1), 1));
  } while (served.stats().written_blocks < num_blocks);
}

BOOST_AUTO_TEST_CASE(states_are_read_back_with_their_blocks) {
  Served served;
  served.options.has_states = true;
  served.start();
  BOOST_TEST(served.computed_by(make_request(counting(17, 1), 1)) == 17);
  BOOST_TEST(served.computed_by(make_request(counting(22, 50), 1)) == 22);  // evicts the first
  await_written_blocks(served, 4);
  BOOST_TEST(served.computed_by(make_request(counting(17, 1), 1)) == 1);
  const SecondLevelStats stats = stats_of_states(served);
  BOOST_TEST(stats.read_blocks == 1);
  BOOST_TEST(stats.max_num_blocks == ((1 << 19) - 4096) / 4096);
  served.start();
  BOOST_TEST(served.computed_by(make_request(counting(17, 1), 1)) == 1);
  BOOST_TEST(served.computed_by(make_request(counting(22, 50), 1)) == 2);
  served.executor.reset();
  {
    // States in the first slot.
    std::fstream file(served.directory.path() / KvFile::kStatesName,
                      std::ios::in | std::ios::out | std::ios::binary);
    for (const int slot : {1, 2}) {
      file.seekp(4096 * slot + 130);
      file.put('\x55');
    }
  }
  served.start();
  BOOST_TEST(served.computed_by(make_request(counting(17, 1), 1)) == 17);
  BOOST_TEST(stats_of_states(served).failed_blocks >= 1);
}

BOOST_AUTO_TEST_CASE(states_need_snapshots_and_room) {
  const auto check_refused = [](const auto& change, const std::string& words) {
    Served served;
    served.options.has_states = true;
    change(served.config.kv_cache_config);
    BOOST_CHECK_EXCEPTION(served.start(), ConfigError, [&](const ConfigError& error) {
      BOOST_TEST_INFO(error.what());
      return std::string(error.what()).find(words) != std::string::npos;
    });
  };
  check_refused([](KvCacheConfig& config) { config.max_state_snapshots = 0; },
                "host_cache_size is given and max_state_snapshots is 0; accepted: None, and 1 or more");
  check_refused([](KvCacheConfig& config) { config.host_cache_size = 16383; },
                "host_cache_size is 16383; one KV block and the states of a sequence take 16384 bytes");
}

BOOST_AUTO_TEST_CASE(another_engine_finds_nothing) {
  Served served;
  served.start();
  served.computed_by(make_request(counting(9, 1), 1));
  served.options.kv_identity = "another";
  served.start();
  BOOST_TEST(served.computed_by(make_request(counting(9, 1), 1)) == 9);
}

BOOST_AUTO_TEST_CASE(prompts_that_may_not_share_do_not) {
  Served served;
  served.start();
  Request whole = make_request(counting(9, 1), 1);
  served.computed_by(whole);
  served.start();
  whole.output_config.return_context_logits = true;
  BOOST_TEST(served.computed_by(whole) == 9);
}

BOOST_AUTO_TEST_CASE(blocks_of_a_low_priority_stay_where_they_are) {
  Served served;
  served.config.kv_cache_config.secondary_offload_min_priority = 30;
  served.start();
  Request request = make_request(counting(9, 1), 1);
  request.kv_cache_retention_config = KvCacheRetentionConfig{
      .token_range_retention_configs = {{.token_start = 4, .token_end = 8, .priority = 10}}};
  served.computed_by(request);
  served.start();
  BOOST_TEST(served.computed_by(make_request(counting(9, 1), 1)) == 5);
}

BOOST_AUTO_TEST_CASE(damaged_blocks_are_computed_again) {
  Served served;
  served.start();
  served.computed_by(make_request(counting(17, 1), 1));
  served.executor.reset();
  const auto path = served.directory.path() / KvFile::kName;
  {
    // KV in the second slot; the first slot has the prompt's first block.
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(4096 + 4096 + 130);
    file.put('\x55');
  }
  served.start();
  BOOST_TEST(served.computed_by(make_request(counting(17, 1), 1)) == 13);
  BOOST_TEST(served.stats().failed_blocks == 1);
  served.start();
  BOOST_TEST(served.computed_by(make_request(counting(17, 1), 1)) == 1);
}

BOOST_AUTO_TEST_CASE(a_directory_has_one_executor_until_it_is_shut_down) {
  Served served;
  served.start();
  BOOST_CHECK_THROW(Executor(std::make_shared<FakeEngine>(served.options), served.config, kAvailableMemory),
                    ConfigError);
  BOOST_TEST(served.computed_by(make_request(counting(9, 1), 1)) == 9);
  served.executor->shutdown();
  const Executor second(std::make_shared<FakeEngine>(served.options), served.config, kAvailableMemory);
}

BOOST_AUTO_TEST_CASE(engines_whose_blocks_cannot_be_read_have_none) {
  Served served;
  served.options.kv_identity = "";
  try {
    served.start();
    BOOST_ERROR("it was accepted");
  } catch (const ConfigError& error) {
    BOOST_TEST(std::string(error.what()).find("kv_cache_config.host_cache_size is 1048576") !=
               std::string::npos);
  }
}

BOOST_AUTO_TEST_CASE(without_one_there_are_no_statistics_of_it) {
  const auto executor = make_executor();
  static_cast<void>(collect_result(*executor, executor->enqueue_request(make_request(counting(9, 1), 1))));
  BOOST_TEST(!executor->get_latest_iteration_stats().back().kv_cache_stats->second_level.has_value());
}

BOOST_AUTO_TEST_CASE(events_tell_of_levels) {
  Served served;
  served.start();
  const auto created =
      std::get<KVCacheCreatedData>(served.events->get_latest_events(std::nullopt).at(0).data);
  BOOST_TEST(created.num_blocks_per_cache_level.at(0) == 6);
  BOOST_TEST(created.num_blocks_per_cache_level.at(1) == ((1 << 20) - 4096) / 4096);
  served.computed_by(make_request(counting(17, 1), 1));
  const auto stored = std::get<KVCacheStoredData>(served.events->get_latest_events(kNow).at(0).data);
  BOOST_TEST_REQUIRE(stored.blocks.size() == 4U);

  const auto levels_of = [&](std::int32_t from, std::int32_t to) {
    std::vector<std::uint64_t> hashes;
    for (const KVCacheEvent& event : served.events->get_latest_events(kNow)) {
      if (const auto* updated = std::get_if<KVCacheUpdatedData>(&event.data)) {
        BOOST_TEST((updated->cache_level == KVCacheEventDiffInt{from, to}));
        hashes.push_back(updated->block_hash);
      }
      BOOST_TEST(!std::holds_alternative<KVCacheRemovedData>(event.data));
    }
    return hashes;
  };
  std::vector<std::uint64_t> all;
  for (const auto& block : stored.blocks) all.push_back(block.block_hash);
  const std::vector<std::uint64_t> backwards(all.rbegin(), all.rend());
  served.computed_by(make_request(counting(22, 50), 1));
  BOOST_TEST(levels_of(0, 1) == backwards, boost::test_tools::per_element());
  served.executor->shutdown();
}

BOOST_AUTO_TEST_CASE(a_block_that_comes_back_is_told_of) {
  Served served;
  served.start();
  served.computed_by(make_request(counting(9, 1), 1));
  served.computed_by(make_request(counting(24, 50), 1));
  static_cast<void>(served.events->get_latest_events(kNow));
  served.computed_by(make_request(counting(9, 1), 1));
  std::int64_t num_back = 0;
  for (const KVCacheEvent& event : served.events->get_latest_events(kNow)) {
    const auto* updated = std::get_if<KVCacheUpdatedData>(&event.data);
    if (updated != nullptr && updated->cache_level == KVCacheEventDiffInt{1, 0}) ++num_back;
  }
  BOOST_TEST(num_back == 2);
}

/// Small pools, preemptions, forks, partial copies, and small files that are damaged between executors: every
/// answer must be the one that the request gets alone.
BOOST_AUTO_TEST_CASE(crowds_get_what_they_get_alone) {
  std::mt19937 random(5);
  const auto below = [&](int end) {
    return static_cast<std::int32_t>(random() % static_cast<unsigned>(end));
  };
  for (int round = 0; round < 12; ++round) {
    Served served;
    served.options.has_states = round % 2 == 1;
    served.config.kv_cache_config.max_tokens = (8 + below(8)) * 4;
    served.config.kv_cache_config.host_cache_size =
        std::size_t{4096} * (4 + static_cast<std::size_t>(below(30)));
    if (served.options.has_states) served.config.kv_cache_config.max_state_snapshots = 1 + below(6);
    served.config.kv_cache_config.copy_on_partial_reuse = below(3) > 0;
    served.config.enable_chunked_context = true;
    served.config.max_num_tokens = 8 + below(40);
    served.config.scheduler_config.capacity_scheduler_policy =
        below(2) == 0 ? CapacitySchedulerPolicy::kMaxUtilization
                      : CapacitySchedulerPolicy::kGuaranteedNoEvict;
    for (int life = 0; life < 3; ++life) {
      served.start();
      struct Asked {
        Request request;
        std::uint64_t task_id;
        RequestId id;
      };
      std::vector<Asked> all;
      for (int i = 0; i < 24; ++i) {
        // A few prompts that diverge at some position.
        auto prompt = counting(1 + below(20), 1 + 20 * below(2));
        for (TokenId token = below(4); token > 0; --token) prompt.push_back(80 + below(3));
        Asked asked{.request = make_request(std::move(prompt), 1 + below(8)),
                    .task_id = below(2) == 0 ? 0U : 7U,
                    .id = 0};
        if (asked.task_id != 0) asked.request.lora_config = fake_adapter(asked.task_id);
        if (below(4) == 0) asked.request.cache_salt_id = 1;
        asked.id = served.executor->enqueue_request(asked.request);
        all.push_back(std::move(asked));
      }
      for (const Asked& asked : all) {
        const auto result = collect_result(*served.executor, asked.id);
        BOOST_TEST(result.output_token_ids.at(0) == expected_tokens(asked.request.input_token_ids,
                                                                    asked.request.max_tokens, asked.task_id),
                   boost::test_tools::per_element());
      }
      BOOST_TEST(served.stats().error == "");
      served.executor.reset();
      if (below(2) == 0) {
        const bool damages_states = served.options.has_states && below(2) == 0;
        std::fstream file(served.directory.path() / (damages_states ? KvFile::kStatesName : KvFile::kName),
                          std::ios::in | std::ios::out | std::ios::binary);
        for (int i = 0; i < 4; ++i) {
          file.seekp(4096 + 4096 * below(8) + below(200));
          file.put(static_cast<char>(below(256)));
        }
      }
    }
  }
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::test::second_level_test
