#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "adaptrt/kv/block_pool.h"
#include "pools.h"

namespace adaptrt::testing::partial_reuse_test {
namespace {

using Tokens = std::vector<std::int32_t>;

/// Makes a table with all tokens computed, reusing what is cached.
BlockTable compute(BlockPool& pool, const Tokens& tokens, const ReuseKey& key = {}) {
  BlockTable table;
  BlockCopy copy;
  pool.reuse_prefix(table, key, tokens);
  pool.reuse_beginning(table, key, tokens, copy);
  const auto size = static_cast<std::int32_t>(tokens.size());
  BOOST_TEST_REQUIRE(pool.try_grow(table, size));
  pool.index_full_blocks(table, key, tokens, size);
  require_sound(pool);
  return table;
}

void cache(BlockPool& pool, const Tokens& tokens, const ReuseKey& key = {}) {
  BlockTable table = compute(pool, tokens, key);
  pool.release(table);
  require_sound(pool);
}

/// Returns the number of tokens that a new table for `tokens` could reuse.
std::int32_t known(const BlockPool& pool, const Tokens& tokens, const ReuseKey& key = {}) {
  const auto match = pool.match_prefix(key, tokens);
  return match.num_blocks * pool.tokens_per_block() + match.num_partial_tokens;
}

struct Copying : BlockPool {
  explicit Copying(std::int32_t num_blocks)
      : BlockPool(num_blocks, kTokensPerBlock, true, nullptr, PartialReuse::kCopy) {}
};
struct TakingOver : BlockPool {
  explicit TakingOver(std::int32_t num_blocks)
      : BlockPool(num_blocks, kTokensPerBlock, true, nullptr, PartialReuse::kTakeOver) {}
};

BOOST_AUTO_TEST_SUITE(partial_reuse)

BOOST_AUTO_TEST_CASE(blocks_are_found_by_their_first_tokens) {
  Copying pool(16);
  cache(pool, {1, 2, 3, 4, 5, 6, 7, 8});
  BOOST_TEST(known(pool, {1, 2, 3, 4, 5, 6, 9, 9}) == 6);
  BOOST_TEST(known(pool, {1, 2, 9, 9}) == 2);
  BOOST_TEST(known(pool, {1, 2, 9}) == 2);
  BOOST_TEST(known(pool, {9, 2, 3}) == 0);
  BOOST_TEST(known(pool, {1, 2, 3, 4, 9}) == 4);
  BOOST_TEST(known(pool, {5, 6, 7, 8, 9}) == 0);  // the second block's tokens, without the ones before
}

BOOST_AUTO_TEST_CASE(one_token_is_left_to_compute) {
  Copying pool(16);
  cache(pool, {1, 2, 3, 4, 5, 6, 7, 8});
  BOOST_TEST(known(pool, {1, 2, 3, 4, 5, 6, 7, 8}) == 7);
  BOOST_TEST(known(pool, {1, 2, 3, 4, 5}) == 4);
  BOOST_TEST(known(pool, {1, 2, 3, 4}) == 3);
  BOOST_TEST(known(pool, {1, 2}) == 1);
  BOOST_TEST(known(pool, {1}) == 0);
  BOOST_TEST(known(pool, {}) == 0);
}

BOOST_AUTO_TEST_CASE(the_block_with_the_longest_common_prefix_is_found) {
  Copying pool(32);
  for (const Tokens& tokens : {Tokens{1, 1, 1, 1}, {1, 2, 1, 1}, {1, 2, 3, 1}, {1, 2, 4, 9}, {1, 3, 1, 1}}) {
    cache(pool, tokens);
  }
  BOOST_TEST(known(pool, {1, 2, 3, 9, 9}) == 3);
  BOOST_TEST(known(pool, {1, 2, 4, 1, 9}) == 3);
  BOOST_TEST(known(pool, {1, 2, 0, 1, 9}) == 2);
  BOOST_TEST(known(pool, {1, 2, 9, 1, 9}) == 2);
  BOOST_TEST(known(pool, {1, 9, 0, 1, 9}) == 1);
  BOOST_TEST(known(pool, {1, 0, 0, 1, 9}) == 1);
  BOOST_TEST(known(pool, {0, 2, 3, 1, 9}) == 0);
}

BOOST_AUTO_TEST_CASE(adapters_and_salts_are_kept_apart) {
  Copying pool(16);
  cache(pool, {1, 2, 3, 4}, {.adapter_generation = 3, .cache_salt = 5});
  BOOST_TEST(known(pool, {1, 2, 9}, {.adapter_generation = 3, .cache_salt = 5}) == 2);
  BOOST_TEST(known(pool, {1, 2, 9}, {.adapter_generation = 3}) == 0);
  BOOST_TEST(known(pool, {1, 2, 9}, {.adapter_generation = 3, .cache_salt = 4}) == 0);
  BOOST_TEST(known(pool, {1, 2, 9}, {.adapter_generation = 2, .cache_salt = 5}) == 0);
  BOOST_TEST(known(pool, {1, 2, 9}) == 0);
}

BOOST_AUTO_TEST_CASE(the_table_gets_a_block_of_its_own_and_the_copy_to_make) {
  Copying pool(16);
  const BlockTable first = compute(pool, {1, 2, 3, 4, 5, 6, 7, 8, 9});
  BlockTable second;
  BlockCopy copy;
  const Tokens tokens = {1, 2, 3, 4, 5, 6, 0, 0};
  BOOST_TEST(pool.reuse_prefix(second, {}, tokens) == 4);
  BOOST_TEST(pool.reuse_beginning(second, {}, tokens, copy) == 2);
  BOOST_TEST_REQUIRE(second.blocks.size() == 2U);
  BOOST_TEST(second.blocks[0] == first.blocks[0]);
  BOOST_TEST(copy.from == first.blocks[1]);
  BOOST_TEST(copy.to == second.blocks[1]);
  BOOST_TEST(pool.num_users(copy.to) == 1);
  BOOST_TEST(pool.num_users(copy.from) == 1);
  BOOST_TEST(second.num_indexed == 1);
  const KvCacheStats stats = pool.stats();
  BOOST_TEST(stats.reused_blocks == 1);
  BOOST_TEST(stats.partially_reused_blocks == 1);
  BOOST_TEST(stats.reused_tokens == 6);
  BOOST_TEST(stats.alloc_new_blocks == 4);
  BOOST_TEST(second.alloc_new_blocks == 1);
  require_sound(pool);
}

BOOST_AUTO_TEST_CASE(a_block_is_not_evicted_for_its_own_copy) {
  Copying pool(2);
  cache(pool, {1, 2, 3, 4, 5, 6, 7, 8});
  BOOST_TEST(known(pool, {1, 2, 0}) == 2);  // evicts the second block
  BlockTable table;
  BlockCopy copy;
  BOOST_TEST(pool.reuse_beginning(table, {}, Tokens{1, 2, 0}, copy) == 2);
  BOOST_TEST(copy.from != copy.to);
  BOOST_TEST(pool.num_available() == 1);
  require_sound(pool);
  BlockTable other;
  BOOST_TEST(known(pool, {1, 2, 0}) == 0);  // there is no block except the one to copy
  BOOST_TEST(pool.reuse_beginning(other, {}, Tokens{1, 2, 0}, copy) == 0);
  BOOST_TEST(other.blocks.empty());
  BOOST_CHECK((copy == BlockCopy{}));
  // Used blocks are not available.
  pool.release(table);
  BlockTable whole = compute(pool, {1, 2, 3, 4});
  BOOST_TEST(known(pool, {1, 2, 0}) == 2);
  pool.release(whole);
}

BOOST_AUTO_TEST_CASE(blocks_that_the_prefix_takes_are_not_to_be_had) {
  Copying pool(3);
  cache(pool, {1, 2, 3, 4, 5, 6, 7, 8});
  BlockTable taken;
  BOOST_TEST_REQUIRE(pool.try_grow(taken, 4));
  // The first block is used; only the second one is left.
  BOOST_TEST(known(pool, {1, 2, 3, 4, 5, 0, 0}) == 4);
  pool.release(taken);
  BOOST_TEST(known(pool, {1, 2, 3, 4, 5, 0, 0}) == 5);
}

BOOST_AUTO_TEST_CASE(copied_blocks_count_as_just_used) {
  Copying pool(4);
  cache(pool, {1, 2, 3, 4});
  cache(pool, {5, 6, 7, 8});
  cache(pool, {11, 12, 13, 14});
  cache(pool, {1, 2, 3, 0});
  BlockTable taken;
  BOOST_TEST_REQUIRE(pool.try_grow(taken, 8));
  BOOST_TEST(known(pool, {1, 2, 3, 4, 9}) == 4);
  BOOST_TEST(known(pool, {1, 2, 3, 0, 9}) == 4);
  BOOST_TEST(known(pool, {5, 6, 7, 8, 9}) == 0);
  BOOST_TEST(known(pool, {11, 12, 13, 14, 9}) == 0);
}

BOOST_AUTO_TEST_CASE(an_unused_last_block_is_taken_over) {
  TakingOver pool(8);
  cache(pool, {1, 2, 3, 4, 5, 6, 7, 8});
  BOOST_TEST(known(pool, {1, 2, 9}) == 0);  // it would evict the second block
  BOOST_TEST(known(pool, {1, 2, 3, 4, 5, 6, 9}) == 6);
  BlockTable table;
  BlockCopy copy;
  const Tokens tokens = {1, 2, 3, 4, 5, 6, 9};
  pool.reuse_prefix(table, {}, tokens);
  BOOST_TEST(pool.reuse_beginning(table, {}, tokens, copy) == 2);
  BOOST_CHECK((copy == BlockCopy{}));
  require_sound(pool);
  BOOST_TEST(pool.num_cached() == 0);
  BOOST_TEST(pool.num_used() == 2);
  BOOST_TEST(known(pool, {1, 2, 3, 4, 5, 6, 7, 8, 9}) == 4);
  BOOST_TEST(pool.stats().reused_tokens == 6);
  pool.release(table);
  BOOST_TEST(pool.num_free() == 7);
}

BOOST_AUTO_TEST_CASE(a_used_block_is_not_taken_over) {
  TakingOver pool(8);
  BlockTable table = compute(pool, {1, 2, 3, 4, 5});
  BOOST_TEST(known(pool, {1, 2, 9}) == 0);
  pool.release(table);
  BOOST_TEST(known(pool, {1, 2, 9}) == 2);
}

BOOST_AUTO_TEST_CASE(nothing_is_known_without_it) {
  BlockPool none(8, kTokensPerBlock, true);
  BlockPool off(8, kTokensPerBlock, false, nullptr, PartialReuse::kCopy);
  BOOST_CHECK(off.partial_reuse() == PartialReuse::kNone);
  for (BlockPool* pool : {&none, &off}) {
    cache(*pool, {1, 2, 3, 4, 5, 6, 7, 8});
    BOOST_TEST(pool->match_prefix({}, Tokens{1, 2, 9}).num_partial_tokens == 0);
    BlockTable table;
    BlockCopy copy;
    BOOST_TEST(pool->reuse_beginning(table, {}, Tokens{1, 2, 9}, copy) == 0);
    BOOST_TEST(table.blocks.empty());
    BOOST_TEST(pool->stats().partially_reused_blocks == 0);
  }
}

BOOST_AUTO_TEST_CASE(forgotten_content_is_not_known) {
  Copying pool(8);
  cache(pool, {1, 2, 3, 4});
  pool.reset_reuse();
  require_sound(pool);
  BOOST_TEST(known(pool, {1, 2, 9}) == 0);
  cache(pool, {1, 2, 3, 4});
  BOOST_TEST(known(pool, {1, 2, 9}) == 2);
}

BOOST_AUTO_TEST_CASE(a_beginning_stands_behind_shared_blocks_only) {
  Copying pool(8);
  BlockTable table;
  BlockCopy copy;
  BOOST_TEST_REQUIRE(pool.try_grow(table, 3));
  BOOST_CHECK_THROW(pool.reuse_beginning(table, {}, Tokens{1, 2, 9}, copy), std::logic_error);
}

/// Random tables over a small alphabet, with a model of their blocks' content: the tokens found equal those
/// of a search through all indexed blocks, and their content is right after the copy.
BOOST_DATA_TEST_CASE(random_use_finds_the_longest_beginning, boost::unit_test::data::xrange(16), seed) {
  std::mt19937_64 random(static_cast<std::uint64_t>(seed));
  const auto below = [&](std::int32_t n) {
    return static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(n));
  };
  struct Used {
    BlockTable table;
    ReuseKey key;
    Tokens tokens;
  };
  const std::int32_t size = 2 + below(4);
  const std::int32_t num_blocks = 6 + below(40);
  const auto mode = seed % 4 == 0 ? PartialReuse::kTakeOver : PartialReuse::kCopy;
  BlockPool pool(num_blocks, size, true, nullptr, mode);
  std::vector<std::pair<ReuseKey, Tokens>> memory(static_cast<std::size_t>(num_blocks));  // all tokens up to
                                                                                          // the block's end
  std::vector<Used> used;
  std::int64_t num_found = 0;
  for (int step = 0; step < 2000; ++step) {
    if (!used.empty() && below(2) == 0) {
      const auto victim = used.begin() + below(static_cast<std::int32_t>(used.size()));
      pool.release(victim->table);
      used.erase(victim);
    }
    if (below(200) == 0) pool.reset_reuse();
    Used next;
    next.key.adapter_generation = static_cast<std::uint64_t>(below(2));
    next.tokens.resize(static_cast<std::size_t>(1 + below(4 * size)));
    for (auto& token : next.tokens) token = below(3);
    const auto length = static_cast<std::int32_t>(next.tokens.size());
    const auto match = pool.match_prefix(next.key, next.tokens);
    const bool fits =
        pool.blocks_for(length) - match.num_blocks <= pool.num_available() - match.num_unused_blocks;
    if (!fits) continue;
    if (mode == PartialReuse::kCopy && pool.num_available() - match.num_unused_blocks > 1) {
      std::int32_t longest = 0;
      const auto num_shared = static_cast<std::size_t>(match.num_blocks * size);
      for (const auto& [key, tokens] : memory) {
        const auto in_common = static_cast<std::size_t>(
            std::ranges::mismatch(tokens, std::span(next.tokens).first(next.tokens.size() - 1)).in1 -
            tokens.begin());
        if (key != next.key || tokens.size() != num_shared + static_cast<std::size_t>(size) ||
            in_common <= num_shared) {
          continue;
        }
        Tokens longer = tokens;
        longer.push_back(-1);
        if (pool.match_prefix(key, longer).num_blocks == match.num_blocks + 1) {
          longest = std::max(longest, static_cast<std::int32_t>(in_common - num_shared));
        }
      }
      BOOST_TEST_REQUIRE(match.num_partial_tokens == longest);
    }
    BlockCopy copy;
    const std::int32_t num_full = pool.reuse_prefix(next.table, next.key, next.tokens);
    const std::int32_t num_partial = pool.reuse_beginning(next.table, next.key, next.tokens, copy);
    require_sound(pool);
    BOOST_TEST_REQUIRE(num_partial == match.num_partial_tokens);
    BOOST_TEST_REQUIRE(num_partial < size);
    BOOST_TEST_REQUIRE(num_full + num_partial < length);
    if (num_partial > 0) {
      ++num_found;
      if (mode == PartialReuse::kCopy) {
        BOOST_TEST_REQUIRE(copy.to == next.table.blocks.back());
        memory[static_cast<std::size_t>(copy.to)] = memory[static_cast<std::size_t>(copy.from)];
      }
      const auto& [key, tokens] = memory[static_cast<std::size_t>(next.table.blocks.back())];
      BOOST_TEST_REQUIRE((key == next.key));
      const auto begin = next.tokens.begin();
      BOOST_TEST_REQUIRE(std::equal(begin, begin + num_full + num_partial, tokens.begin()));
    }
    BOOST_TEST_REQUIRE(pool.try_grow(next.table, length));
    const std::size_t first_own = static_cast<std::size_t>(num_full / size);
    for (std::size_t i = first_own; i < next.table.blocks.size(); ++i) {
      const auto end = std::min(static_cast<std::ptrdiff_t>(i + 1) * size, std::ptrdiff_t{length});
      memory[static_cast<std::size_t>(next.table.blocks[i])] = {
          next.key, Tokens(next.tokens.begin(), next.tokens.begin() + end)};
    }
    pool.index_full_blocks(next.table, next.key, next.tokens, length);
    require_sound(pool);
    used.push_back(std::move(next));
  }
  BOOST_TEST(num_found > (mode == PartialReuse::kCopy ? 100 : 10));
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::partial_reuse_test
