// Requests of several sequences: they start as one, and fork when the prompt is computed.

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <functional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "adaptrt/core/error.h"
#include "world.h"

namespace adaptrt::testing::fork_test {
namespace {

using enum CapacitySchedulerPolicy;

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

BOOST_AUTO_TEST_SUITE(forks)

BOOST_AUTO_TEST_CASE(the_prompt_is_computed_once_and_its_full_blocks_are_shared) {
  World world({});
  Sequence& first = world.add(10, 5, {.num_sequences = 3});
  world.step();
  BOOST_TEST(world.plan.entries.size() == 1U);
  BOOST_TEST(world.plan.num_tokens == 10);
  BOOST_TEST(world.plan.copies.empty());
  const auto running = world.scheduler.running();
  BOOST_TEST_REQUIRE(running.size() == 3U);
  BOOST_TEST(world.scheduler.pending_copies().size() == 2U);
  BOOST_TEST(world.memory.block_pool().num_used() == 2 + 3);
  for (std::size_t i = 0; i < 3; ++i) {
    BOOST_TEST(running[i]->index == static_cast<std::int32_t>(i));
    BOOST_TEST(running[i]->memory.table.blocks[0] == first.memory.table.blocks[0]);
    BOOST_TEST(running[i]->memory.table.blocks[1] == first.memory.table.blocks[1]);
  }
  world.step();
  BOOST_TEST(world.plan.num_generation_sequences == 3);
  BOOST_TEST(world.plan.copies.size() == 2U);
  BOOST_TEST(world.scheduler.pending_copies().empty());
  world.step();
  BOOST_TEST(world.plan.copies.empty());
  world.run_to_the_end();
  BOOST_TEST(world.num_finished == 3);
  BOOST_TEST(world.memory.block_pool().num_used() == 0);
}

BOOST_AUTO_TEST_CASE(tables_of_forks_have_room_for_all_their_tokens) {
  World world({});
  world.add(10, 30, {.num_sequences = 3});
  world.step();
  BOOST_TEST_REQUIRE(world.scheduler.running().size() == 3U);
  for (const Sequence* sequence : world.scheduler.running()) {
    BOOST_TEST(sequence->memory.blocks().capacity() >= 10U);
  }
  world.run_to_the_end();
}

BOOST_AUTO_TEST_CASE(a_prompt_of_whole_blocks_is_shared_without_copies) {
  World world({});
  world.add(8, 5, {.num_sequences = 4});
  world.step();
  BOOST_TEST(world.memory.block_pool().num_used() == 2);
  BOOST_TEST(world.scheduler.pending_copies().empty());
  world.run_to_the_end();
  BOOST_TEST(world.num_finished == 4);
}

BOOST_AUTO_TEST_CASE(siblings_share_a_lease_until_the_last_of_them_ends) {
  World world({.device_pages = 1});
  Sequence& first = world.add(3, 4, {.adapter = world.adapter(1), .num_sequences = 2});
  const std::shared_ptr<const HostAdapter> adapter = first.adapter;
  world.step();
  world.cancel(first);
  BOOST_TEST(world.cache().is_leased(*adapter));
  BOOST_TEST(world.cache().stats().device_hits == 0);
  world.run_to_the_end();
  BOOST_TEST(!world.cache().is_leased(*adapter));
}

BOOST_AUTO_TEST_CASE(a_request_starts_when_there_is_room_for_all_its_sequences) {
  World world({.limits = limits(4, 64)});
  world.add(4, 6, {.num_sequences = 2});
  Sequence& three = world.add(4, 3, {.num_sequences = 3});
  Sequence& behind = world.add(4, 3);
  world.step();
  BOOST_CHECK(three.state == SequenceState::kWaiting);  // two places are left
  BOOST_CHECK(behind.state == SequenceState::kWaiting);
  while (three.state == SequenceState::kWaiting) world.step();
  BOOST_TEST(world.num_finished == 2);
  BOOST_CHECK(behind.state == SequenceState::kRunning);  // the fourth place
  world.run_to_the_end();
  BOOST_TEST(world.num_finished == 6);
}

BOOST_AUTO_TEST_CASE(blocks_are_promised_to_sequences_before_they_are_forked) {
  // Each sequence needs up to 2 blocks in addition to the shared one: 1 + 3 * 2.
  World world({.num_blocks = 8, .tokens_per_block = 4, .limits = limits(8, 3)});
  world.add(6, 6, {.num_sequences = 3});
  Sequence& other = world.add(3, 3);  // 2 blocks
  world.step();
  BOOST_TEST(world.scheduler.num_promised_blocks() == 7 - 1);
  BOOST_TEST(world.scheduler.num_promised_forks() == 2);
  BOOST_CHECK(other.state == SequenceState::kWaiting);
  while (!world.scheduler.empty()) {
    world.step();
    BOOST_TEST_REQUIRE(world.plan.preempted.empty());
  }
  BOOST_TEST(world.num_finished == 4);
}

BOOST_AUTO_TEST_CASE(the_capacity_check_counts_all_sequences) {
  World world({.num_blocks = 7, .tokens_per_block = 4, .limits = limits(3, 64)});
  BOOST_TEST(!world.scheduler.check_capacity(6, 6, 3).has_value());
  const auto blocks = world.scheduler.check_capacity(6, 8, 3);
  BOOST_TEST_REQUIRE(blocks.has_value());
  BOOST_TEST(contains(*blocks, "max_tokens = 8 and 3 sequences needs 10 KV blocks of 4 tokens; there are 7"));
  const auto batch = world.scheduler.check_capacity(6, 1, 4);
  BOOST_TEST_REQUIRE(batch.has_value());
  BOOST_TEST(contains(*batch, "4 sequences; accepted: 1 to max_batch_size = 3"));
  BOOST_TEST(world.scheduler.check_capacity(6, 1, 0).has_value());
  BOOST_CHECK_THROW(world.add(6, 8, {.num_sequences = 3}), RequestError);
  // They end with their first token, so nothing is forked.
  BOOST_TEST(!world.scheduler.check_capacity(28, 1, 3).has_value());
  World preempted(
      {.num_blocks = 7, .tokens_per_block = 4, .policy = kMaxUtilization, .limits = limits(3, 64)});
  BOOST_TEST(!preempted.scheduler.check_capacity(6, 8, 3).has_value());
  BOOST_TEST(preempted.scheduler.check_capacity(6, 24, 3).has_value());
}

BOOST_AUTO_TEST_CASE(without_blocks_forked_sequences_wait_as_if_preempted) {
  World world({.num_blocks = 4, .tokens_per_block = 4, .policy = kMaxUtilization, .limits = limits(8, 64)});
  world.add(10, 6, {.num_sequences = 4});
  world.step();
  BOOST_TEST(world.scheduler.running().size() == 2U);
  BOOST_TEST(world.scheduler.waiting().size() == 2U);
  BOOST_TEST(world.scheduler.num_preempted() == 2);
  // The prompt is not charged again when they compute it.
  for (const Sequence* sequence : world.scheduler.waiting().list()) BOOST_TEST(sequence->num_charged == 10);
  world.run_to_the_end();
  BOOST_TEST(world.num_finished == 4);
  BOOST_TEST(world.scheduler.num_preempted() == 0);
}

BOOST_AUTO_TEST_CASE(the_copy_is_made_although_the_parent_has_gone) {
  World world({.num_blocks = 5, .tokens_per_block = 4, .limits = limits(8, 64)});
  Sequence& first = world.add(6, 4, {.num_sequences = 2});
  world.step();
  world.cancel(first);
  BOOST_TEST(world.scheduler.pending_copies().size() == 1U);
  // The source block now belongs to another sequence.
  world.add(7, 1);
  world.run_to_the_end();
  BOOST_TEST(world.num_finished == 2);
}

BOOST_AUTO_TEST_CASE(a_sequence_that_goes_takes_its_copy_along) {
  World world({});
  world.add(6, 4, {.num_sequences = 3});
  world.step();
  world.cancel(*world.scheduler.running()[1]);
  BOOST_TEST_REQUIRE(world.scheduler.pending_copies().size() == 1U);
  BOOST_TEST(world.scheduler.pending_copies()[0].sequence->index == 2);
  world.run_to_the_end();
  BOOST_TEST(world.num_finished == 2);
}

BOOST_AUTO_TEST_CASE(a_failing_step_ends_sequences_whose_copies_it_would_have_made) {
  World world({.limits = limits(8, 2)});
  world.add(6, 4, {.num_sequences = 3});
  while (world.scheduler.running().size() < 3) world.step();
  world.plan_only();
  BOOST_TEST(world.plan.entries.size() == 2U);
  BOOST_TEST(world.plan.copies.size() == 2U);
  world.fail_step();
  BOOST_TEST(world.scheduler.pending_copies().empty());
  BOOST_TEST(world.memory.block_pool().num_used() == 0);
  BOOST_TEST(world.scheduler.empty());
}

BOOST_AUTO_TEST_CASE(copies_are_made_of_sequences_that_the_step_has_no_tokens_for) {
  World world({.limits = limits(8, 3)});
  world.add(3, 6, {.num_sequences = 5});
  world.step();
  world.plan_only();
  BOOST_TEST(world.plan.entries.size() == 3U);
  BOOST_TEST(world.plan.copies.size() == 4U);
  world.run_planned();
  world.run_to_the_end();
  BOOST_TEST(world.num_finished == 5);
}

BOOST_AUTO_TEST_CASE(only_what_was_promised_is_forked) {
  World world({});
  Sequence& parent = world.add(4, 4);
  Sequence& child = world.make(parent.tokens, 4, {});
  child.index = 1;
  child.tokens.push_back(0);
  BOOST_CHECK_THROW(world.scheduler.fork(parent, child), std::logic_error);  // it does not run
  world.step();
  BOOST_CHECK_THROW(world.scheduler.fork(parent, child), std::logic_error);
  world.run_to_the_end();
}

BOOST_AUTO_TEST_CASE(each_damage_to_a_fork_is_named) {
  const std::vector<std::pair<std::string, std::function<void(World&, Sequence&, Sequence&)>>> damages = {
      {"awaits a copy to a block that it does not write next",
       [](World&, Sequence& first, Sequence& second) {
         std::swap(first.memory.table.blocks.back(), second.memory.table.blocks.back());
       }},
      {"awaits a copy and does not run",
       [](World&, Sequence&, Sequence& second) { second.state = SequenceState::kFinished; }},
      {"users, but is in", [](World&, Sequence& first, Sequence&) { first.memory.table.blocks.pop_back(); }},
      {"has a block twice",
       [](World&, Sequence&, Sequence& second) {
         second.memory.table.blocks[1] = second.memory.table.blocks[0];
       }},
      {"more sequences are to be forked than there is room for",
       [](World&, Sequence& first, Sequence&) { first.num_forks = 100; }},
      {"has been forked more often than it may",
       [](World&, Sequence& first, Sequence&) { first.num_forks = -1; }},
      {"runs out of order or twice", [](World&, Sequence&, Sequence& second) { second.index = 0; }},
  };
  for (const auto& [said, damage] : damages) {
    World world({});
    Sequence& first = world.add(10, 5, {.num_sequences = 2});
    world.step();
    Sequence& second = *world.scheduler.running()[1];
    const auto before = std::pair(first.memory.table.blocks, second.memory.table.blocks);
    BOOST_TEST(check_invariants(world.scheduler, nullptr).empty());
    damage(world, first, second);
    check_found(check_invariants(world.scheduler, nullptr), said);
    std::tie(first.memory.table.blocks, second.memory.table.blocks) = before;
  }
}

BOOST_AUTO_TEST_CASE(each_damage_to_a_plan_of_forks_is_named) {
  const std::vector<std::pair<std::string, std::function<void(StepPlan&)>>> damages = {
      {"copies are not those that sequences await", [](StepPlan& plan) { plan.copies.pop_back(); }},
      {"copies are not those that sequences await",
       [](StepPlan& plan) { std::swap(plan.copies[0].blocks.from, plan.copies[0].blocks.to); }},
      {"copies are not those that sequences await",
       [](StepPlan& plan) { plan.copies.push_back(plan.copies[0]); }},
      {"would write to a shared block",
       [](StepPlan& plan) {
         Sequence& sequence = *plan.entries[0].sequence;
         std::swap(sequence.memory.table.blocks[0], sequence.memory.table.blocks.back());
       }},
  };
  for (const auto& [said, damage] : damages) {
    World world({});
    world.add(10, 5, {.num_sequences = 3});
    world.step();
    world.plan_only();
    check_found(problems_of_damaged_plan(world, damage), said);
  }
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::fork_test
