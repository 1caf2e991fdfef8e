#include "adaptrt/kv/block_pool.h"

#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "adaptrt/core/error.h"
#include "pools.h"
#include "support/sanitized.h"

namespace adaptrt::testing::block_pool_test {
namespace {

/// A sequence that computes all its tokens at once and adds them to the index.
BlockTable compute(BlockPool& pool, const ReuseKey& key, const std::vector<std::int32_t>& tokens) {
  BlockTable table;
  pool.reuse_prefix(table, key, tokens);
  BOOST_TEST_REQUIRE(pool.try_grow(table, static_cast<std::int32_t>(tokens.size())));
  pool.index_full_blocks(table, key, tokens, static_cast<std::int32_t>(tokens.size()));
  require_sound(pool);
  return table;
}

std::int32_t reusable_tokens(const BlockPool& pool, const ReuseKey& key,
                             const std::vector<std::int32_t>& tokens) {
  return pool.match_prefix(key, tokens).num_blocks * pool.tokens_per_block();
}

BOOST_AUTO_TEST_SUITE(block_pool)

BOOST_AUTO_TEST_CASE(impossible_sizes_are_refused) {
  BOOST_CHECK_THROW(BlockPool(-1, 4, true), ConfigError);
  BOOST_CHECK_THROW(BlockPool(4, 0, true), ConfigError);
  BOOST_CHECK_THROW(BlockPool(-1, -1, false), ConfigError);
}

BOOST_AUTO_TEST_CASE(without_blocks_nothing_needs_one) {
  BlockPool pool(0, 4, true);
  BlockTable table;
  BOOST_TEST(pool.blocks_for(1000) == 0);
  BOOST_TEST(pool.try_grow(table, 1000));
  BOOST_TEST(table.blocks.empty());
  pool.release(table);
  BOOST_TEST(pool.num_available() == 0);
  require_sound(pool);
}

BOOST_AUTO_TEST_CASE(growing_takes_whole_blocks_or_nothing) {
  BlockPool pool(3, kTokensPerBlock, true);
  BlockTable table;
  BOOST_TEST(pool.try_grow(table, 5));
  BOOST_TEST(table.blocks.size() == 2U);
  BOOST_TEST(pool.try_grow(table, 8));
  BOOST_TEST(table.blocks.size() == 2U);
  BOOST_TEST(!pool.try_grow(table, 13));
  BOOST_TEST(table.blocks.size() == 2U);
  BOOST_TEST(pool.num_available() == 1);
  BlockTable other;
  BOOST_TEST(!pool.try_grow(other, 5));
  BOOST_TEST(other.blocks.empty());
  pool.release(table);
  BOOST_TEST(pool.num_free() == 3);
  require_sound(pool);
}

BOOST_AUTO_TEST_CASE(blocks_before_an_adapter_acts_are_shared_with_the_base) {
  BlockPool pool(20, kTokensPerBlock, true);
  const auto tokens = counting(16);
  auto base = compute(pool, {}, tokens);
  const ReuseKey late{.adapter_generation = 5, .adapter_from = 10};
  BOOST_TEST(reusable_tokens(pool, late, tokens) == 8);
  auto own = compute(pool, late, tokens);
  BOOST_TEST(own.blocks[1] == base.blocks[1]);
  BOOST_TEST(own.blocks[2] != base.blocks[2]);
  BOOST_TEST(reusable_tokens(pool, late, tokens) == 12);
  // The same tokens, with the same adapter active from a different position.
  BOOST_TEST(reusable_tokens(pool, {.adapter_generation = 5, .adapter_from = 11}, tokens) == 8);
  BOOST_TEST(reusable_tokens(pool, {.adapter_generation = 5, .adapter_from = 12}, tokens) == 12);
  BOOST_TEST(reusable_tokens(pool, {.adapter_generation = 5}, tokens) == 0);
  BOOST_TEST(reusable_tokens(pool, {.adapter_generation = 6, .adapter_from = 8}, tokens) == 8);
  pool.release(base);
  pool.release(own);
  require_sound(pool);
}

BOOST_AUTO_TEST_CASE(blocks_before_a_prompt_embedding_are_shared) {
  BlockPool pool(20, kTokensPerBlock, true);
  const auto tokens = counting(16);
  const auto digest = [](std::uint64_t value) { return Sha256().add_integer(value).finish(); };
  const PrefixDigests first = {{.position = 5, .digest = digest(1)}, {.position = 8, .digest = digest(2)}};
  const PrefixDigests second = {{.position = 5, .digest = digest(1)}, {.position = 9, .digest = digest(3)}};
  const PrefixDigests late = {{.position = 12, .digest = digest(1)}};
  auto table = compute(pool, {.given = &first}, tokens);
  BOOST_TEST(reusable_tokens(pool, {.given = &first}, tokens) == 12);
  BOOST_TEST(reusable_tokens(pool, {.given = &second}, tokens) == 8);
  BOOST_TEST(reusable_tokens(pool, {.given = &late}, tokens) == 4);
  BOOST_TEST(reusable_tokens(pool, {}, tokens) == 4);
  BOOST_TEST(reusable_tokens(pool, {.cache_salt = 1, .given = &first}, tokens) == 0);
  BOOST_TEST(reusable_tokens(pool, {.adapter_generation = 1, .given = &first}, tokens) == 0);
  // The base model computes the tokens before an adapter is active, with the same embeddings.
  BOOST_TEST(reusable_tokens(pool, {.adapter_generation = 1, .adapter_from = 8, .given = &first}, tokens) ==
             8);
  pool.release(table);
  require_sound(pool);
}

BOOST_AUTO_TEST_CASE(the_last_token_is_always_left_to_compute) {
  BlockPool pool(8, kTokensPerBlock, true);
  auto table = compute(pool, {}, counting(8));
  BOOST_TEST(reusable_tokens(pool, {}, counting(8)) == 4);
  BOOST_TEST(reusable_tokens(pool, {}, counting(9)) == 8);
  BOOST_TEST(reusable_tokens(pool, {}, counting(4)) == 0);
  BOOST_TEST(reusable_tokens(pool, {}, {}) == 0);
}

BOOST_AUTO_TEST_CASE(only_computed_full_blocks_are_entered) {
  BlockPool pool(8, kTokensPerBlock, true);
  const auto tokens = counting(12);
  BlockTable table;
  BOOST_TEST(pool.try_grow(table, 12));
  BOOST_TEST(reusable_tokens(pool, {}, tokens) == 0);
  pool.index_full_blocks(table, {}, tokens, 7);
  BOOST_TEST(reusable_tokens(pool, {}, tokens) == 4);
  pool.index_full_blocks(table, {}, tokens, 8);
  BOOST_TEST(reusable_tokens(pool, {}, tokens) == 8);
  BOOST_TEST(table.num_indexed == 2);
}

BOOST_AUTO_TEST_CASE(used_blocks_are_shared_and_counted) {
  BlockPool pool(8, kTokensPerBlock, true);
  auto first = compute(pool, {}, counting(10));
  auto tokens = counting(8);
  tokens.push_back(99);
  const auto match = pool.match_prefix({}, tokens);
  BOOST_TEST(match.num_blocks == 2);
  BOOST_TEST(match.num_unused_blocks == 0);
  auto second = compute(pool, {}, tokens);
  BOOST_TEST(second.blocks[0] == first.blocks[0]);
  BOOST_TEST(second.blocks[1] == first.blocks[1]);
  BOOST_TEST(second.blocks[2] != first.blocks[2]);
  BOOST_TEST(pool.num_users(first.blocks[0]) == 2);
  BOOST_TEST(pool.num_used() == 4);
  pool.release(first);
  BOOST_TEST(pool.num_users(second.blocks[0]) == 1);
  BOOST_TEST(pool.num_cached() == 0);
  pool.release(second);
  BOOST_TEST(pool.num_cached() == 2);
  BOOST_TEST(pool.num_free() == 6);
  BOOST_TEST(pool.match_prefix({}, tokens).num_unused_blocks == 2);
  require_sound(pool);
}

BOOST_AUTO_TEST_CASE(adapter_salt_and_every_token_before_separate_content) {
  BlockPool pool(16, kTokensPerBlock, true);
  const auto tokens = counting(9);
  auto table = compute(pool, {7, 3}, tokens);
  BOOST_TEST(reusable_tokens(pool, {7, 3}, tokens) == 8);
  BOOST_TEST(reusable_tokens(pool, {0, 3}, tokens) == 0);
  BOOST_TEST(reusable_tokens(pool, {8, 3}, tokens) == 0);
  BOOST_TEST(reusable_tokens(pool, {7, std::nullopt}, tokens) == 0);
  BOOST_TEST(reusable_tokens(pool, {7, 0}, tokens) == 0);
  auto changed = tokens;
  changed[0] = 1000;  // the second block's own tokens are equal
  BOOST_TEST(reusable_tokens(pool, {7, 3}, changed) == 0);
  changed = tokens;
  changed[7] = 1000;
  BOOST_TEST(reusable_tokens(pool, {7, 3}, changed) == 4);
}

BOOST_AUTO_TEST_CASE(no_salt_and_salt_zero_differ) {
  BlockPool pool(16, kTokensPerBlock, true);
  auto table = compute(pool, {0, std::nullopt}, counting(9));
  BOOST_TEST(reusable_tokens(pool, {0, 0}, counting(9)) == 0);
  BOOST_TEST(reusable_tokens(pool, {0, std::nullopt}, counting(9)) == 8);
}

BOOST_AUTO_TEST_CASE(equal_content_computed_twice_ends_in_one_block) {
  BlockPool pool(8, kTokensPerBlock, true);
  const auto tokens = counting(10);
  BlockTable first;
  BlockTable second;
  BOOST_TEST(pool.try_grow(first, 10));
  BOOST_TEST(pool.try_grow(second, 10));
  BOOST_TEST(pool.num_used() == 6);
  pool.index_full_blocks(first, {}, tokens, 10);
  pool.index_full_blocks(second, {}, tokens, 10);
  BOOST_TEST(second.blocks[0] == first.blocks[0]);
  BOOST_TEST(second.blocks[1] == first.blocks[1]);
  BOOST_TEST(second.blocks[2] != first.blocks[2]);
  BOOST_TEST(pool.num_used() == 4);
  require_sound(pool);
}

BOOST_AUTO_TEST_CASE(the_least_recently_used_content_is_evicted_from_its_end) {
  BlockPool pool(6, kTokensPerBlock, true);
  const auto old_tokens = counting(9, 0);
  const auto new_tokens = counting(9, 100);
  auto old_table = compute(pool, {}, old_tokens);
  auto new_table = compute(pool, {}, new_tokens);
  pool.release(old_table);
  pool.release(new_table);
  BOOST_TEST(pool.num_cached() == 4);
  BlockTable grower;
  BOOST_TEST(pool.try_grow(grower, 3 * kTokensPerBlock));  // takes two free blocks and evicts one
  BOOST_TEST(reusable_tokens(pool, {}, old_tokens) == 4);
  BOOST_TEST(reusable_tokens(pool, {}, new_tokens) == 8);
  require_sound(pool);
  // Reusing the old content makes it the newer one.
  BlockTable user;
  BOOST_TEST(pool.reuse_prefix(user, {}, old_tokens) == 4);
  pool.release(user);
  BOOST_TEST(pool.try_grow(grower, 5 * kTokensPerBlock));
  BOOST_TEST(reusable_tokens(pool, {}, old_tokens) == 4);
  BOOST_TEST(reusable_tokens(pool, {}, new_tokens) == 0);
  require_sound(pool);
}

BOOST_AUTO_TEST_CASE(without_reuse_nothing_is_kept) {
  BlockPool pool(4, kTokensPerBlock, false);
  auto table = compute(pool, {}, counting(9));
  BOOST_TEST(reusable_tokens(pool, {}, counting(9)) == 0);
  pool.release(table);
  BOOST_TEST(pool.num_free() == 4);
  BOOST_TEST(pool.stats().missed_blocks == 0);
}

BOOST_AUTO_TEST_CASE(a_reset_forgets_cached_and_used_content) {
  BlockPool pool(8, kTokensPerBlock, true);
  auto cached = compute(pool, {}, counting(9, 0));
  pool.release(cached);
  auto used = compute(pool, {}, counting(9, 100));
  pool.reset_reuse();
  require_sound(pool);
  BOOST_TEST(pool.num_cached() == 0);
  BOOST_TEST(pool.num_used() == 3);
  BOOST_TEST(reusable_tokens(pool, {}, counting(9, 0)) == 0);
  BOOST_TEST(reusable_tokens(pool, {}, counting(9, 100)) == 0);
  // A table from before the reset no longer adds its blocks, because the KV that its first blocks were
  // computed from is unknown.
  auto longer = counting(13, 100);
  BOOST_TEST(pool.try_grow(used, 13));
  pool.index_full_blocks(used, {}, longer, 13);
  BOOST_TEST(reusable_tokens(pool, {}, longer) == 0);
  pool.release(used);
  BOOST_TEST(pool.num_free() == 8);
  auto again = compute(pool, {}, longer);
  BOOST_TEST(reusable_tokens(pool, {}, longer) == 12);
}

BOOST_AUTO_TEST_CASE(counters_tell_what_was_new_reused_and_missed) {
  BlockPool pool(8, kTokensPerBlock, true);
  auto first = compute(pool, {}, counting(9));
  BOOST_TEST(first.alloc_new_blocks == 3);
  BOOST_TEST(first.missed_blocks == 2);
  auto tokens = counting(13);
  tokens[8] = -1;
  auto second = compute(pool, {}, tokens);
  BOOST_TEST(second.reused_blocks == 2);
  BOOST_TEST(second.missed_blocks == 1);
  BOOST_TEST(second.alloc_new_blocks == 2);
  const KvCacheStats stats = pool.stats();
  BOOST_TEST(stats.max_num_blocks == 8);
  BOOST_TEST(stats.used_num_blocks == 5);
  BOOST_TEST(stats.free_num_blocks == 3);
  BOOST_TEST(stats.tokens_per_block == kTokensPerBlock);
  BOOST_TEST(stats.alloc_new_blocks == 5);
  BOOST_TEST(stats.reused_blocks == 2);
  BOOST_TEST(stats.missed_blocks == 3);
  BOOST_TEST(stats.alloc_total_blocks == 7);
  BOOST_TEST(stats.cache_hit_rate == 0.4);
}

/// Model of a block's memory: everything that its KV depends on.
struct Content {
  ReuseKey key;
  std::vector<std::int32_t> tokens;  // from the sequence's first token to the block's last
  bool operator==(const Content&) const = default;
};

struct SimulatedSequence {
  ReuseKey key;
  std::vector<std::int32_t> tokens;
  std::int32_t num_computed = 0;
  BlockTable table;
};

// Random sequences often share prefixes (few tokens, few keys). The test tracks the memory that the engine
// would have written, block by block; reused blocks must have exactly what the sequence would compute.
BOOST_DATA_TEST_CASE(random_use_reuses_exactly_equal_content,
                     boost::unit_test::data::xrange(sanitized(3, 12)), seed) {
  std::mt19937_64 random(static_cast<std::uint64_t>(seed));
  const auto below = [&](std::int32_t n) {
    return static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(n));
  };
  const std::int32_t num_blocks = 5 + below(40);
  const std::int32_t tokens_per_block = 1 + below(4);
  const std::int32_t alphabet = 1 + below(3);
  BlockPool pool(num_blocks, tokens_per_block, true);
  std::map<BlockId, Content> memory;
  std::vector<std::unique_ptr<SimulatedSequence>> sequences;
  std::int64_t reused = 0;

  const auto content_of = [&](const SimulatedSequence& sequence, std::int32_t block) {
    const auto end = sequence.tokens.begin() + (block + 1) * tokens_per_block;
    return Content{sequence.key, {sequence.tokens.begin(), end}};
  };

  for (int step = 0; step < 3000; ++step) {
    const std::int32_t action = below(10);
    if (action < 3) {
      auto sequence = std::make_unique<SimulatedSequence>();
      sequence->key.adapter_generation = static_cast<std::uint64_t>(below(2));
      if (below(3) == 0) sequence->key.cache_salt = static_cast<std::uint64_t>(below(2));
      sequence->tokens.resize(1 + below(6 * tokens_per_block));
      for (auto& token : sequence->tokens) token = below(alphabet);
      const auto match = pool.match_prefix(sequence->key, sequence->tokens);
      const std::int32_t available = pool.num_available();
      sequence->num_computed = pool.reuse_prefix(sequence->table, sequence->key, sequence->tokens);
      BOOST_TEST_REQUIRE(sequence->num_computed == match.num_blocks * tokens_per_block);
      BOOST_TEST_REQUIRE(pool.num_available() == available - match.num_unused_blocks);
      BOOST_TEST_REQUIRE(sequence->num_computed < static_cast<std::int32_t>(sequence->tokens.size()));
      for (std::int32_t i = 0; i < match.num_blocks; ++i) {
        BOOST_TEST_REQUIRE((memory.at(sequence->table.blocks[i]) == content_of(*sequence, i)));
      }
      reused += match.num_blocks;
      sequences.push_back(std::move(sequence));
    } else if (action < 8 && !sequences.empty()) {
      SimulatedSequence& sequence = *sequences[below(static_cast<std::int32_t>(sequences.size()))];
      const auto size = static_cast<std::int32_t>(sequence.tokens.size());
      if (sequence.num_computed == size) sequence.tokens.push_back(below(alphabet));
      const std::int32_t target =
          sequence.num_computed + 1 +
          below(static_cast<std::int32_t>(sequence.tokens.size()) - sequence.num_computed);
      const std::int32_t available = pool.num_available();
      const std::int32_t needed =
          pool.blocks_for(target) - static_cast<std::int32_t>(sequence.table.blocks.size());
      const bool grown = pool.try_grow(sequence.table, target);
      BOOST_TEST_REQUIRE(grown == (needed <= available));
      if (grown) {
        const std::int32_t first_full = sequence.num_computed / tokens_per_block;
        sequence.num_computed = target;
        for (std::int32_t i = first_full; i < target / tokens_per_block; ++i) {
          BOOST_TEST_REQUIRE(pool.num_users(sequence.table.blocks[i]) == 1);  // shared blocks are not written
          memory[sequence.table.blocks[i]] = content_of(sequence, i);
        }
        pool.index_full_blocks(sequence.table, sequence.key, sequence.tokens, target);
        for (std::int32_t i = 0; i < target / tokens_per_block; ++i) {
          BOOST_TEST_REQUIRE((memory.at(sequence.table.blocks[i]) == content_of(sequence, i)));
        }
      }
    } else if (action == 8 && !sequences.empty()) {
      const std::int32_t victim = below(static_cast<std::int32_t>(sequences.size()));
      pool.release(sequences[victim]->table);
      sequences.erase(sequences.begin() + victim);
    } else if (below(100) == 0) {
      pool.reset_reuse();
    }
    require_sound(pool);
    std::map<BlockId, std::int32_t> users;
    for (const auto& sequence : sequences) {
      std::set<BlockId> own(sequence->table.blocks.begin(), sequence->table.blocks.end());
      BOOST_TEST_REQUIRE(own.size() == sequence->table.blocks.size());
      for (const BlockId block : own) ++users[block];
    }
    for (BlockId block = 0; block < num_blocks; ++block)
      BOOST_TEST_REQUIRE(pool.num_users(block) == users[block]);
  }
  for (auto& sequence : sequences) pool.release(sequence->table);
  BOOST_TEST(pool.num_available() == num_blocks);
  BOOST_TEST(reused > 0);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::block_pool_test
