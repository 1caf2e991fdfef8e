#include "adaptrt/kv/retention.h"

#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <map>
#include <random>
#include <vector>

#include "adaptrt/kv/block_pool.h"
#include "pools.h"

namespace adaptrt::testing::retention_test {
namespace {

using std::chrono::milliseconds;

/// Computes tokens and releases them; every block gets the retention that `of_block` returns.
void cache(BlockPool& pool, const std::vector<std::int32_t>& tokens,
           const std::vector<BlockRetention>& of_block) {
  BlockTable table;
  const std::int32_t size = static_cast<std::int32_t>(tokens.size());
  pool.reuse_prefix(table, {}, tokens);
  BOOST_TEST_REQUIRE(pool.try_grow(table, size));
  pool.index_full_blocks(table, {}, tokens, size);
  for (std::size_t i = 0; i < of_block.size(); ++i) {
    pool.set_retention(table, static_cast<std::int32_t>(i), of_block[i]);
  }
  pool.release(table);
  require_sound(pool);
}

std::int32_t cached_blocks(const BlockPool& pool, std::vector<std::int32_t> tokens) {
  tokens.push_back(-1);  // the last token is never reused
  return pool.match_prefix({}, tokens).num_blocks;
}

/// Holds this many blocks of the pool during its lifetime.
class Taken {
 public:
  Taken(BlockPool& pool, std::int32_t count) : pool_(pool) { more(count); }
  ~Taken() { pool_.release(table_); }
  Taken(const Taken&) = delete;
  Taken& operator=(const Taken&) = delete;
  void more(std::int32_t count) {
    BOOST_TEST_REQUIRE(
        pool_.try_grow(table_, (static_cast<std::int32_t>(table_.blocks.size()) + count) * kTokensPerBlock));
    require_sound(pool_);
  }

 private:
  BlockPool& pool_;
  BlockTable table_;
};

BOOST_AUTO_TEST_SUITE(retention)

BOOST_AUTO_TEST_CASE(blocks_of_a_lower_priority_go_first) {
  BlockPool pool(3, kTokensPerBlock, true);
  cache(pool, counting(4, 0), {{.priority = 80}});
  cache(pool, counting(4, 100), {{.priority = 20}});
  cache(pool, counting(4, 200), {});
  Taken taken(pool, 1);
  BOOST_TEST(cached_blocks(pool, counting(4, 100)) == 0);
  BOOST_TEST(cached_blocks(pool, counting(4, 200)) == 1);
  taken.more(1);
  BOOST_TEST(cached_blocks(pool, counting(4, 200)) == 0);
  BOOST_TEST(cached_blocks(pool, counting(4, 0)) == 1);
  taken.more(1);
  BOOST_TEST(cached_blocks(pool, counting(4, 0)) == 0);
}

BOOST_AUTO_TEST_CASE(a_block_keeps_those_before_it) {
  BlockPool pool(4, kTokensPerBlock, true);
  cache(pool, counting(12, 0), {{.priority = 0}, {.priority = 0}, {.priority = 100}});
  cache(pool, counting(4, 100), {{.priority = 50}});
  Taken taken(pool, 1);
  BOOST_TEST(cached_blocks(pool, counting(4, 100)) == 0);
  BOOST_TEST(cached_blocks(pool, counting(12, 0)) == 3);
  taken.more(1);  // the last of the chain; the blocks before it have their own priority again
  BOOST_TEST(cached_blocks(pool, counting(12, 0)) == 2);
}

BOOST_AUTO_TEST_CASE(when_its_end_is_gone_a_chain_is_worth_what_it_is) {
  BlockPool pool(3, kTokensPerBlock, true);
  cache(pool, counting(8, 0), {{.priority = 10}, {.priority = 60}});
  cache(pool, counting(4, 100), {{.priority = 70}});
  Taken taken(pool, 1);
  BOOST_TEST(cached_blocks(pool, counting(8, 0)) == 1);
  cache(pool, counting(4, 200), {{.priority = 10}});  // evicts the first chain's beginning
  BOOST_TEST(cached_blocks(pool, counting(8, 0)) == 0);
  BOOST_TEST(cached_blocks(pool, counting(4, 100)) == 1);
}

BOOST_AUTO_TEST_CASE(the_longest_wanted_of_several_continuations_counts) {
  BlockPool pool(4, kTokensPerBlock, true);
  auto other = counting(8, 0);
  other[6] = -5;
  cache(pool, counting(8, 0), {{.priority = 10}, {.priority = 90}});
  cache(pool, other, {{.priority = 10}, {.priority = 20}});
  cache(pool, counting(4, 100), {{.priority = 30}});
  Taken taken(pool, 2);
  BOOST_TEST(cached_blocks(pool, other) == 1);
  BOOST_TEST(cached_blocks(pool, counting(4, 100)) == 0);
  BOOST_TEST(cached_blocks(pool, counting(8, 0)) == 2);
}

BOOST_AUTO_TEST_CASE(a_duration_runs_from_the_last_use) {
  const BlockPool::Time start{};
  BlockPool pool(2, kTokensPerBlock, true);
  const auto kept = counting(4, 0);
  pool.set_time(start + milliseconds(1000));
  cache(pool, kept, {{.priority = 90, .duration = milliseconds(100)}});
  pool.set_time(start + milliseconds(1090));
  cache(pool, kept, {});  // used again
  pool.set_time(start + milliseconds(1189));
  cache(pool, counting(4, 100), {});
  cache(pool, counting(4, 200), {});
  BOOST_TEST(cached_blocks(pool, kept) == 1);
  pool.set_time(start + milliseconds(1190));
  require_sound(pool);
  cache(pool, counting(4, 300), {});  // has the default priority now, and was just used
  BOOST_TEST(cached_blocks(pool, kept) == 1);
  cache(pool, counting(4, 400), {});
  BOOST_TEST(cached_blocks(pool, kept) == 0);
}

BOOST_AUTO_TEST_CASE(time_does_not_go_back) {
  const BlockPool::Time start{};
  BlockPool pool(2, kTokensPerBlock, true);
  pool.set_time(start + milliseconds(500));
  pool.set_time(start + milliseconds(100));
  cache(pool, counting(4), {{.priority = 0, .duration = milliseconds(100)}});
  pool.set_time(start + milliseconds(599));
  cache(pool, counting(4, 100), {{.priority = 1}});
  cache(pool, counting(4, 200), {});
  BOOST_TEST(cached_blocks(pool, counting(4)) == 0);
  BOOST_TEST(cached_blocks(pool, counting(4, 100)) == 1);
}

BOOST_AUTO_TEST_CASE(a_low_priority_ends_as_well) {
  const BlockPool::Time start{};
  BlockPool pool(2, kTokensPerBlock, true);
  cache(pool, counting(8), {{.priority = 0, .duration = milliseconds(10)}, {.priority = 0}});
  pool.set_time(start + milliseconds(10));
  require_sound(pool);
  cache(pool, counting(4, 100), {{.priority = 34}});
  BOOST_TEST(cached_blocks(pool, counting(8)) == 1);
  cache(pool, counting(4, 200), {});
  BOOST_TEST(cached_blocks(pool, counting(4, 100)) == 0);
  BOOST_TEST(cached_blocks(pool, counting(8)) == 1);
}

BOOST_AUTO_TEST_CASE(evicted_content_leaves_nothing_behind) {
  BlockPool pool(1, kTokensPerBlock, true);
  cache(pool, counting(4), {{.priority = 90, .duration = milliseconds(5)}});
  cache(pool, counting(4, 100), {});
  pool.set_time(BlockPool::Time{} + milliseconds(5));
  require_sound(pool);
  BOOST_TEST(cached_blocks(pool, counting(4, 100)) == 1);
  pool.reset_reuse();
  require_sound(pool);
}

BOOST_AUTO_TEST_CASE(only_indexed_blocks_can_be_retained) {
  BlockPool pool(2, kTokensPerBlock, true);
  BlockTable table;
  BOOST_TEST_REQUIRE(pool.try_grow(table, 4));
  BOOST_CHECK_THROW(pool.set_retention(table, 0, {}), std::logic_error);
  pool.index_full_blocks(table, {}, counting(4), 4);
  BOOST_CHECK_NO_THROW(pool.set_retention(table, 0, {}));
  BOOST_CHECK_THROW(pool.set_retention(table, -1, {}), std::logic_error);
  pool.release(table);
}

/// Random chains with random retentions, uses and times; check_invariants() knows the eviction order. The
/// evicted block must be in a chain of the lowest priority.
BOOST_DATA_TEST_CASE(the_order_holds_whatever_is_retained, boost::unit_test::data::xrange(20), seed) {
  std::mt19937_64 random(static_cast<std::uint64_t>(seed));
  const auto below = [&](std::int32_t n) {
    return static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(n));
  };
  BlockPool pool(4 + below(30), 2, true);
  BlockPool::Time now{};
  std::vector<BlockTable> tables;
  for (int step = 0; step < 2000; ++step) {
    now += milliseconds(below(3));
    pool.set_time(now);
    if (below(3) > 0) {
      std::vector<std::int32_t> tokens(1 + below(14));
      for (auto& token : tokens) token = below(2);
      BlockTable table;
      const auto size = static_cast<std::int32_t>(tokens.size());
      const auto match = pool.match_prefix({}, tokens);
      if (pool.blocks_for(size) - match.num_blocks <= pool.num_available() - match.num_unused_blocks) {
        pool.reuse_prefix(table, {}, tokens);
        BOOST_TEST_REQUIRE(pool.try_grow(table, size));
        pool.index_full_blocks(table, {}, tokens, size);
        for (std::int32_t i = 0; i < table.num_indexed; ++i) {
          if (below(2) == 0) continue;
          BlockRetention retention{.priority = 34 + below(4)};
          if (below(2) == 0) retention.duration = milliseconds(1 + below(40));
          pool.set_retention(table, i, retention);
        }
        tables.push_back(std::move(table));
      }
    }
    if (!tables.empty() && below(2) == 0) {
      const std::int32_t ended = below(static_cast<std::int32_t>(tables.size()));
      pool.release(tables[ended]);
      tables.erase(tables.begin() + ended);
    }
    if (below(400) == 0) pool.reset_reuse();
    require_sound(pool);
  }
  for (BlockTable& table : tables) pool.release(table);
  require_sound(pool);
}

BOOST_AUTO_TEST_CASE(a_block_takes_the_range_of_its_first_token) {
  KvCacheRetentionConfig config;
  config.token_range_retention_configs = {
      {.token_start = 10, .token_end = 20, .priority = 80},
      {.token_start = 30, .priority = 90, .duration_ms = milliseconds(7)}};
  config.decode_retention_priority = 5;
  config.decode_duration_ms = milliseconds(9);
  BOOST_TEST(!config.for_block(9, 100).has_value());
  BOOST_TEST(config.for_block(10, 100)->priority == 80);
  BOOST_TEST(config.for_block(19, 100)->priority == 80);
  BOOST_TEST(!config.for_block(20, 100).has_value());
  BOOST_CHECK((config.for_block(99, 100) == BlockRetention{90, milliseconds(7)}));
  BOOST_CHECK((config.for_block(100, 100) == BlockRetention{5, milliseconds(9)}));
}

BOOST_AUTO_TEST_CASE(everything_wrong_is_told_at_once) {
  KvCacheRetentionConfig config;
  BOOST_TEST(config.validate().empty());
  config.token_range_retention_configs = {{.token_start = 64, .priority = 100},
                                          {.token_start = 0, .token_end = 64, .priority = 0}};
  BOOST_TEST(config.validate().empty());
  config.token_range_retention_configs = {{.token_start = -1, .token_end = 5, .priority = 101},
                                          {.token_start = 4, .token_end = 4, .duration_ms = milliseconds(0)},
                                          {.token_start = 9}};
  config.decode_retention_priority = -1;
  config.decode_duration_ms = milliseconds(-1);
  const std::vector<std::string> expected = {
      "token_range_retention_configs[0].token_start is -1",
      "token_range_retention_configs[0].priority is 101; accepted: 0 to 100",
      "token_range_retention_configs[1].token_end is 4; accepted: more than token_start, which is 4",
      "token_range_retention_configs[1].duration_ms is 0",
      "the ranges that start at -1 and 4 overlap",
      "decode_retention_priority is -1",
      "decode_duration_ms is -1"};
  const auto problems = config.validate().list();
  BOOST_TEST_REQUIRE(problems.size() == expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    BOOST_TEST(problems[i].find(expected[i]) != std::string::npos, problems[i]);
  }
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::retention_test
