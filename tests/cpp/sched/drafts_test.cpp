#include <algorithm>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <functional>
#include <random>
#include <string>

#include "world.h"

namespace adaptrt::testing::drafts_test {
namespace {

using enum CapacitySchedulerPolicy;

/// Gives every sequence with a new token this many right drafts.
void draft_rightly(World& world, std::int32_t count) {
  world.make_drafts = [count](Sequence& sequence) {
    sequence.drafts = World::coming_tokens(sequence, count);
  };
}

std::int32_t num_drafts_of(const World& world, const Sequence& sequence) {
  const auto entry = std::ranges::find(world.plan.entries, &sequence, &PlannedSequence::sequence);
  return entry == world.plan.entries.end() ? -1 : entry->num_drafts;
}

BOOST_AUTO_TEST_SUITE(drafts)

BOOST_AUTO_TEST_CASE(right_drafts_are_tokens) {
  World world({.tokens_per_block = 4});
  draft_rightly(world, 3);
  Sequence& sequence = world.add(5, 12);
  world.step();
  BOOST_TEST(sequence.num_generated() == 1);
  world.step();
  BOOST_TEST(world.plan.num_draft_tokens == 3);
  BOOST_TEST(world.plan.num_tokens == 4);
  BOOST_TEST(world.plan.num_context_tokens == 0);
  BOOST_TEST(sequence.num_generated() == 5);
  BOOST_TEST(sequence.num_computed() == 9);
  world.run_to_the_end();
  BOOST_TEST(world.num_finished == 1);
}

BOOST_AUTO_TEST_CASE(wrong_drafts_leave_nothing_behind) {
  World world({.tokens_per_block = 4});
  world.make_drafts = [](Sequence& sequence) {
    sequence.drafts = World::coming_tokens(sequence, 6);
    sequence.drafts[2] += 1;
  };
  Sequence& sequence = world.add(6, 20);
  world.step();
  world.step();
  BOOST_TEST(sequence.num_generated() == 1 + 3);
  BOOST_TEST(sequence.num_computed() == 6 + 3);
  BOOST_TEST(sequence.memory.table.blocks.size() == 4U);  // for 13 tokens
  BOOST_TEST(sequence.memory.table.num_indexed == 2);
  world.run_to_the_end();  // reads only the KV of its own tokens
}

BOOST_AUTO_TEST_CASE(a_draft_without_a_token_behind_it_is_computed_again) {
  World world({});
  draft_rightly(world, 3);
  Sequence& sequence = world.add(5, 12);
  world.step();
  world.plan_only();
  BOOST_TEST(num_drafts_of(world, sequence) == 3);
  // The last row gave no token.
  sequence.tokens.insert(sequence.tokens.end(), sequence.drafts.begin(), sequence.drafts.end());
  world.scheduler.commit(world.plan);
  BOOST_TEST(sequence.num_computed() == 8);
  BOOST_TEST(sequence.is_decoding());
  world.require_sound();
  world.cancel(sequence);
}

BOOST_AUTO_TEST_CASE(blocks_of_accepted_drafts_can_be_reused) {
  World world({.tokens_per_block = 4});
  draft_rightly(world, 5);
  Sequence& first = world.add(3, 14);
  std::vector<std::int32_t> tokens;
  while (first.state != SequenceState::kFinished) {
    world.step();
    tokens = first.tokens;
  }
  tokens.resize(15);
  Sequence& second = world.add(tokens, 2);
  world.step();
  BOOST_TEST(second.memory.table.reused_blocks == 3);
  world.run_to_the_end();
}

BOOST_AUTO_TEST_CASE(drafts_of_the_tokens_after_the_prompt_come_with_its_last_chunk) {
  World world({.limits = limits(8, 8)});
  Sequence& sequence = world.add(12, 9);
  sequence.drafts = World::coming_tokens(sequence, 3);
  world.step();
  BOOST_TEST(num_drafts_of(world, sequence) == 0);
  world.step();
  BOOST_TEST(num_drafts_of(world, sequence) == 3);
  BOOST_TEST(world.plan.num_context_tokens == 4);
  BOOST_TEST(sequence.num_generated() == 4);
  world.run_to_the_end();
}

BOOST_AUTO_TEST_CASE(with_states_a_wrong_draft_takes_the_step_back) {
  World world({.tokens_per_block = 4, .has_states = true, .num_state_snapshots = 2});
  world.make_drafts = [](Sequence& sequence) {
    sequence.drafts = World::coming_tokens(sequence, 4);
    sequence.drafts[2] ^= 1;
  };
  Sequence& sequence = world.add(6, 20);
  while (sequence.num_generated() == 0) world.step();
  world.step();
  BOOST_TEST(world.plan.num_draft_tokens == 4);
  BOOST_TEST(sequence.num_generated() == 1 + 3);
  BOOST_TEST(sequence.num_computed() == 6);
  world.plan_only();
  BOOST_TEST(world.plan.num_tokens == 4);  // without drafts, which could take it back again
  BOOST_TEST(world.plan.num_draft_tokens == 0);
  BOOST_TEST(world.plan.state_copies.size() == 1U);
  world.run_planned();
  BOOST_TEST(sequence.num_computed() == 6 + 4);
  world.step();
  BOOST_TEST(world.plan.num_draft_tokens == 4);
  BOOST_TEST(world.memory.state_pool()->stats().num_snapshots <= 2);
  world.run_to_the_end();
  BOOST_TEST(world.num_finished == 1);
}

BOOST_AUTO_TEST_CASE(with_states_right_drafts_are_tokens) {
  World world({.tokens_per_block = 4, .has_states = true, .num_state_snapshots = 1});
  draft_rightly(world, 3);
  Sequence& a = world.add(2, 14);
  Sequence& b = world.add(2, 14);
  world.step();
  world.step();
  // One slot is there for saved states.
  BOOST_TEST(num_drafts_of(world, a) == 3);
  BOOST_TEST(num_drafts_of(world, b) == 0);
  BOOST_TEST(a.num_computed() == 2 + 4);
  world.step();
  BOOST_TEST(num_drafts_of(world, a) == 3);
  world.run_to_the_end();
  BOOST_TEST(world.num_finished == 2);
}

BOOST_AUTO_TEST_CASE(with_states_there_are_no_drafts_without_a_slot_to_save_them) {
  World world({.has_states = true, .num_state_snapshots = 0});
  draft_rightly(world, 3);
  Sequence& sequence = world.add(2, 8);
  world.step();
  world.step();
  BOOST_TEST(num_drafts_of(world, sequence) == 0);
  world.run_to_the_end();
}

BOOST_AUTO_TEST_CASE(with_states_a_failed_step_leaves_no_saved_ones) {
  World world({.has_states = true, .num_state_snapshots = 2});
  draft_rightly(world, 3);
  world.add(2, 8);
  world.step();
  world.plan_only();
  BOOST_TEST(world.plan.num_draft_tokens == 3);
  world.fail_step();
  BOOST_TEST(world.memory.state_pool()->stats().num_snapshots == 0);
  world.add(2, 8);
  world.run_to_the_end();
  BOOST_TEST(world.num_finished == 1);
}

BOOST_AUTO_TEST_CASE(drafts_end_before_the_last_token) {
  World world({});
  draft_rightly(world, 9);
  Sequence& sequence = world.add(3, 4);
  world.step();
  world.step();
  BOOST_TEST(world.plan.num_draft_tokens == 2);
  BOOST_TEST(sequence.num_generated() == 4);
  BOOST_TEST(world.num_finished == 1);
}

BOOST_AUTO_TEST_CASE(drafts_take_what_is_left_of_the_tokens) {
  World world({.limits = limits(8, 7)});
  draft_rightly(world, 4);
  Sequence& a = world.add(2, 20);
  Sequence& b = world.add(2, 20);
  world.step();
  world.step();
  BOOST_TEST(num_drafts_of(world, a) == 3);  // one of each sequence in turn
  BOOST_TEST(num_drafts_of(world, b) == 2);
  // A prompt that needs all tokens of the step gets them.
  Sequence& prompt = world.add(9, 2);
  world.step();
  BOOST_TEST(world.plan.num_draft_tokens == 0);
  BOOST_TEST(prompt.num_computed() == 5);
  world.run_to_the_end();
}

BOOST_AUTO_TEST_CASE(rows_of_a_step_with_drafts_are_limited) {
  SchedulerLimits few = limits(8, 64);
  few.max_rows_with_drafts = 5;
  World world({.limits = few});
  draft_rightly(world, 4);
  for (int i = 0; i < 4; ++i) world.add(2, 9);
  world.step();
  world.step();
  BOOST_TEST(world.plan.num_draft_tokens == 1);
  world.add(2, 30);
  world.add(2, 30);
  world.step();
  BOOST_TEST(world.plan.num_draft_tokens == 0);
  world.run_to_the_end();
}

BOOST_AUTO_TEST_CASE(drafts_preempt_no_sequence_and_delay_none) {
  // Five blocks: two sequences have two each, and one block is free.
  World world({.num_blocks = 5, .tokens_per_block = 4, .policy = kMaxUtilization, .limits = limits(8, 64)});
  draft_rightly(world, 6);
  Sequence& a = world.add(6, 9);
  Sequence& b = world.add(6, 9);
  world.step();
  world.plan_only();
  // Only up to the end of their blocks: a running sequence may need the free one next.
  BOOST_TEST(num_drafts_of(world, a) == 1);
  BOOST_TEST(num_drafts_of(world, b) == 1);
  BOOST_TEST(world.memory.num_available() == 1);
  world.run_planned();
  world.run_to_the_end();
  BOOST_TEST(world.num_finished == 2);
}

BOOST_AUTO_TEST_CASE(drafts_may_have_blocks_that_nobody_needs) {
  World world({.num_blocks = 8, .tokens_per_block = 4, .policy = kMaxUtilization, .limits = limits(8, 64)});
  draft_rightly(world, 6);
  Sequence& sequence = world.add(6, 12);
  world.step();
  world.plan_only();
  BOOST_TEST(num_drafts_of(world, sequence) == 6);
  world.run_planned();
  // While a sequence waits there are no drafts.
  world.add(24, 2);
  world.plan_only();
  BOOST_TEST(world.scheduler.waiting().size() == 1U);
  BOOST_TEST(num_drafts_of(world, sequence) <= 3);
  world.run_planned();
  world.run_to_the_end();
}

BOOST_AUTO_TEST_CASE(a_prompt_that_is_to_be_forked_has_no_drafts) {
  World world({});
  Sequence& parent = world.add(3, 6, {.num_sequences = 3});
  parent.drafts = World::coming_tokens(parent, 3);
  world.step();
  BOOST_TEST(num_drafts_of(world, parent) == 0);
  draft_rightly(world, 3);
  world.run_to_the_end();
  BOOST_TEST(world.num_finished == 3);
  BOOST_TEST(world.num_right_drafts > 0);
}

BOOST_AUTO_TEST_CASE(each_damage_to_planned_drafts_is_named) {
  const std::vector<std::pair<std::string, std::function<void(StepPlan&)>>> damages = {
      {"num_draft_tokens does not count the planned drafts", [](StepPlan& plan) { ++plan.num_draft_tokens; }},
      {"num_tokens does not count the planned tokens", [](StepPlan& plan) { ++plan.entries[0].num_drafts; }},
      {"is planned with drafts that it lacks", [](StepPlan& plan) { plan.entries[0].num_drafts = 5; }},
      {"is planned with drafts beyond max_tokens",
       [](StepPlan& plan) { plan.entries[0].sequence->max_tokens = 3; }},
      {"is planned with drafts before it was forked",
       [](StepPlan& plan) { plan.entries[0].sequence->num_forks = 1; }},
      {"is planned with drafts before its next token is due",
       [](StepPlan& plan) { plan.entries[0].wants_logits = false; }},
      {"drafts are planned although sequences had to be preempted",
       [](StepPlan& plan) { plan.preempted.push_back(plan.entries[0].sequence); }},
      {"is not planned although there are drafts", [](StepPlan& plan) { plan.entries.pop_back(); }},
  };
  World world({});
  draft_rightly(world, 4);
  world.add(3, 9);
  world.add(3, 9);
  world.step();
  world.plan_only();
  BOOST_TEST_REQUIRE(world.plan.num_draft_tokens == 8);
  for (const auto& [said, damage] : damages) {
    Sequence& sequence = *world.plan.entries[0].sequence;
    const auto problems = problems_of_damaged_plan(world, damage);
    sequence.max_tokens = 9;
    sequence.num_forks = 0;
    check_found(problems, said);
  }
  world.run_planned();
  world.run_to_the_end();
}

BOOST_AUTO_TEST_CASE(each_damage_to_drafts_with_states_is_named) {
  World world({.has_states = true, .num_state_snapshots = 2});
  draft_rightly(world, 4);
  world.add(3, 9);
  world.step();
  world.plan_only();
  BOOST_TEST_REQUIRE(world.plan.num_draft_tokens == 4);
  check_found(problems_of_damaged_plan(world, [](StepPlan& plan) { plan.entries[0].num_drafts = 0; }),
              "has drafts and no saved states, or the other way round");
  check_found(problems_of_damaged_plan(world, [](StepPlan& plan) { plan.entries[0].is_prefill = true; }),
              "has drafts after several tokens, which its states would lose too");
  world.run_to_the_end();
}

struct Setting {
  CapacitySchedulerPolicy policy;
  std::int32_t num_blocks;
  std::int32_t max_num_tokens;
  std::int64_t device_pages;
  /// -1: the engine keeps no states.
  std::int32_t num_state_snapshots = -1;
};

std::ostream& operator<<(std::ostream& out, const Setting& setting) {
  return out << "policy " << static_cast<int>(setting.policy) << ", blocks " << setting.num_blocks
             << ", step " << setting.max_num_tokens << ", pages " << setting.device_pages << ", snapshots "
             << setting.num_state_snapshots;
}

const std::vector<Setting> kSettings = {
    {kGuaranteedNoEvict, 24, 32, 0},   {kGuaranteedNoEvict, 60, 5, 3},  {kMaxUtilization, 14, 32, 0},
    {kMaxUtilization, 16, 6, 3},       {kStaticBatch, 40, 12, 0},       {kGuaranteedNoEvict, 60, 32, 3, 9},
    {kGuaranteedNoEvict, 60, 9, 0, 4}, {kMaxUtilization, 16, 32, 0, 5},
};

/// Random crowds with random drafts: every token reads its predecessors' KV, and each sequence gets the same
/// tokens as without drafts.
BOOST_DATA_TEST_CASE(drafts_change_no_token, boost::unit_test::data::make(kSettings), setting) {
  std::int64_t num_right = 0;
  for (unsigned seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    const auto draw = [&](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
    World world({.num_blocks = setting.num_blocks,
                 .tokens_per_block = 4,
                 .enable_block_reuse = seed % 3 != 0 || setting.num_state_snapshots > 0,
                 .partial_reuse = static_cast<PartialReuse>(seed % 2 * 2),
                 .policy = setting.policy,
                 .chunking = static_cast<ContextChunkingPolicy>(seed % 2),
                 .limits = limits(5, setting.max_num_tokens),
                 .has_states = setting.num_state_snapshots > 0,
                 .num_state_snapshots = std::max(setting.num_state_snapshots, 0),
                 .device_pages = setting.device_pages});
    world.make_drafts = [&](Sequence& sequence) {
      sequence.drafts = World::coming_tokens(sequence, draw(0, 9));
      if (!sequence.drafts.empty() && draw(0, 2) == 0)
        sequence.drafts[draw(0, 8) % sequence.drafts.size()] ^= 1;
    };
    for (int i = 0; i < 120; ++i) {
      if (draw(0, 2) == 0) {
        std::vector<std::int32_t> prompt(static_cast<std::size_t>(draw(1, 20)), 1);
        for (auto& token : prompt) token = draw(0, 1);
        const auto adapter =
            setting.device_pages > 0 ? world.adapter(static_cast<std::uint64_t>(draw(1, 4))) : nullptr;
        Sequence& sequence = world.add(std::move(prompt), draw(1, 14),
                                       {.adapter = adapter, .num_sequences = draw(0, 4) == 0 ? 2 : 1});
        world.make_drafts(sequence);
      }
      if (world.scheduler.empty()) continue;
      world.plan_only();
      if (world.plan.empty()) continue;
      if (draw(0, 40) == 0) {
        world.fail_step();
      } else {
        world.run_planned();
      }
    }
    world.run_to_the_end();
    num_right += world.num_right_drafts;
  }
  BOOST_TEST(num_right > 500);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::drafts_test
