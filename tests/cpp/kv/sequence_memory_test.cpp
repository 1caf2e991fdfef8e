#include "adaptrt/kv/sequence_memory.h"

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "adaptrt/core/error.h"
#include "pools.h"

namespace adaptrt::testing::sequence_memory_test {
namespace {

using Held = std::vector<const SequenceMemory*>;

EncoderTokens encoder_tokens(std::int32_t count) {
  return std::make_shared<const std::vector<std::int32_t>>(counting(count));
}

SequenceContent content_of(const std::vector<std::int32_t>& tokens) {
  return {.tokens = tokens, .prompt_length = static_cast<std::int32_t>(tokens.size())};
}

bool names(const std::vector<std::string>& violations, const std::string& words) {
  return std::ranges::any_of(violations,
                             [&](const auto& text) { return text.find(words) != std::string::npos; });
}

/// A pool of ten blocks that reuses them, also in part.
struct Fixture {
  SequenceMemoryPool pool{{.num_blocks = 10,
                           .tokens_per_block = kTokensPerBlock,
                           .num_cross_blocks = 5,
                           .partial_reuse = PartialReuse::kCopy}};

  /// Computes `num_tokens` tokens.
  void compute(SequenceMemory& memory, std::int32_t num_tokens) {
    BOOST_TEST_REQUIRE(pool.try_grow(memory, num_tokens));
    pool.keep(memory, num_tokens);
  }
  void require_sound(const Held& held) const {
    for (const auto& violation : pool.check_invariants(held)) BOOST_ERROR(violation);
    for (const SequenceMemory* memory : held) {
      for (const auto& violation : pool.check_invariants(*memory)) BOOST_ERROR(violation);
    }
  }
};

BOOST_AUTO_TEST_SUITE(sequence_memory)

BOOST_FIXTURE_TEST_CASE(a_sequence_grows_and_gives_everything_back, Fixture) {
  SequenceMemory memory;
  pool.reserve(memory, 30);
  BOOST_TEST(memory.blocks().capacity() >= 8U);
  BOOST_TEST(pool.blocks_to_grow(memory, 9) == 3);
  BOOST_TEST(pool.room_after(memory, 2) == 32);
  BOOST_TEST(pool.try_grow(memory, 9));
  BOOST_TEST(memory.num_computed == 0);
  pool.keep(memory, 9);
  BOOST_TEST(memory.num_blocks() == 3);
  BOOST_TEST(pool.num_available() == 7);
  BOOST_TEST(pool.blocks_to_grow(memory, 12) == 0);
  BOOST_TEST(pool.blocks_to_grow(memory, 3) == 0);
  BOOST_TEST(pool.room_after(memory, 7) == 3);
  BOOST_TEST(!pool.try_grow(memory, 41));
  BOOST_TEST(memory.num_blocks() == 3);
  require_sound({&memory});

  pool.release(memory);
  BOOST_TEST(memory.num_computed == 0);
  BOOST_TEST(memory.num_blocks() == 0);
  BOOST_TEST(memory.table.alloc_new_blocks == 3);
  BOOST_TEST(pool.num_available() == 10);
  require_sound({});
}

BOOST_FIXTURE_TEST_CASE(tokens_that_a_step_took_back_are_computed_again_in_their_blocks, Fixture) {
  SequenceMemory memory;
  compute(memory, 6);
  BOOST_TEST(pool.try_grow(memory, 10));  // for four drafts
  pool.keep(memory, 7);
  BOOST_TEST(memory.num_computed == 7);
  BOOST_TEST(memory.num_blocks() == 3);
  require_sound({&memory});
  const auto before = memory.blocks();
  compute(memory, 11);
  BOOST_TEST(memory.blocks() == before);
  pool.release(memory);
}

BOOST_FIXTURE_TEST_CASE(only_tokens_that_stayed_are_shared, Fixture) {
  const auto tokens = counting(12);
  SequenceMemory memory;
  BOOST_TEST(pool.try_grow(memory, 12));
  pool.keep(memory, 7);
  pool.share(memory, content_of(tokens));
  BOOST_TEST(memory.table.num_indexed == 1);
  BOOST_TEST(pool.find_prefix(content_of(tokens)).num_tokens == 4);
  require_sound({&memory});
  pool.release(memory);
}

BOOST_FIXTURE_TEST_CASE(a_sequence_starts_with_what_another_has_computed, Fixture) {
  const auto tokens = counting(10);
  SequenceMemory first;
  compute(first, 10);
  pool.share(first, content_of(tokens));

  auto similar = counting(12);
  similar[6] = 99;
  const ReusablePrefix while_used = pool.find_prefix(content_of(similar));
  BOOST_TEST(while_used.num_tokens == 6);
  BOOST_TEST(while_used.num_blocks == 1);
  BOOST_TEST(while_used.num_unused_blocks == 0);
  pool.release(first);
  BOOST_TEST(pool.find_prefix(content_of(similar)).num_unused_blocks == 1);

  SequenceMemory second;
  const BlockCopy copy = pool.reuse_prefix(second, content_of(similar));
  BOOST_TEST(second.num_computed == 6);
  BOOST_TEST_REQUIRE(second.num_blocks() == 2);
  BOOST_TEST(copy.to == second.blocks()[1]);
  BOOST_TEST(copy.from != copy.to);
  BOOST_TEST(pool.check_invariants(second, copy).empty());
  require_sound({&second});
  pool.release(second);

  SequenceMemory other;
  const BlockCopy none = pool.reuse_prefix(other, content_of(counting(8, 50)));
  BOOST_TEST((none == BlockCopy{}));
  BOOST_TEST(other.num_computed == 0);
}

/// Retention of the whole prompt with a low priority.
const KvCacheRetentionConfig kLow{.token_range_retention_configs = {{.token_start = 0, .priority = 0}}};

BOOST_FIXTURE_TEST_CASE(shared_blocks_have_the_retention_of_their_sequence, Fixture) {
  const auto lasting = counting(12);
  const auto cheap = counting(12, 100);
  SequenceMemory first;
  compute(first, 12);
  pool.share(first, content_of(lasting));
  SequenceMemory second;
  compute(second, 12);
  pool.share(second, {.tokens = cheap, .prompt_length = 12, .retention = &kLow});
  pool.release(first);
  pool.release(second);  // later, so that only its retention makes it go first
  compute(first, 28);
  BOOST_TEST(pool.find_prefix(content_of(cheap)).num_blocks == 0);
  BOOST_TEST(pool.find_prefix(content_of(lasting)).num_blocks == 2);
  pool.release(first);
}

BOOST_FIXTURE_TEST_CASE(reused_blocks_get_the_retention_of_their_new_sequence, Fixture) {
  const auto lasting = counting(12);
  const auto cheap = counting(13, 100);
  SequenceMemory first;
  compute(first, 12);
  pool.share(first, content_of(lasting));
  SequenceMemory second;
  compute(second, 13);
  pool.share(second, content_of(cheap));
  pool.release(first);
  pool.release(second);
  BOOST_TEST(
      (pool.reuse_prefix(second, {.tokens = cheap, .prompt_length = 13, .retention = &kLow}) == BlockCopy{}));
  BOOST_TEST(second.num_computed == 12);
  pool.release(second);
  compute(first, 28);
  BOOST_TEST(pool.find_prefix(content_of(cheap)).num_blocks == 0);
  BOOST_TEST(pool.find_prefix(content_of(lasting)).num_blocks == 2);
  pool.release(first);
  require_sound({});
}

BOOST_FIXTURE_TEST_CASE(a_fork_shares_what_is_full_and_copies_the_rest, Fixture) {
  SequenceMemory parent;
  compute(parent, 10);
  parent.cross_counts.missed_blocks = 7;
  pool.take_encoder_input(parent, {}, encoder_tokens(5));
  BOOST_TEST(pool.blocks_to_fork(parent) == 1);

  SequenceMemory child;
  BlockCopy copy;
  BOOST_TEST(pool.try_fork(parent, child, copy));
  BOOST_TEST(child.num_computed == 10);
  BOOST_TEST(child.cross == parent.cross);
  BOOST_TEST(child.cross_counts.missed_blocks == 0);
  BOOST_TEST((copy == BlockCopy{.from = parent.blocks()[2], .to = child.blocks()[2]}));
  BOOST_TEST(pool.may_write(child, 10, 12));
  BOOST_TEST(pool.may_write(child, 10, 40));
  BOOST_TEST(!pool.may_write(child, 7, 8));
  require_sound({&parent, &child});
  BOOST_TEST(pool.num_available() == 6);

  BOOST_TEST_REQUIRE(pool.try_grow(parent, 36));
  SequenceMemory late;
  BOOST_TEST(!pool.try_fork(parent, late, copy));
  BOOST_TEST(late.num_computed == 0);
  BOOST_TEST(late.cross == nullptr);
  pool.keep(parent, 36);
  BOOST_TEST(pool.blocks_to_fork(parent) == 0);
  BOOST_TEST(pool.try_fork(parent, late, copy));
  BOOST_TEST((copy == BlockCopy{}));
  for (SequenceMemory* memory : {&parent, &child, &late}) pool.release(*memory);
  require_sound({});
}

BOOST_FIXTURE_TEST_CASE(forks_need_the_blocks_that_they_do_not_share, Fixture) {
  BOOST_TEST(pool.blocks_for_forks(9, 9, 0) == 3);
  BOOST_TEST(pool.blocks_for_forks(9, 8, 2) == 3 + 2 * 1);
  BOOST_TEST(pool.blocks_for_forks(9, 7, 2) == 3 + 2 * 2);
}

BOOST_FIXTURE_TEST_CASE(encoder_inputs_are_shared_and_given_back, Fixture) {
  const auto input = encoder_tokens(9);
  SequenceMemory first;
  BOOST_TEST(pool.has_encoder_room(20));
  BOOST_TEST(!pool.has_encoder_room(21));
  BOOST_TEST(!pool.can_reuse_encoder_input({}, input));
  BOOST_TEST(!pool.reuse_encoder_input(first, {}, input));
  pool.take_encoder_input(first, {}, input);
  BOOST_TEST(!first.cross->content().is_written);
  pool.commit_encoder_input(first);
  BOOST_TEST(first.cross->content().is_written);
  BOOST_TEST(first.cross_counts.missed_blocks == 3);
  BOOST_TEST(first.cross_counts.alloc_new_blocks == 3);
  BOOST_TEST(!pool.has_encoder_room(9));

  SequenceMemory second;
  BOOST_TEST(pool.can_reuse_encoder_input({}, input));
  BOOST_TEST(pool.reuse_encoder_input(second, {}, input));
  BOOST_TEST(second.cross == first.cross);
  BOOST_TEST(second.cross_counts.reused_blocks == 3);
  require_sound({&first, &second});
  for (SequenceMemory* memory : {&first, &second}) pool.release(*memory);
  BOOST_TEST(first.cross == nullptr);
  BOOST_TEST(pool.has_encoder_room(20));
  require_sound({});
}

BOOST_AUTO_TEST_CASE(engines_without_kv_or_encoder_hold_no_blocks) {
  SequenceMemoryPool pool({.tokens_per_block = kTokensPerBlock});
  BOOST_TEST(!pool.has_encoder());
  BOOST_TEST(pool.cross_pool() == nullptr);
  SequenceMemory memory;
  pool.reserve(memory, 100);
  BOOST_TEST(pool.try_grow(memory, 100));
  pool.keep(memory, 100);
  BOOST_TEST(memory.num_blocks() == 0);
  BOOST_TEST(pool.check_invariants(memory).empty());
  BOOST_TEST(pool.check_invariants(Held{&memory}).empty());
  BOOST_CHECK_THROW(SequenceMemoryPool({.num_blocks = -1, .tokens_per_block = 4}), ConfigError);
  BOOST_CHECK_THROW(SequenceMemoryPool({.num_blocks = 1, .tokens_per_block = 4, .num_cross_blocks = -1}),
                    ConfigError);
}

BOOST_AUTO_TEST_CASE(each_damage_is_named) {
  struct Damage {
    std::string said;
    std::function<void(SequenceMemory&)> inflict;
  };
  const std::vector<Damage> damages = {
      {"has a block twice", [](SequenceMemory& memory) { memory.table.blocks[1] = memory.table.blocks[0]; }},
      {"has a block table that does not cover its computed tokens",
       [](SequenceMemory& memory) { memory.num_computed = 13; }},
      {"has indexed more blocks than it has", [](SequenceMemory& memory) { memory.table.num_indexed = 4; }},
      {"has indexed blocks that are not computed", [](SequenceMemory& memory) { memory.num_computed = 7; }},
      {"users, but is in 0 running sequences' tables",
       [](SequenceMemory& memory) { memory.table.blocks.pop_back(); }},
      {"free, cached and used blocks are not all blocks",
       [](SequenceMemory& memory) { memory.table.blocks.pop_back(); }},
      {"blocks of encoder inputs are used by no running sequence",
       [](SequenceMemory& memory) { memory.cross = nullptr; }},
      {"awaits a copy to a block that it does not write next",
       [](SequenceMemory& memory) { memory.num_computed = 7; }},
      {"awaits a copy to a block that it shares",
       [](SequenceMemory& memory) { std::swap(memory.table.blocks[0], memory.table.blocks[1]); }},
  };
  for (const auto& [said, inflict] : damages) {
    Fixture f;
    const auto tokens = counting(12);
    SequenceMemory first;
    f.compute(first, 12);
    f.pool.share(first, content_of(tokens));
    SequenceMemory second;
    auto similar = counting(11);
    similar[9] = 99;
    BlockCopy copy = f.pool.reuse_prefix(second, content_of(similar));
    f.pool.take_encoder_input(second, {}, encoder_tokens(4));
    f.require_sound({&first, &second});
    BOOST_TEST(f.pool.check_invariants(second, copy).empty());
    const auto holder = second.cross;  // the input stays in use
    const auto before = second.table;
    inflict(second);
    if (said == "awaits a copy to a block that it shares") copy.to = second.blocks()[0];
    auto found = f.pool.check_invariants(Held{&first, &second});
    for (const auto& violation : f.pool.check_invariants(second)) found.push_back(violation);
    for (const auto& violation : f.pool.check_invariants(second, copy)) found.push_back(violation);
    BOOST_TEST(names(found, said), said);
    second.table = before;
    f.pool.release(second);
    f.pool.release(first);
  }
  Fixture f;
  SequenceMemory memory;
  f.compute(memory, 1);
  const BlockCopy to_itself{.from = memory.blocks()[0], .to = memory.blocks()[0]};
  const auto found = f.pool.check_invariants(memory, to_itself);
  BOOST_TEST(names(found, "awaits a copy of a block to itself"));

  SequenceMemoryPool no_encoder({.num_blocks = 1, .tokens_per_block = 4});
  SequenceMemory with_input;
  f.pool.take_encoder_input(with_input, {}, encoder_tokens(1));
  const auto problems = no_encoder.check_invariants(with_input);
  BOOST_TEST(names(problems, "has blocks for an encoder input, of which there are none"));
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::sequence_memory_test
