// Slots for states, snapshots of them, and the order of their copies.

#include "adaptrt/kv/state_pool.h"

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/kv/sequence_memory.h"
#include "pools.h"

namespace adaptrt::testing::state_pool_test {
namespace {

using Copies = std::vector<StateCopy>;

Copies copies_of(const StatePool& pool) {
  return {pool.copies().begin(), pool.copies().end()};
}

void require_sound(const StatePool& pool, const std::vector<StateSlot>& held) {
  for (const auto& violation : pool.check_invariants(held)) BOOST_ERROR(violation);
}

/// Three sequences, two snapshots, eight blocks.
struct Fixture {
  StatePool pool{3, 2, 8};
  SequenceMemory memory;
};

BOOST_AUTO_TEST_SUITE(state_pool)

BOOST_AUTO_TEST_CASE(wrong_sizes_are_refused) {
  BOOST_CHECK_THROW(StatePool(0, 1, 1), ConfigError);
  BOOST_CHECK_THROW(StatePool(1, -1, 1), ConfigError);
  BOOST_CHECK_THROW(StatePool(1, 1, -1), ConfigError);
}

BOOST_FIXTURE_TEST_CASE(sequences_take_slots_and_give_them_back, Fixture) {
  const StateSlot first = pool.take();
  const StateSlot second = pool.take();
  const StateSlot third = pool.take();
  BOOST_TEST(!pool.has_free());
  BOOST_CHECK_THROW((void)pool.take(), std::logic_error);
  require_sound(pool, {first, second, third});
  pool.give_back(second);
  BOOST_TEST(pool.take() == second);
  BOOST_TEST(pool.stats().used_slots == 3);
}

BOOST_FIXTURE_TEST_CASE(a_copy_ends_with_the_slot_that_awaits_it, Fixture) {
  const StateSlot parent = pool.take();
  const StateSlot child = pool.take();
  pool.copy(parent, child, memory);
  pool.give_back(parent);  // its states are still copied
  BOOST_TEST((copies_of(pool) == Copies{{parent, child, &memory}}));
  pool.give_back(child);
  BOOST_TEST(pool.copies().empty());
  require_sound(pool, {});
}

BOOST_FIXTURE_TEST_CASE(the_least_recently_used_snapshot_is_replaced, Fixture) {
  const StateSlot slot = pool.take();
  BOOST_TEST(pool.take_snapshot(0, slot));
  BOOST_TEST(!pool.take_snapshot(0, slot));
  BOOST_TEST(pool.take_snapshot(1, slot));
  pool.commit_copies();
  BOOST_TEST(!pool.take_snapshot(0, slot));  // counts as a use
  BOOST_TEST(pool.take_snapshot(2, slot));
  BOOST_TEST(pool.snapshot_after(1) == kNoStateSlot);
  BOOST_TEST(pool.snapshot_after(0) != kNoStateSlot);
  pool.commit_copies();
  pool.reuse_snapshot(0, slot, memory);
  pool.commit_copies();
  BOOST_TEST(pool.take_snapshot(3, slot));
  BOOST_TEST(pool.snapshot_after(2) == kNoStateSlot);
  BOOST_TEST(pool.stats().taken_snapshots == 4);
  BOOST_TEST(pool.stats().reused_snapshots == 1);
  BOOST_TEST(pool.stats().num_snapshots == 2);
  require_sound(pool, {slot});
}

BOOST_FIXTURE_TEST_CASE(snapshots_in_planned_copies_are_not_replaced, Fixture) {
  const StateSlot slot = pool.take();
  BOOST_TEST(pool.take_snapshot(0, slot));
  BOOST_TEST(pool.take_snapshot(1, slot));
  BOOST_TEST(!pool.take_snapshot(2, slot));
  pool.commit_copies();
  const StateSlot other = pool.take();
  pool.reuse_snapshot(0, other, memory);
  BOOST_TEST(pool.take_snapshot(2, slot));
  BOOST_TEST(pool.snapshot_after(0) != kNoStateSlot);
  BOOST_TEST(pool.snapshot_after(1) == kNoStateSlot);
  require_sound(pool, {slot, other});
}

// The snapshot is made, read and dropped before one step: its slot is free only after the copies.
BOOST_FIXTURE_TEST_CASE(a_dropped_snapshot_can_be_read_once_more, Fixture) {
  const StateSlot slot = pool.take();
  BOOST_TEST(pool.take_snapshot(0, slot));
  const StateSlot snapshot = pool.snapshot_after(0);
  const StateSlot other = pool.take();
  pool.reuse_snapshot(0, other, memory);
  pool.drop_snapshot(0);
  BOOST_TEST((copies_of(pool) == Copies{{slot, snapshot, nullptr}, {snapshot, other, &memory}}));
  BOOST_TEST(pool.take_snapshot(1, slot));
  BOOST_TEST(!pool.take_snapshot(2, slot));
  require_sound(pool, {slot, other});
  pool.commit_copies();
  BOOST_TEST(pool.take_snapshot(2, slot));
  require_sound(pool, {slot, other});
}

BOOST_FIXTURE_TEST_CASE(a_dropped_snapshot_is_not_made, Fixture) {
  const StateSlot slot = pool.take();
  BOOST_TEST(pool.take_snapshot(0, slot));
  pool.drop_snapshot(0);
  pool.drop_snapshot(0);
  BOOST_TEST(pool.copies().empty());
  BOOST_TEST(pool.stats().num_snapshots == 0);
  require_sound(pool, {slot});
}

BOOST_FIXTURE_TEST_CASE(a_failed_step_makes_no_snapshot, Fixture) {
  const StateSlot slot = pool.take();
  BOOST_TEST(pool.take_snapshot(0, slot));
  pool.commit_copies();
  BOOST_TEST(pool.take_snapshot(1, slot));
  const StateSlot other = pool.take();
  pool.reuse_snapshot(1, other, memory);
  BOOST_CHECK_THROW(StatePool(pool).fail_copies(), std::logic_error);
  pool.give_back(other);
  pool.fail_copies();
  BOOST_TEST(pool.snapshot_after(0) != kNoStateSlot);
  BOOST_TEST(pool.snapshot_after(1) == kNoStateSlot);
  BOOST_TEST(pool.copies().empty());
  require_sound(pool, {slot});
}

BOOST_FIXTURE_TEST_CASE(saved_states_take_the_slot_of_a_snapshot, Fixture) {
  const StateSlot slot = pool.take();
  BOOST_TEST(pool.take_snapshot(0, slot));
  BOOST_TEST(pool.take_snapshot(1, slot));
  BOOST_TEST(pool.save(slot) == kNoStateSlot);  // both snapshots are still to be made
  pool.commit_copies();
  const StateSlot saved = pool.save(slot);
  BOOST_TEST(pool.snapshot_after(0) == kNoStateSlot);
  BOOST_TEST(pool.snapshot_after(1) != kNoStateSlot);
  BOOST_TEST((copies_of(pool) == Copies{{slot, saved, nullptr}}));
  BOOST_TEST(pool.stats().num_snapshots == 1);
  for (const auto& violation : pool.check_invariants(std::vector{slot}, std::vector{saved})) {
    BOOST_ERROR(violation);
  }
  pool.commit_copies();
  pool.restore(saved, slot, memory);
  BOOST_TEST((copies_of(pool) == Copies{{saved, slot, &memory}}));
  BOOST_TEST(pool.stats().num_snapshots == 1);
  require_sound(pool, {slot});
  // The saved states are read once more, so that only the other snapshot's slot can be had.
  const StateSlot again = pool.save(slot);
  BOOST_TEST(again != kNoStateSlot);
  BOOST_TEST(again != saved);
  BOOST_TEST((copies_of(pool) == Copies{{saved, slot, &memory}, {slot, again, nullptr}}));
  pool.drop_saved(again);
  BOOST_TEST((copies_of(pool) == Copies{{saved, slot, &memory}}));
  pool.commit_copies();
  require_sound(pool, {slot});
  BOOST_TEST(pool.stats().num_snapshots == 0);
}

BOOST_FIXTURE_TEST_CASE(wrong_slots_are_found, Fixture) {
  const auto found = [&](const std::vector<StateSlot>& held, const std::string& words) {
    const auto violations = pool.check_invariants(held);
    return std::ranges::any_of(violations,
                               [&](const auto& text) { return text.find(words) != std::string::npos; });
  };
  const StateSlot slot = pool.take();
  BOOST_TEST(found({}, "state slot 0 has 0 uses"));
  BOOST_TEST(found({slot, slot}, "state slot 0 has 2 uses"));
  BOOST_TEST(found({slot, 3}, "state slot 3 is not in its part"));
  const StateSlot saved = pool.save(slot);
  BOOST_TEST(found({slot}, "1 states are saved, and sequences hold 0"));
  pool.drop_saved(saved);
  pool.copy(slot, slot, memory);
  BOOST_TEST(found({slot}, "copied to itself"));
  pool.copy(1, slot, memory);
  BOOST_TEST(found({slot}, "two states are copied to one slot"));
  pool.copy(slot, 4, memory);
  BOOST_TEST(found({slot}, "a slot of the other part"));
}

BOOST_AUTO_TEST_SUITE_END()

/// A pool of blocks of four tokens with three sequences and two snapshots, and the states in its slots: the
/// sum of the tokens.
struct MemoryFixture {
  SequenceMemoryPool pool{{.num_blocks = 16,
                           .tokens_per_block = kTokensPerBlock,
                           .num_state_slots = 3,
                           .num_state_snapshots = 2}};
  std::vector<std::int64_t> states = std::vector<std::int64_t>(5);

  /// Computes the next tokens of a sequence in a step of its own.
  void compute(SequenceMemory& memory, const SequenceContent& content, std::int32_t count) {
    const std::int32_t first = memory.num_computed;
    BOOST_TEST_REQUIRE(pool.try_grow(memory, first + count));
    for (const StateCopy& copy : pool.state_copies()) {
      states.at(static_cast<std::size_t>(copy.to)) = states.at(static_cast<std::size_t>(copy.from));
    }
    std::int64_t& state = states.at(static_cast<std::size_t>(memory.states.slot));
    const auto sum = [&](std::int32_t end) {
      return std::accumulate(content.tokens.begin(), content.tokens.begin() + end, std::int64_t{0});
    };
    if (first > 0) BOOST_TEST(state == sum(first));
    state = sum(first + count);
    pool.commit_state_copies();
    pool.keep(memory, first + count);
    pool.share(memory, content);
  }
  void require_sound(const std::vector<const SequenceMemory*>& held) {
    for (const auto& violation : pool.check_invariants(held)) BOOST_ERROR(violation);
    for (const auto* memory : held) {
      for (const auto& violation : pool.check_invariants(*memory)) BOOST_ERROR(violation);
    }
  }
  static SequenceContent content_of(const std::vector<std::int32_t>& tokens, std::int32_t prompt_length) {
    return {.tokens = tokens, .prompt_length = prompt_length};
  }
};

BOOST_FIXTURE_TEST_SUITE(states_of_sequences, MemoryFixture)

BOOST_AUTO_TEST_CASE(a_prompt_is_reused_up_to_its_snapshot) {
  const auto tokens = counting(12);
  const auto content = content_of(tokens, 12);
  SequenceMemory first;
  BOOST_TEST(pool.tokens_to_snapshot(first, content) == 8);  // the last token is always computed
  compute(first, content, 8);
  BOOST_TEST(pool.tokens_to_snapshot(first, content) > 1000);
  compute(first, content, 4);
  require_sound({&first});
  const ReusablePrefix prefix = pool.find_prefix(content);
  BOOST_TEST(prefix.num_tokens == 8);
  BOOST_TEST(prefix.num_blocks == 2);
  BOOST_TEST(prefix.num_unused_blocks == 0);
  SequenceMemory second;
  BOOST_TEST((pool.reuse_prefix(second, content) == BlockCopy{}));
  BOOST_TEST(second.num_computed == 8);
  require_sound({&first, &second});
  compute(second, content, 4);
  pool.release(first);
  pool.release(second);
  require_sound({});
  BOOST_TEST(pool.state_pool()->stats().reused_snapshots == 1);
}

BOOST_AUTO_TEST_CASE(blocks_without_a_snapshot_are_computed_again) {
  const auto tokens = counting(12);
  SequenceMemory first;
  compute(first, content_of(tokens, 12), 12);  // it did not stop at 8
  BOOST_TEST(pool.find_prefix(content_of(tokens, 12)).num_tokens == 0);
  SequenceMemory second;
  static_cast<void>(pool.reuse_prefix(second, content_of(tokens, 12)));
  BOOST_TEST(second.num_computed == 0);
  BOOST_TEST(second.states.num_shared_tokens == 8);
  pool.release(first);
  pool.release(second);
}

BOOST_AUTO_TEST_CASE(the_end_of_a_shared_beginning_gets_a_snapshot) {
  const auto tokens = counting(14);
  auto other = counting(14);
  other[6] = 99;
  SequenceMemory first;
  compute(first, content_of(tokens, 14), 12);
  SequenceMemory second;
  static_cast<void>(pool.reuse_prefix(second, content_of(other, 14)));
  BOOST_TEST(pool.tokens_to_snapshot(second, content_of(other, 14)) == 4);
  compute(second, content_of(other, 14), 4);
  BOOST_TEST(pool.tokens_to_snapshot(second, content_of(other, 14)) == 8);
  other[5] = 98;
  BOOST_TEST(pool.find_prefix(content_of(other, 14)).num_tokens == 4);
  require_sound({&first, &second});
  pool.release(first);
  pool.release(second);
}

BOOST_AUTO_TEST_CASE(the_base_keeps_its_states_for_adapters_that_act_later) {
  const auto tokens = counting(14);
  auto content = content_of(tokens, 14);
  content.key = {.adapter_generation = 5, .adapter_from = 6};
  SequenceMemory first;
  BOOST_TEST(pool.tokens_to_snapshot(first, content) == 4);
  compute(first, content, 4);
  BOOST_TEST(pool.tokens_to_snapshot(first, content) == 8);
  compute(first, content, 8);
  BOOST_TEST(pool.find_prefix(content_of(tokens, 14)).num_tokens == 4);
  content.key.adapter_generation = 6;
  BOOST_TEST(pool.find_prefix(content).num_tokens == 4);
  content.key.cache_salt = 1;
  BOOST_TEST(pool.find_prefix(content).num_tokens == 0);
  content.key = {.adapter_generation = 5, .adapter_from = 6};
  BOOST_TEST(pool.find_prefix(content).num_tokens == 12);
  pool.release(first);
}

BOOST_AUTO_TEST_CASE(wrong_drafts_take_the_states_back) {
  const auto tokens = counting(20);
  const auto content = content_of(tokens, 6);
  SequenceMemory memory;
  compute(memory, content, 4);
  compute(memory, content, 2);
  const auto held = [&] { return std::vector<const SequenceMemory*>{&memory}; };
  // A step with three drafts, of which one is right.
  BOOST_TEST(pool.try_save_states(memory));
  BOOST_TEST(pool.try_save_states(memory));  // they are saved once
  require_sound(held());
  BOOST_TEST_REQUIRE(pool.try_grow(memory, 10));
  for (const StateCopy& copy : pool.state_copies()) {
    states.at(static_cast<std::size_t>(copy.to)) = states.at(static_cast<std::size_t>(copy.from));
  }
  states.at(static_cast<std::size_t>(memory.states.slot)) = -1;
  pool.commit_state_copies();
  pool.keep(memory, 8, 2);
  BOOST_TEST(memory.num_computed == 6);
  pool.share(memory, content);
  require_sound(held());
  compute(memory, content, 3);  // reads the states after six tokens
  // A step whose drafts are right.
  BOOST_TEST(pool.try_save_states(memory));
  compute(memory, content, 4);
  BOOST_TEST(memory.num_computed == 13);
  BOOST_TEST(memory.states.saved == kNoStateSlot);
  // A sequence that ends in the planned step.
  BOOST_TEST(pool.try_save_states(memory));
  pool.release(memory);
  require_sound({});
  BOOST_TEST(pool.state_copies().empty());
  SequenceMemory other;
  BOOST_TEST_REQUIRE(pool.try_grow(other, 4));
  BOOST_CHECK_THROW(pool.keep(other, 3, 1), std::logic_error);
  pool.release(other);
}

BOOST_AUTO_TEST_CASE(an_answer_keeps_its_newest_snapshot) {
  const auto tokens = counting(40);
  const auto content = content_of(tokens, 6);
  SequenceMemory memory;
  compute(memory, content, 4);
  compute(memory, content, 2);
  for (std::int32_t length = 6; length < 30; ++length) compute(memory, content, 1);
  BOOST_TEST(pool.state_pool()->stats().num_snapshots == 2);
  BOOST_TEST(pool.find_prefix(content_of(tokens, 40)).num_tokens == 28);
  BOOST_TEST(pool.find_prefix(content_of(counting(20), 20)).num_tokens == 4);
  require_sound({&memory});
  pool.release(memory);
  auto beam = content;
  beam.continues_later = false;
  pool.reset_reuse();
  BOOST_TEST(pool.state_pool()->stats().num_snapshots == 0);
  compute(memory, beam, 4);
  compute(memory, beam, 8);
  BOOST_TEST(pool.find_prefix(content_of(tokens, 40)).num_tokens == 4);
  pool.release(memory);
  require_sound({});
}

BOOST_AUTO_TEST_CASE(an_evicted_block_takes_its_snapshot_along) {
  const auto tokens = counting(12);
  SequenceMemory memory;
  compute(memory, content_of(tokens, 12), 8);
  pool.release(memory);
  BOOST_TEST(pool.state_pool()->stats().num_snapshots == 1);
  const auto others = counting(64, 100);
  compute(memory, content_of(others, 80), 64);
  BOOST_TEST(pool.state_pool()->stats().num_snapshots == 0);
  require_sound({&memory});
  pool.release(memory);
}

BOOST_AUTO_TEST_CASE(blocks_from_before_a_reset_get_no_snapshot) {
  const auto tokens = counting(12);
  SequenceMemory memory;
  compute(memory, content_of(tokens, 12), 8);
  BOOST_TEST(pool.state_pool()->stats().num_snapshots == 1);
  pool.reset_reuse();
  BOOST_TEST(pool.state_pool()->stats().num_snapshots == 0);
  pool.share(memory, content_of(tokens, 12));  // as after a step whose drafts were all wrong
  BOOST_TEST(pool.state_pool()->stats().num_snapshots == 0);
  require_sound({&memory});
  pool.release(memory);
  // The same blocks, with other tokens.
  const auto others = counting(12, 100);
  compute(memory, content_of(others, 12), 12);
  BOOST_TEST(pool.find_prefix(content_of(others, 12)).num_tokens == 0);
  pool.release(memory);
}

BOOST_AUTO_TEST_CASE(a_fork_copies_the_states_once) {
  const auto tokens = counting(12);
  const auto content = content_of(tokens, 8);
  SequenceMemory parent;
  compute(parent, content, 4);
  compute(parent, content, 4);
  static_cast<void>(pool.try_grow(parent, 8));
  const std::size_t num_before = pool.state_copies().size();  // of the snapshot
  SequenceMemory child;
  BlockCopy copy;
  BOOST_TEST(pool.try_fork(parent, child, copy));
  BOOST_TEST((copy == BlockCopy{}));
  BOOST_TEST_REQUIRE(pool.state_copies().size() == num_before + 1);
  BOOST_TEST((pool.state_copies().back() ==
              StateCopy{.from = parent.states.slot, .to = child.states.slot, .holder = &child}));
  require_sound({&parent, &child});
  SequenceMemory third;
  BOOST_TEST(pool.try_fork(parent, third, copy));
  SequenceMemory fourth;
  BOOST_TEST(!pool.try_fork(parent, fourth, copy));
  BOOST_TEST(!pool.try_grow(fourth, 1));
  BOOST_TEST(fourth.blocks().empty());
  pool.release(parent);
  compute(child, content, 4);
  compute(third, content, 1);
  pool.release(child);
  pool.release(third);
  require_sound({});
}

BOOST_AUTO_TEST_CASE(without_snapshots_nothing_is_reused) {
  SequenceMemoryPool none({.num_blocks = 8, .tokens_per_block = kTokensPerBlock, .num_state_slots = 1});
  const auto tokens = counting(12);
  const auto content = content_of(tokens, 12);
  SequenceMemory memory;
  BOOST_TEST(none.tokens_to_snapshot(memory, content) > 1000);
  BOOST_TEST(none.try_grow(memory, 8));
  none.keep(memory, 8);
  none.share(memory, content);
  BOOST_TEST(none.find_prefix(content).num_tokens == 0);
  none.release(memory);
}

BOOST_AUTO_TEST_CASE(each_damage_is_named) {
  const auto tokens = counting(8);
  const auto found = [&](const SequenceMemory& memory, const std::string& words) {
    auto violations = pool.check_invariants(std::vector<const SequenceMemory*>{&memory});
    for (const auto& violation : pool.check_invariants(memory)) violations.push_back(violation);
    return std::ranges::any_of(violations,
                               [&](const auto& text) { return text.find(words) != std::string::npos; });
  };
  SequenceMemory memory;
  compute(memory, content_of(tokens, 8), 4);
  const StateSlot slot = std::exchange(memory.states.slot, kNoStateSlot);
  BOOST_TEST(found(memory, "has computed tokens and no slot for their states"));
  BOOST_TEST(found(memory, "has 0 uses"));
  memory.states.slot = slot;
  pool.release(memory);
  static_cast<void>(pool.reuse_prefix(memory, content_of(tokens, 8)));
  const StateSlot awaits = std::exchange(memory.states.slot, 1);
  BOOST_TEST(found(memory, "copied to a slot that its sequence does not hold"));
  memory.states.slot = awaits;
  pool.release(memory);
  SequenceMemoryPool none({.num_blocks = 8, .tokens_per_block = kTokensPerBlock});
  memory.states.slot = 0;
  const auto violations = none.check_invariants(memory);
  BOOST_TEST_REQUIRE(violations.size() == 1U);
  BOOST_TEST(violations[0] == "has a slot for states, of which there are none");
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::state_pool_test
