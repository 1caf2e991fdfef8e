// Sequences that start within a block, from copies of other blocks.

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "world.h"

namespace adaptrt::testing::partial_reuse_test {
namespace {

using Tokens = std::vector<std::int32_t>;

constexpr auto kMaxUtilization = CapacitySchedulerPolicy::kMaxUtilization;

const PlannedSequence& entry_of(const World& world, const Sequence& sequence) {
  const auto found = std::ranges::find(world.plan.entries, &sequence, &PlannedSequence::sequence);
  BOOST_TEST_REQUIRE((found != world.plan.entries.end()));
  return *found;
}

BOOST_AUTO_TEST_SUITE(scheduler_partial_reuse)

BOOST_AUTO_TEST_CASE(the_common_start_of_a_cached_block_is_copied) {
  World world({.partial_reuse = PartialReuse::kCopy});
  world.add({1, 2, 3, 4, 5, 6, 7, 8}, 1);
  world.run_to_the_end();
  Sequence& second = world.add({1, 2, 3, 4, 5, 6, 9, 9, 9}, 2);
  world.plan_only();
  BOOST_TEST(entry_of(world, second).first_token == 6);
  BOOST_TEST(world.plan.num_tokens == 3);
  BOOST_TEST_REQUIRE(world.plan.copies.size() == 1U);
  BOOST_TEST(world.plan.copies[0].sequence == &second);
  BOOST_TEST(world.plan.copies[0].blocks.to == second.memory.table.blocks[1]);
  world.run_planned();
  BOOST_TEST(world.scheduler.pending_copies().empty());
  world.step();
  BOOST_TEST(world.plan.copies.empty());
  world.run_to_the_end();
  BOOST_TEST(world.num_finished == 2);
}

BOOST_AUTO_TEST_CASE(the_same_prompt_again_computes_one_token) {
  World world({.partial_reuse = PartialReuse::kCopy});
  world.add({1, 2, 3, 4, 5, 6, 7, 8}, 1);
  world.run_to_the_end();
  world.add({1, 2, 3, 4, 5, 6, 7, 8}, 3);
  world.step();
  BOOST_TEST(world.plan.num_tokens == 1);
  world.run_to_the_end();
}

BOOST_AUTO_TEST_CASE(without_copies_a_block_is_taken_over) {
  World world({.partial_reuse = PartialReuse::kTakeOver});
  world.add({1, 2, 3, 4, 5, 6, 7, 8}, 1);
  world.run_to_the_end();
  Sequence& second = world.add({1, 2, 3, 4, 5, 6, 9}, 2);
  world.plan_only();
  BOOST_TEST(entry_of(world, second).first_token == 6);
  BOOST_TEST(world.plan.copies.empty());
  world.run_planned();
  world.run_to_the_end();
  BOOST_TEST(world.memory.block_pool().stats().partially_reused_blocks == 1);
}

BOOST_AUTO_TEST_CASE(a_step_that_has_no_room_for_the_whole_prompt_has_room_for_its_end) {
  World world({.partial_reuse = PartialReuse::kCopy, .limits = limits(8, 9, false)});
  world.add({1, 2, 3, 4, 5, 6, 7, 8}, 1);
  world.run_to_the_end();
  Sequence& first = world.add({11, 12, 13, 14, 15, 16}, 1);
  Sequence& second = world.add({1, 2, 3, 4, 5, 6, 9, 9, 9}, 1);
  world.step();
  BOOST_CHECK(first.state == SequenceState::kFinished);
  BOOST_CHECK(second.state == SequenceState::kFinished);
}

BOOST_AUTO_TEST_CASE(sequences_that_start_together_copy_one_block) {
  World world({.num_blocks = 10, .partial_reuse = PartialReuse::kCopy});
  world.add({1, 2, 3, 4}, 1);
  world.run_to_the_end();
  for (std::int32_t last = 10; last < 14; ++last) world.add({1, 2, 3, last}, 4);
  world.step();
  BOOST_TEST(world.plan.copies.size() == 4U);
  BOOST_TEST(world.plan.num_tokens == 4);
  for (const PlannedCopy& copy : world.plan.copies) {
    BOOST_TEST(copy.blocks.from == world.plan.copies[0].blocks.from);
  }
  world.run_to_the_end();
  BOOST_TEST(world.num_finished == 5);
}

/// The same plan evicts the copied block for another sequence's tokens.
BOOST_AUTO_TEST_CASE(a_block_may_be_evicted_once_it_is_to_be_copied) {
  World world({.num_blocks = 4, .partial_reuse = PartialReuse::kCopy});
  world.add({1, 2, 3, 4}, 1);
  world.run_to_the_end();
  world.add({1, 2, 3, 9, 9}, 1);
  world.add({11, 12, 13, 14, 15, 16}, 1);
  world.plan_only();
  BOOST_TEST(world.plan.entries.size() == 2U);
  BOOST_TEST_REQUIRE(world.plan.copies.size() == 1U);
  BOOST_TEST(world.memory.block_pool().num_users(world.plan.copies[0].blocks.from) == 1);
  world.run_planned();
  BOOST_TEST(world.num_finished == 3);
}

BOOST_AUTO_TEST_CASE(a_failing_step_leaves_no_copy_behind) {
  World world({.partial_reuse = PartialReuse::kCopy});
  world.add({1, 2, 3, 4}, 1);
  world.run_to_the_end();
  world.add({1, 2, 3, 9}, 4);
  world.plan_only();
  BOOST_TEST(world.plan.copies.size() == 1U);
  world.fail_step();
  BOOST_TEST(world.scheduler.pending_copies().empty());
  BOOST_TEST(world.memory.block_pool().num_used() == 0);
}

BOOST_AUTO_TEST_CASE(whole_prompts_are_computed_where_that_is_wanted) {
  World world({.partial_reuse = PartialReuse::kCopy});
  world.add({1, 2, 3, 4, 5, 6}, 1);
  world.run_to_the_end();
  world.add({1, 2, 3, 9}, 1, {.compute_whole_prompt = true});
  world.step();
  BOOST_TEST(world.plan.num_tokens == 4);
  BOOST_TEST(world.plan.copies.empty());
}

BOOST_AUTO_TEST_CASE(preempted_sequences_resume_within_blocks) {
  World world({.num_blocks = 6, .partial_reuse = PartialReuse::kCopy, .policy = kMaxUtilization});
  for (std::int32_t i = 0; i < 3; ++i) world.add({1, 2, 3, 4, 5, i}, 12);
  world.run_to_the_end();
  BOOST_TEST(world.num_finished == 3);
  BOOST_TEST(world.memory.block_pool().stats().partially_reused_blocks > 0);
}

BOOST_AUTO_TEST_CASE(each_damage_to_the_copies_of_a_plan_is_named) {
  const std::vector<std::pair<std::string, std::function<void(StepPlan&)>>> damages = {
      {"copies are not those that sequences await", [](StepPlan& plan) { plan.copies.pop_back(); }},
      {"copies are not those that sequences await",
       [](StepPlan& plan) { std::swap(plan.copies[0].blocks.from, plan.copies[0].blocks.to); }},
      {"copies are not those that sequences await",
       [](StepPlan& plan) { plan.copies.push_back(plan.copies[0]); }},
      {"starts within a block that is not the copy of another",
       [](StepPlan& plan) { plan.copies.erase(plan.copies.begin()); }},
  };
  for (const auto& [said, damage] : damages) {
    World world({.partial_reuse = PartialReuse::kCopy});
    world.add({1, 2, 3, 4}, 1);
    world.run_to_the_end();
    world.add({1, 2, 3, 8}, 4);
    world.add({1, 2, 9, 9}, 4);
    world.plan_only();
    BOOST_TEST_REQUIRE(world.plan.copies.size() == 2U);
    check_found(problems_of_damaged_plan(world, damage), said);
  }
}

BOOST_AUTO_TEST_CASE(each_damage_to_a_pending_copy_is_named) {
  const std::vector<std::pair<std::string, std::function<void(Sequence&, Sequence&)>>> damages = {
      {"awaits a copy to a block that it does not write next",
       [](Sequence& first, Sequence& second) {
         std::swap(first.memory.table.blocks[0], second.memory.table.blocks[0]);
       }},
      {"awaits a copy and does not run",
       [](Sequence& first, Sequence&) { first.state = SequenceState::kFinished; }},
      {"awaits a copy to a block that it does not write next",
       [](Sequence& first, Sequence&) { first.memory.num_computed = 4; }},
  };
  for (const auto& [said, damage] : damages) {
    World world({.partial_reuse = PartialReuse::kCopy});
    world.add({1, 2, 3, 4}, 1);
    world.run_to_the_end();
    Sequence& first = world.add({1, 2, 3, 8, 9}, 4);
    Sequence& second = world.add({1, 2, 9, 9, 9}, 4);
    world.plan_only();
    BOOST_TEST(check_invariants(world.scheduler, nullptr).empty());
    damage(first, second);
    check_found(check_invariants(world.scheduler, nullptr), said);
  }
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::partial_reuse_test
