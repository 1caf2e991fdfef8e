// Blocks of encoder inputs: sharing, caching and eviction.

#include "adaptrt/kv/cross_blocks.h"

#include <boost/test/unit_test.hpp>
#include <memory>
#include <vector>

#include "adaptrt/core/error.h"
#include "pools.h"

namespace adaptrt::testing::cross_blocks_test {
namespace {

using Share = CrossBlockPool::Share;

EncoderTokens input(std::int32_t length, std::int32_t first = 0) {
  return std::make_shared<const std::vector<std::int32_t>>(counting(length, first));
}

/// A pool that is checked in every state, and operations of sequences on it.
struct Inputs {
  explicit Inputs(std::int32_t num_blocks, bool enable_block_reuse = true)
      : pool(num_blocks, kTokensPerBlock, enable_block_reuse) {}

  /// Acts like a sequence that starts in a step, which then runs.
  Share start(const EncoderTokens& tokens, const ReuseKey& key = {}) {
    const bool is_known = pool.contains(key, tokens);
    Share share = pool.reuse(key, tokens, counts);
    BOOST_TEST_REQUIRE(is_known == (share != nullptr));
    if (share == nullptr) {
      share = pool.try_take(key, tokens, counts);
      BOOST_TEST_REQUIRE((share != nullptr));
      check();
      pool.commit(share);
    }
    check();
    return share;
  }
  /// Its counts are not checked.
  Share find(const EncoderTokens& tokens, const ReuseKey& key = {}) {
    CrossCounts ignored;
    return pool.reuse(key, tokens, ignored);
  }
  void check() {
    for (const auto& violation : pool.check_invariants()) BOOST_ERROR(violation);
  }

  CrossBlockPool pool;
  CrossCounts counts;
};

BOOST_AUTO_TEST_SUITE(cross_blocks)

BOOST_AUTO_TEST_CASE(a_reset_frees_unused_inputs_and_shares_used_ones_no_longer) {
  Inputs inputs(8);
  Share used = inputs.start(input(10));
  static_cast<void>(inputs.start(input(7, 50)));  // cached from here on
  BOOST_TEST(inputs.pool.num_cached() == 2);
  inputs.pool.reset_reuse();
  inputs.check();
  BOOST_TEST(inputs.pool.num_cached() == 0);
  BOOST_TEST(inputs.pool.num_free() == 5);
  BOOST_TEST((inputs.find(input(7, 50)) == nullptr));
  const Share again = inputs.start(input(10));
  BOOST_TEST((again != used));
  BOOST_TEST((inputs.find(input(10)) == again));
  used.reset();
  inputs.check();
  BOOST_TEST(inputs.pool.num_free() == 5);
  BOOST_TEST((inputs.find(input(10)) == again));
}

BOOST_AUTO_TEST_CASE(equal_inputs_share_their_blocks) {
  Inputs inputs(8);
  const Share first = inputs.start(input(10));
  BOOST_TEST(first->blocks().size() == 3U);
  const Share second = inputs.start(input(10));  // a different vector with equal tokens
  BOOST_TEST(second == first);
  const Share longer = inputs.start(input(11));
  BOOST_TEST(longer != first);
  BOOST_TEST(inputs.pool.num_free() == 2);
  BOOST_TEST(inputs.counts.alloc_new_blocks == 6);
  BOOST_TEST(inputs.counts.reused_blocks == 3);
  BOOST_TEST(inputs.counts.missed_blocks == 6);
}

BOOST_AUTO_TEST_CASE(adapters_and_salts_are_told_apart) {
  Inputs inputs(16);
  const EncoderTokens tokens = input(8);
  const std::vector<ReuseKey> keys = {{},
                                      {.adapter_generation = 1, .task_id = 7},
                                      {.adapter_generation = 2, .task_id = 7},
                                      {.cache_salt = 0},
                                      {.cache_salt = 1},
                                      {.adapter_generation = 1, .cache_salt = 1, .task_id = 7}};
  std::vector<Share> shares;
  for (const ReuseKey& key : keys) {
    BOOST_TEST(!inputs.pool.contains(key, tokens));
    shares.push_back(inputs.start(tokens, key));
  }
  for (std::size_t i = 0; i < keys.size(); ++i) BOOST_TEST(inputs.find(tokens, keys[i]) == shares[i]);
}

BOOST_AUTO_TEST_CASE(unused_blocks_are_kept_until_there_is_no_room) {
  Inputs inputs(4);
  static_cast<void>(inputs.start(input(8, 100)));
  static_cast<void>(inputs.start(input(4, 200)));
  BOOST_TEST(inputs.pool.num_free() == 1);
  BOOST_TEST(inputs.pool.num_cached() == 3);
  BOOST_TEST(inputs.pool.num_available() == 4);
  const std::vector<BlockId> before = inputs.find(input(8, 100))->blocks();
  BOOST_TEST((inputs.find(input(8, 100))->blocks() == before));  // makes it the more recently used one
  static_cast<void>(inputs.start(input(8, 300)));                // takes the free block and that of 200
  BOOST_TEST(inputs.pool.contains({}, input(8, 100)));
  BOOST_TEST(!inputs.pool.contains({}, input(4, 200)));
  static_cast<void>(inputs.start(input(16, 400)));
  BOOST_TEST(!inputs.pool.contains({}, input(8, 100)));
  BOOST_TEST(!inputs.pool.contains({}, input(8, 300)));
  BOOST_TEST(inputs.pool.num_cached() == 4);
}

BOOST_AUTO_TEST_CASE(used_blocks_are_not_evicted) {
  Inputs inputs(4);
  Share used = inputs.start(input(12));
  static_cast<void>(inputs.start(input(4, 50)));
  CrossCounts counts;
  BOOST_TEST((inputs.pool.try_take({}, input(8, 100), counts) == nullptr));
  BOOST_TEST(inputs.pool.contains({}, input(4, 50)));  // nothing was evicted needlessly
  BOOST_TEST(counts.alloc_new_blocks == 0);
  inputs.check();
  used.reset();
  BOOST_TEST(inputs.start(input(8, 100))->blocks().size() == 2U);
}

BOOST_AUTO_TEST_CASE(a_step_that_fails_leaves_nothing) {
  Inputs inputs(4);
  Share first = inputs.pool.try_take({}, input(8), inputs.counts);
  Share second = inputs.pool.reuse({}, input(8), inputs.counts);  // starts in the same step
  BOOST_TEST(second == first);
  first.reset();
  BOOST_TEST(inputs.pool.contains({}, input(8)));
  second.reset();
  BOOST_TEST(!inputs.pool.contains({}, input(8)));
  BOOST_TEST(inputs.pool.num_free() == 4);
  inputs.check();
}

BOOST_AUTO_TEST_CASE(blocks_of_ones_own_become_those_that_are_known) {
  Inputs inputs(6);
  const Share known = inputs.start(input(8));
  Share own = inputs.pool.try_take({}, input(8), inputs.counts);
  BOOST_TEST(own != known);
  BOOST_TEST(inputs.find(input(8)) == known);
  BOOST_TEST(inputs.pool.num_free() == 2);
  inputs.check();
  inputs.pool.commit(own);
  BOOST_TEST(own == known);
  BOOST_TEST(inputs.pool.num_free() == 4);
  inputs.check();
}

BOOST_AUTO_TEST_CASE(blocks_of_ones_own_are_known_when_the_others_went_for_them) {
  Inputs inputs(3);
  static_cast<void>(inputs.start(input(8)));
  Share own = inputs.pool.try_take({}, input(8), inputs.counts);
  inputs.check();
  inputs.pool.commit(own);
  BOOST_TEST(inputs.find(input(8)) == own);
  // The same if the others end before the step has run.
  Inputs more(4);
  Share known = more.start(input(8));
  Share later = more.pool.try_take({}, input(8), more.counts);
  known.reset();
  static_cast<void>(more.start(input(8, 70)));
  BOOST_TEST(!more.pool.contains({}, input(8)));
  more.pool.commit(later);
  BOOST_TEST(more.find(input(8)) == later);
  more.check();
}

BOOST_AUTO_TEST_CASE(without_reuse_nothing_is_kept) {
  Inputs inputs(4, false);
  const Share first = inputs.start(input(8));
  const Share second = inputs.start(input(8));
  BOOST_TEST(first != second);
  BOOST_TEST(inputs.counts.missed_blocks == 0);
  BOOST_TEST(inputs.counts.alloc_new_blocks == 4);
  Inputs later(2, false);
  static_cast<void>(later.start(input(8)));
  BOOST_TEST(later.pool.num_free() == 2);
}

BOOST_AUTO_TEST_CASE(statistics_count_blocks) {
  Inputs inputs(5);
  const Share used = inputs.start(input(8));
  static_cast<void>(inputs.start(input(3, 90)));
  static_cast<void>(inputs.start(input(3, 90)));
  const KvCacheStats stats = inputs.pool.stats();
  BOOST_TEST(stats.max_num_blocks == 5);
  BOOST_TEST(stats.used_num_blocks == 2);
  BOOST_TEST(stats.free_num_blocks == 3);
  BOOST_TEST(stats.tokens_per_block == kTokensPerBlock);
  BOOST_TEST(stats.alloc_new_blocks == 3);
  BOOST_TEST(stats.alloc_total_blocks == 4);
  BOOST_TEST(stats.reused_blocks == 1);
  BOOST_TEST(stats.missed_blocks == 3);
  BOOST_TEST(stats.reused_tokens == 3);
}

BOOST_AUTO_TEST_CASE(sizes_that_cannot_be_are_refused) {
  BOOST_CHECK_THROW(CrossBlockPool(0, 4, true), ConfigError);
  BOOST_CHECK_THROW(CrossBlockPool(4, 0, true), ConfigError);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::cross_blocks_test
