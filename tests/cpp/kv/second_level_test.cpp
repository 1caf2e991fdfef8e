// Tests of BlockPool with a second level.

#include "adaptrt/kv/second_level.h"

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/kv/block_pool.h"
#include "adaptrt/kv/sequence_memory.h"
#include "pools.h"

namespace adaptrt::testing::second_level_test {
namespace {

/// Keeps blocks in memory; a number stands for a block's content.
class MemoryLevel final : public SecondLevel {
 public:
  [[nodiscard]] const Sha256Digest& fingerprint() const override { return fingerprint_; }
  [[nodiscard]] SecondLevelStats stats() const override {
    return {.max_num_blocks = 100, .used_num_blocks = static_cast<std::int64_t>(kept.size())};
  }
  void begin_step() override {}
  bool offload(BlockId block, const KeyedBlock& content, std::optional<std::uint64_t> /*event*/) override {
    offloaded.push_back(block);
    if (refuses) return false;
    kept[content.key] = pool_content.at(block);
    return true;
  }
  void begin_closing(std::int64_t num_blocks) override { num_closing = num_blocks; }
  bool await_room(Time /*deadline*/) override { return room-- > 0; }
  void await_writes(Time /*deadline*/) override {}
  bool contains(const BlockKey& key) override { return kept.contains(key); }
  void begin_reads(std::span<const KeyedBlock> blocks) override {
    wanted.assign(blocks.begin(), blocks.end());
    next = 0;
  }
  bool read_next(BlockId block) override {
    if (next == fails_at) return false;
    pool_content[block] = kept.at(wanted.at(next++).key);
    return true;
  }
  void end_reads() override { wanted.clear(); }
  bool take_back_event(const BlockKey& /*key*/) override { return false; }
  std::optional<std::uint64_t> take_lost_event() override { return std::nullopt; }
  [[nodiscard]] std::vector<std::string> check_invariants() const override {
    return wanted.empty() ? std::vector<std::string>{} : std::vector<std::string>{"reads have not ended"};
  }

  std::map<BlockId, int> pool_content;
  std::map<BlockKey, int> kept;
  std::vector<BlockId> offloaded;
  std::vector<KeyedBlock> wanted;
  std::size_t next = 0;
  std::size_t fails_at = 100;
  std::int64_t num_closing = 0;
  int room = 100;
  bool refuses = false;

 private:
  Sha256Digest fingerprint_{};
};

struct Pool {
  explicit Pool(std::int32_t num_blocks, PartialReuse partial = PartialReuse::kNone)
      : pool(num_blocks, kTokensPerBlock, true, nullptr, partial, {.level = &level}) {}

  /// A sequence that reuses and onboards what it can and computes the rest; block i of `tokens` has the
  /// content first + i.
  BlockTable compute(const std::vector<std::int32_t>& tokens, int first) {
    BlockTable table;
    const std::int32_t reused = pool.reuse_prefix(table, key, tokens);
    num_onboarded = pool.onboard(table, key, tokens, is_still_read);
    for (std::size_t i = 0; i < table.blocks.size(); ++i) {
      BOOST_TEST(level.pool_content.at(table.blocks[i]) == first + static_cast<int>(i));
    }
    num_reused = reused + num_onboarded;
    BOOST_TEST_REQUIRE(pool.try_grow(table, static_cast<std::int32_t>(tokens.size())));
    for (std::size_t i = 0; i < table.blocks.size(); ++i) {
      level.pool_content[table.blocks[i]] = first + static_cast<int>(i);
    }
    pool.index_full_blocks(table, key, tokens, static_cast<std::int32_t>(tokens.size()));
    require_sound(pool);
    return table;
  }
  void compute_and_release(const std::vector<std::int32_t>& tokens, int first) {
    auto table = compute(tokens, first);
    pool.release(table);
    require_sound(pool);
  }

  MemoryLevel level;
  BlockPool pool;
  ReuseKey key;
  std::function<bool(BlockId)> is_still_read = [](BlockId) { return false; };
  std::int32_t num_reused = 0;
  std::int32_t num_onboarded = 0;
};

BOOST_AUTO_TEST_SUITE(block_pool_second_level)

BOOST_AUTO_TEST_CASE(evicted_blocks_are_onboarded) {
  Pool f(5);
  f.compute_and_release(counting(17), 100);
  f.compute_and_release(counting(20, 50), 200);
  BOOST_TEST(f.level.kept.size() == 4U);
  f.compute_and_release(counting(17), 100);
  BOOST_TEST(f.num_onboarded == 16);
  const KvCacheStats stats = f.pool.stats();
  BOOST_TEST(stats.reused_blocks == 4);
  BOOST_TEST(stats.missed_blocks == 8);
  BOOST_TEST(stats.reused_tokens == 16);
  BOOST_TEST(stats.alloc_new_blocks == 5 + 5 + 1);
  BOOST_TEST(stats.second_level->used_num_blocks == 9);
}

BOOST_AUTO_TEST_CASE(sequence_memory_starts_from_the_second_level_too) {
  MemoryLevel level;
  SequenceMemoryPool pool(
      {.num_blocks = 5, .tokens_per_block = kTokensPerBlock, .second_level = {.level = &level}});
  SequenceMemory memory;
  const auto compute = [&](const std::vector<std::int32_t>& tokens) {
    BOOST_TEST_REQUIRE(pool.try_grow(memory, static_cast<std::int32_t>(tokens.size())));
    for (const BlockId block : memory.blocks()) level.pool_content[block] = 1;
    pool.keep(memory, static_cast<std::int32_t>(tokens.size()));
    pool.share(memory, {.tokens = tokens});
    pool.release(memory);
  };
  const auto tokens = counting(17);
  compute(tokens);
  compute(counting(20, 50));  // evicts all of it
  BOOST_TEST(pool.find_prefix({.tokens = tokens}).num_tokens == 0);
  const auto none_is_read = [](BlockId) { return false; };
  const auto all_are_read = [](BlockId) { return true; };
  static_cast<void>(pool.reuse_prefix(memory, {.tokens = tokens}, all_are_read));
  BOOST_TEST(memory.num_computed == 0);
  static_cast<void>(pool.reuse_prefix(memory, {.tokens = tokens}, none_is_read));
  BOOST_TEST(memory.num_computed == 16);
  BOOST_TEST(pool.check_invariants(memory).empty());
  pool.release(memory);
}

BOOST_AUTO_TEST_CASE(one_token_is_left_to_compute) {
  Pool f(5);
  f.compute_and_release(counting(16), 100);
  f.compute_and_release(counting(20, 50), 200);
  f.compute_and_release(counting(16), 100);
  BOOST_TEST(f.num_onboarded == 12);
}

BOOST_AUTO_TEST_CASE(blocks_before_an_adapter_acts_are_onboarded_for_all) {
  Pool f(5);
  f.key = {.adapter_generation = 5, .adapter_from = 10};
  f.compute_and_release(counting(17), 100);
  f.compute_and_release(counting(20, 50), 200);  // evicts all of it
  f.compute_and_release(counting(17), 100);
  BOOST_TEST(f.num_onboarded == 16);
  f.compute_and_release(counting(20, 50), 200);
  f.key = {};
  f.compute_and_release(counting(17), 100);
  BOOST_TEST(f.num_onboarded == 8);
  f.compute_and_release(counting(20, 50), 200);
  f.key = {.adapter_generation = 5, .adapter_from = 11};
  f.compute_and_release(counting(17), 100);
  BOOST_TEST(f.num_onboarded == 8);
}

BOOST_AUTO_TEST_CASE(blocks_before_a_prompt_embedding_are_onboarded_for_all) {
  Pool f(5);
  const auto digest = [](std::uint64_t value) { return Sha256().add_integer(value).finish(); };
  const PrefixDigests first = {{.position = 9, .digest = digest(1)}};
  const PrefixDigests second = {{.position = 9, .digest = digest(2)}};
  const auto onboarded = [&](const PrefixDigests* given) {
    f.key = {};
    f.compute_and_release(counting(20, 50), 200);  // evicts all of it
    f.key = {.given = given};
    f.compute_and_release(counting(17), 100);
    return f.num_onboarded;
  };
  f.key = {.given = &first};
  f.compute_and_release(counting(17), 100);
  BOOST_TEST(onboarded(&first) == 16);
  BOOST_TEST(onboarded(&second) == 8);
  BOOST_TEST(onboarded(&second) == 16);
  BOOST_TEST(onboarded(nullptr) == 8);
}

BOOST_AUTO_TEST_CASE(blocks_in_the_pool_come_first) {
  Pool f(6);
  f.compute_and_release(counting(17), 100);
  f.compute_and_release(counting(12, 50), 200);  // evicts the end
  f.compute_and_release(counting(17), 100);
  BOOST_TEST(f.num_reused == 16);
  BOOST_TEST(f.num_onboarded > 0);
  BOOST_TEST(f.num_onboarded < 16);
}

BOOST_AUTO_TEST_CASE(keys_differ_by_adapter_salt_and_engine) {
  const auto tokens = counting(4);
  std::set<BlockKey> keys;
  const Sha256Digest engine = Sha256().add("a").finish();
  keys.insert(block_key(root_key(engine, {}), tokens));
  keys.insert(block_key(root_key(Sha256().add("b").finish(), {}), tokens));
  keys.insert(block_key(root_key(engine, {.cache_salt = 0}), tokens));
  keys.insert(block_key(root_key(engine, {.cache_salt = 1}), tokens));
  keys.insert(block_key(root_key(engine, {.adapter_generation = 1}), tokens));
  keys.insert(block_key(root_key(engine, {.adapter_generation = 1, .adapter_digest = engine}), tokens));
  keys.insert(block_key(root_key(engine, {}), counting(4, 1)));
  keys.insert(block_key(block_key(root_key(engine, {}), tokens), tokens));
  BOOST_TEST(keys.size() == 8U);
  // Generations are only unique in one process.
  BOOST_TEST((root_key(engine, {.adapter_generation = 1, .task_id = 5}) ==
              root_key(engine, {.adapter_generation = 2, .task_id = 6})));
}

BOOST_AUTO_TEST_CASE(a_read_that_fails_ends_the_chain) {
  Pool f(5);
  f.compute_and_release(counting(17), 100);
  f.compute_and_release(counting(20, 50), 200);
  f.level.fails_at = 2;
  f.compute_and_release(counting(17), 100);
  BOOST_TEST(f.num_onboarded == 8);
  f.level.fails_at = 0;
  f.compute_and_release(counting(20, 50), 200);
  BOOST_TEST(f.num_onboarded == 0);
}

BOOST_AUTO_TEST_CASE(used_blocks_are_not_taken) {
  Pool f(5);
  f.compute_and_release(counting(17), 100);
  auto running = f.compute(counting(16, 50), 200);
  BlockTable table;
  BOOST_TEST(f.pool.reuse_prefix(table, f.key, counting(17)) == 4);
  BOOST_TEST(f.pool.num_available() == 0);
  BOOST_TEST(f.pool.onboard(table, f.key, counting(17), f.is_still_read) == 0);
  require_sound(f.pool);
  f.pool.release(running);
  BOOST_TEST(f.pool.onboard(table, f.key, counting(17), f.is_still_read) == 12);
  require_sound(f.pool);
  f.pool.release(table);
}

BOOST_AUTO_TEST_CASE(blocks_that_a_copy_reads_are_not_written) {
  Pool f(5);
  f.compute_and_release(counting(17), 100);
  f.compute_and_release(counting(20, 50), 200);
  BlockId first = kNoBlock;
  f.is_still_read = [&](BlockId block) {
    if (first == kNoBlock) first = block;
    return block != first;
  };
  f.compute_and_release(counting(17), 100);
  BOOST_TEST(f.num_onboarded == 4);
}

BOOST_AUTO_TEST_CASE(blocks_of_low_priority_are_lost) {
  MemoryLevel level;
  for (BlockId block = 0; block < 4; ++block) level.pool_content[block] = block;
  BlockPool pool(4, kTokensPerBlock, true, nullptr, PartialReuse::kNone,
                 {.level = &level, .min_priority = 40});
  BlockTable table;
  pool.reuse_prefix(table, {}, counting(12));
  BOOST_TEST(pool.try_grow(table, 12));
  pool.index_full_blocks(table, {}, counting(12), 12);
  pool.set_retention(table, 0, {.priority = 40});
  pool.release(table);
  BOOST_TEST(pool.try_grow(table, 16));
  BOOST_TEST(level.offloaded == std::vector<BlockId>{0}, boost::test_tools::per_element());
  pool.release(table);
}

BOOST_AUTO_TEST_CASE(a_block_that_is_taken_over_is_offloaded) {
  Pool f(5, PartialReuse::kTakeOver);
  f.compute_and_release(counting(8), 100);
  BlockTable table;
  const std::vector<std::int32_t> tokens{0, 1, 2, 3, 4, 5, 90, 91};
  BOOST_TEST(f.pool.reuse_prefix(table, f.key, tokens) == 4);
  BlockCopy copy;
  BOOST_TEST(f.pool.reuse_beginning(table, f.key, tokens, copy) == 2);
  BOOST_TEST(f.level.kept.size() == 1U);
  f.pool.release(table);
  require_sound(f.pool);
}

BOOST_AUTO_TEST_CASE(everything_is_offloaded_at_the_end_the_most_wanted_first) {
  Pool f(9);
  auto running = f.compute(counting(8), 100);
  f.compute_and_release(counting(8, 30), 200);
  f.compute_and_release(counting(9, 60), 300);
  f.pool.offload_all(SecondLevel::Time::max());
  BOOST_TEST(f.level.num_closing == 6);
  std::vector<int> contents;
  for (const BlockId block : f.level.offloaded) contents.push_back(f.level.pool_content.at(block));
  BOOST_TEST(contents == std::vector<int>({100, 101, 300, 301, 200, 201}), boost::test_tools::per_element());
  f.level.offloaded.clear();
  f.level.room = 2;
  f.pool.offload_all(SecondLevel::Time::max());
  BOOST_TEST(f.level.offloaded.size() == 2U);
  f.pool.release(running);
}

BOOST_AUTO_TEST_CASE(a_level_that_refuses_changes_nothing_else) {
  Pool f(5);
  f.level.refuses = true;
  f.compute_and_release(counting(17), 100);
  f.compute_and_release(counting(20, 50), 200);
  f.compute_and_release(counting(17), 100);
  BOOST_TEST(f.num_reused == 0);
  BOOST_TEST(f.pool.num_available() == 5);
}

/// Sequences with states, which are the sums of their tokens, and levels for blocks and snapshots. Each test
/// computes prompts of four blocks and a token.
struct StatesFixture {
  explicit StatesFixture(std::int32_t num_blocks = 6, std::int32_t num_snapshots = 2)
      : pool({.num_blocks = num_blocks,
              .tokens_per_block = kTokensPerBlock,
              .second_level = {.level = &level, .states = &states},
              .num_state_slots = 2,
              .num_state_snapshots = num_snapshots}) {}

  /// Computes a prompt in steps that end where snapshots are wanted. Returns the number of reused tokens.
  std::int32_t compute(const std::vector<std::int32_t>& tokens, bool can_read = true) {
    SequenceMemory memory;
    const SequenceContent content{.tokens = tokens,
                                  .prompt_length = static_cast<std::int32_t>(tokens.size())};
    static_cast<void>(pool.reuse_prefix(memory, content, [&](BlockId) { return !can_read; }));
    const std::int32_t num_reused = memory.num_computed;
    while (memory.num_computed < content.prompt_length) {
      const std::int32_t first = memory.num_computed;
      const std::int32_t count =
          std::min(content.prompt_length - first, pool.tokens_to_snapshot(memory, content));
      BOOST_TEST_REQUIRE(pool.try_grow(memory, first + count));
      for (const StateCopy& copy : pool.state_copies()) {
        states.pool_content[copy.to] = states.pool_content[copy.from];
      }
      int& state = states.pool_content[memory.states.slot];
      const auto sum = [&](std::int32_t end) {
        return std::accumulate(tokens.begin(), tokens.begin() + end, 1000);
      };
      if (first > 0) BOOST_TEST(state == sum(first));
      state = sum(first + count);
      for (const BlockId block : memory.blocks()) level.pool_content[block] = 1;
      pool.commit_state_copies();
      pool.keep(memory, first + count);
      pool.share(memory, content);
      const SequenceMemory* held = &memory;
      for (const auto& violation : pool.check_invariants(std::span(&held, 1))) BOOST_ERROR(violation);
    }
    pool.release(memory);
    return num_reused;
  }

  MemoryLevel level;
  MemoryLevel states;
  SequenceMemoryPool pool;
};

BOOST_AUTO_TEST_CASE(snapshots_follow_their_blocks) {
  StatesFixture f;
  BOOST_TEST(f.compute(counting(17)) == 0);
  BOOST_TEST(f.states.kept.empty());
  BOOST_TEST(f.compute(counting(22, 50)) == 0);  // evicts the end of the first one, with its snapshot
  BOOST_TEST(f.states.kept.size() == 1U);
  BOOST_TEST(f.compute(counting(17)) == 16);
  BOOST_TEST(f.compute(counting(22, 50)) == 20);
  BOOST_TEST(f.pool.state_pool()->stats().reused_snapshots == 2);
}

BOOST_AUTO_TEST_CASE(blocks_in_the_pool_are_used_with_a_snapshot_from_the_level) {
  StatesFixture f(20, 1);
  f.compute(counting(17));
  f.compute(counting(9, 50));  // replaces the snapshot
  BOOST_TEST(f.level.kept.empty());
  BOOST_TEST(f.states.kept.size() == 1U);
  BOOST_TEST(f.compute(counting(17)) == 16);
  BOOST_TEST(f.level.kept.empty());
}

BOOST_AUTO_TEST_CASE(a_later_snapshot_in_the_level_takes_the_place_of_one_in_the_pool) {
  StatesFixture f(20, 2);
  f.compute(counting(17));
  f.compute(counting(9));  // a snapshot after two of the blocks
  f.compute(counting(9, 50));
  BOOST_TEST(f.states.kept.size() == 1U);  // the oldest, after four blocks
  const auto reused = f.pool.state_pool()->stats().reused_snapshots;
  BOOST_TEST(f.pool.find_prefix({.tokens = counting(17)}).num_tokens == 8);
  BOOST_TEST(f.compute(counting(17)) == 16);
  BOOST_TEST(f.pool.state_pool()->stats().reused_snapshots == reused + 1);
}

BOOST_AUTO_TEST_CASE(without_the_snapshot_or_a_block_nothing_is_read) {
  StatesFixture f;
  const auto evict = [&] { f.compute(counting(22, 50)); };
  f.compute(counting(17));
  evict();
  f.states.fails_at = 0;
  BOOST_TEST(f.compute(counting(17)) == 0);
  evict();
  f.states.fails_at = 100;
  f.level.fails_at = 2;
  BOOST_TEST(f.compute(counting(17)) == 0);
  evict();
  f.level.fails_at = 100;
  BOOST_TEST(f.compute(counting(17), false) == 0);
  evict();
  f.states.kept.clear();
  BOOST_TEST(f.compute(counting(17)) == 0);
  evict();
  BOOST_TEST(f.compute(counting(17)) == 16);
}

BOOST_AUTO_TEST_CASE(snapshots_are_offloaded_at_the_end_too) {
  StatesFixture f(20);
  f.compute(counting(17));
  f.compute(counting(9, 50));
  f.states.room = 1;
  f.pool.offload_all(SecondLevel::Time::max());
  BOOST_TEST(f.states.num_closing == 2);
  BOOST_TEST(f.states.kept.size() == 1U);
  f.states.room = 100;
  f.pool.offload_all(SecondLevel::Time::max());
  BOOST_TEST(f.states.kept.size() == 2U);
}

BOOST_AUTO_TEST_CASE(a_snapshot_that_is_not_made_yet_is_read_where_it_will_come_from) {
  StatesFixture f(20);
  SequenceMemory memory;
  const auto tokens = counting(9);
  const SequenceContent content{.tokens = tokens, .prompt_length = 9};
  BOOST_TEST_REQUIRE(f.pool.try_grow(memory, 8));
  f.states.pool_content[memory.states.slot] = 77;
  for (const BlockId block : memory.blocks()) f.level.pool_content[block] = 1;
  f.pool.keep(memory, 8);
  f.pool.share(memory, content);
  f.pool.offload_all(SecondLevel::Time::max());
  BOOST_TEST_REQUIRE(f.states.kept.size() == 1U);
  BOOST_TEST(f.states.kept.begin()->second == 77);
  f.pool.release(memory);
}

BOOST_AUTO_TEST_CASE(a_level_of_blocks_needs_one_of_snapshots) {
  MemoryLevel level;
  BOOST_CHECK_THROW(SequenceMemoryPool({.num_blocks = 4,
                                        .tokens_per_block = kTokensPerBlock,
                                        .second_level = {.level = &level},
                                        .num_state_slots = 1,
                                        .num_state_snapshots = 1}),
                    ConfigError);
}

BOOST_AUTO_TEST_CASE(without_reuse_there_is_no_level) {
  MemoryLevel level;
  const BlockPool pool(4, kTokensPerBlock, false, nullptr, PartialReuse::kNone, {.level = &level});
  BOOST_TEST(!pool.has_second_level());
  BOOST_TEST(!pool.stats().second_level.has_value());
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::second_level_test
