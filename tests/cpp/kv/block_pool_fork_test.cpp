// Tables that share blocks because one was forked from the other.

#include <boost/test/unit_test.hpp>
#include <stdexcept>
#include <vector>

#include "adaptrt/kv/block_pool.h"
#include "pools.h"

namespace adaptrt::testing::block_pool_fork_test {
namespace {

/// A pool and a table whose tokens are all computed.
struct Fixture {
  explicit Fixture(std::int32_t num_blocks, std::int32_t num_tokens, bool reuse = true)
      : pool(num_blocks, kTokensPerBlock, reuse), tokens(counting(num_tokens)) {
    BOOST_TEST_REQUIRE(pool.try_grow(table, num_tokens));
    pool.index_full_blocks(table, {}, tokens, num_tokens);
  }
  BlockPool pool;
  std::vector<std::int32_t> tokens;
  BlockTable table;
  BlockTable forked;
  BlockCopy copy;
};

BOOST_AUTO_TEST_SUITE(block_pool_forks)

BOOST_AUTO_TEST_CASE(full_blocks_are_shared_and_a_partly_filled_one_is_copied) {
  for (const bool reuse : {true, false}) {
    Fixture f(8, 10, reuse);
    BOOST_TEST_REQUIRE(f.pool.try_fork(f.table, 10, f.forked, f.copy));
    require_sound(f.pool);
    BOOST_TEST_REQUIRE(f.forked.blocks.size() == 3U);
    for (const std::size_t i : {0U, 1U}) {
      BOOST_TEST(f.forked.blocks[i] == f.table.blocks[i]);
      BOOST_TEST(f.pool.num_users(f.table.blocks[i]) == 2);
    }
    BOOST_TEST((f.copy == BlockCopy{f.table.blocks[2], f.forked.blocks[2]}));
    BOOST_TEST(f.copy.from != f.copy.to);
    BOOST_TEST(f.pool.num_users(f.copy.to) == 1);
    BOOST_TEST(f.pool.num_used() == 4);
    BOOST_TEST(f.forked.num_indexed == f.table.num_indexed);
    BOOST_TEST(f.forked.alloc_new_blocks == 1);
    BOOST_TEST(f.pool.stats().alloc_new_blocks == 4);
    BOOST_TEST(f.pool.stats().reused_blocks == 0);
    f.pool.release(f.table);
    require_sound(f.pool);
    BOOST_TEST(f.pool.num_used() == 3);
    f.pool.release(f.forked);
    require_sound(f.pool);
    BOOST_TEST(f.pool.num_used() == 0);
    BOOST_TEST(f.pool.num_cached() == (reuse ? 2 : 0));
  }
}

BOOST_AUTO_TEST_CASE(full_blocks_alone_need_no_copy) {
  Fixture f(2, 8);
  f.copy = {5, 6};
  BOOST_TEST_REQUIRE(f.pool.try_fork(f.table, 8, f.forked, f.copy));
  BOOST_TEST((f.copy == BlockCopy{}));
  BOOST_TEST(f.forked.blocks == f.table.blocks, boost::test_tools::per_element());
  BOOST_TEST(f.forked.alloc_new_blocks == 0);
  require_sound(f.pool);
}

BOOST_AUTO_TEST_CASE(without_a_block_for_the_copy_nothing_changes) {
  Fixture f(2, 6);
  BOOST_TEST(!f.pool.try_fork(f.table, 6, f.forked, f.copy));
  BOOST_TEST(f.forked.blocks.empty());
  BOOST_TEST(f.pool.num_users(f.table.blocks[0]) == 1);
  require_sound(f.pool);
}

BOOST_AUTO_TEST_CASE(a_cached_block_gives_way_to_a_copy) {
  Fixture f(3, 6);
  BlockTable other;
  const std::vector<std::int32_t> others(4, 77);
  BOOST_TEST_REQUIRE(f.pool.try_grow(other, 4));
  f.pool.index_full_blocks(other, {}, others, 4);
  f.pool.release(other);
  BOOST_TEST_REQUIRE(f.pool.num_cached() == 1);
  BOOST_TEST(f.pool.try_fork(f.table, 6, f.forked, f.copy));
  BOOST_TEST(f.pool.num_cached() == 0);
  require_sound(f.pool);
}

BOOST_AUTO_TEST_CASE(forked_tables_go_on_alone_and_meet_again_in_equal_content) {
  Fixture f(8, 6);
  BOOST_TEST_REQUIRE(f.pool.try_fork(f.table, 6, f.forked, f.copy));
  const auto same = counting(9);
  f.pool.index_full_blocks(f.table, {}, same, 8);
  f.pool.index_full_blocks(f.forked, {}, same, 8);
  BOOST_TEST(f.forked.blocks[1] == f.table.blocks[1]);
  BOOST_TEST(f.pool.num_used() == 2);
  require_sound(f.pool);
  BOOST_TEST_REQUIRE(f.pool.try_grow(f.table, 12));
  BOOST_TEST_REQUIRE(f.pool.try_grow(f.forked, 12));
  auto other = counting(12);
  other[11] = 99;
  f.pool.index_full_blocks(f.table, {}, counting(12), 12);
  f.pool.index_full_blocks(f.forked, {}, other, 12);
  BOOST_TEST(f.forked.blocks[2] != f.table.blocks[2]);
  require_sound(f.pool);
  BlockTable later;
  BOOST_TEST(f.pool.reuse_prefix(later, {}, counting(13)) == 12);
  require_sound(f.pool);
}

BOOST_AUTO_TEST_CASE(blocks_forked_before_a_reset_are_not_entered_again) {
  Fixture f(8, 8);
  f.pool.reset_reuse();
  BOOST_TEST_REQUIRE(f.pool.try_fork(f.table, 8, f.forked, f.copy));
  BOOST_TEST_REQUIRE(f.pool.try_grow(f.forked, 12));
  f.pool.index_full_blocks(f.forked, {}, counting(12), 12);
  BOOST_TEST(f.pool.match_prefix({}, counting(13)).num_blocks == 0);
  require_sound(f.pool);
}

BOOST_AUTO_TEST_CASE(tables_that_cannot_be_forked_are_refused) {
  Fixture f(8, 6);
  BOOST_CHECK_THROW(static_cast<void>(f.pool.try_fork(f.table, 9, f.forked, f.copy)), std::logic_error);
  BlockTable taken;
  BOOST_TEST_REQUIRE(f.pool.try_grow(taken, 1));
  BOOST_CHECK_THROW(static_cast<void>(f.pool.try_fork(f.table, 6, taken, f.copy)), std::logic_error);
  require_sound(f.pool);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::block_pool_fork_test
