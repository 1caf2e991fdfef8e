// Plans of steps that begin before the tokens of the step before are known.

#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <memory>
#include <utility>

#include "world.h"

namespace adaptrt::testing::ahead_test {
namespace {

using enum CapacitySchedulerPolicy;

/// Ends the step of the world's plan, then makes `ahead` the plan.
void go_on(World& world, StepPlan& ahead) {
  world.scheduler.release_kept_leases();
  world.run_planned();
  world.scheduler.end_ahead();
  std::swap(world.plan, ahead);
  BOOST_TEST(check_invariants(world.plan, world.scheduler).empty());
}

BOOST_AUTO_TEST_SUITE(plans_ahead)

BOOST_AUTO_TEST_CASE(decodes_are_planned_one_step_ahead) {
  World world({});
  Sequence& first = world.add(5, 8);
  Sequence& second = world.add(7, 8);
  world.step();
  world.plan_only();
  StepPlan ahead;
  for (int i = 0; i < 5; ++i) {
    BOOST_TEST_REQUIRE(world.scheduler.plan_ahead(world.plan, ahead));
    world.require_sound();
    BOOST_TEST_REQUIRE(ahead.entries.size() == 2U);
    BOOST_TEST(ahead.num_tokens == 2);
    BOOST_TEST(ahead.num_generation_sequences == 2);
    for (const PlannedSequence& entry : ahead.entries) {
      BOOST_TEST(entry.first_token == entry.sequence->num_tokens());
      BOOST_TEST(entry.count == 1);
      BOOST_TEST(entry.wants_logits);
      BOOST_TEST(world.memory.blocks_to_grow(entry.sequence->memory, entry.end()) == 0);
    }
    go_on(world, ahead);
  }
  // The next decode gives the seventh of eight tokens.
  BOOST_TEST(first.num_generated() == 6);
  BOOST_TEST_REQUIRE(world.scheduler.plan_ahead(world.plan, ahead));
  go_on(world, ahead);
  BOOST_TEST(!world.scheduler.plan_ahead(world.plan, ahead));
  BOOST_TEST(ahead.empty());
  world.run_planned();
  BOOST_CHECK(first.state == SequenceState::kFinished);
  BOOST_CHECK(second.state == SequenceState::kFinished);
}

BOOST_AUTO_TEST_CASE(sequences_that_reach_their_limit_are_left_out) {
  World world({});
  Sequence& first = world.add(5, 3);
  Sequence& second = world.add(5, 9);
  world.step();
  world.step();
  world.plan_only();
  StepPlan ahead;
  BOOST_TEST_REQUIRE(world.scheduler.plan_ahead(world.plan, ahead));
  BOOST_TEST_REQUIRE(ahead.entries.size() == 1U);
  BOOST_TEST(ahead.entries[0].sequence == &second);
  go_on(world, ahead);
  BOOST_CHECK(first.state == SequenceState::kFinished);
}

BOOST_AUTO_TEST_CASE(a_place_that_becomes_free_goes_to_a_waiting_sequence) {
  World world({.limits = limits(2, 32)});
  world.add(5, 3);
  world.add(5, 9);
  Sequence& waiting = world.add(5, 2);
  world.step();
  world.plan_only();
  StepPlan ahead;
  BOOST_TEST_REQUIRE(world.scheduler.plan_ahead(world.plan, ahead));
  go_on(world, ahead);
  BOOST_TEST(!world.scheduler.plan_ahead(world.plan, ahead));
  BOOST_TEST(ahead.empty());
  world.run_planned();
  world.plan_only();
  BOOST_TEST(world.plans(waiting));
}

BOOST_AUTO_TEST_CASE(nothing_is_planned_ahead_while_prompts_run) {
  World world({.limits = limits(8, 8)});
  world.add(5, 9);
  world.add(20, 9);
  StepPlan ahead;
  for (int i = 0; i < 4; ++i) {
    world.plan_only();
    BOOST_TEST(world.plan.num_context_sequences > 0);
    BOOST_TEST(!world.scheduler.plan_ahead(world.plan, ahead));
    world.run_planned();
  }
  world.plan_only();
  BOOST_TEST(world.scheduler.plan_ahead(world.plan, ahead));
}

BOOST_AUTO_TEST_CASE(a_sequence_without_room_in_the_step_is_not_passed_over) {
  World world({.limits = limits(8, 2)});
  world.add(1, 9);
  world.add(1, 9);
  world.step();
  Sequence& prompt = world.add(1, 9);
  world.plan_only();
  StepPlan ahead;
  // It waits, but could not start.
  BOOST_TEST(!world.plans(prompt));
  BOOST_TEST(world.scheduler.plan_ahead(world.plan, ahead));
}

BOOST_AUTO_TEST_CASE(running_sequences_outside_the_plan_come_first) {
  World world({.limits = limits(8, 2)});
  world.add(1, 9, {.num_sequences = 3});
  world.step();
  world.plan_only();
  BOOST_TEST(world.scheduler.running().size() == 3U);
  BOOST_TEST(world.plan.entries.size() == 2U);
  StepPlan ahead;
  BOOST_TEST(!world.scheduler.plan_ahead(world.plan, ahead));
}

BOOST_AUTO_TEST_CASE(arrivals_are_planned_before_the_next_look_ahead) {
  World world({});
  world.add(5, 9);
  world.step();
  world.plan_only();
  StepPlan ahead;
  BOOST_TEST_REQUIRE(world.scheduler.plan_ahead(world.plan, ahead));
  world.add(5, 9);
  go_on(world, ahead);
  BOOST_TEST(!world.scheduler.plan_ahead(world.plan, ahead));
  world.run_planned();
  world.plan_only();
  BOOST_TEST(world.plan.started.size() == 1U);
}

BOOST_AUTO_TEST_CASE(waiting_sequences_may_start_after_another_has_left) {
  World world({.limits = limits(2, 32)});
  world.add(5, 20);
  Sequence& second = world.add(5, 20);
  Sequence& waiting = world.add(5, 2);
  world.step();
  world.plan_only();
  StepPlan ahead;
  BOOST_TEST_REQUIRE(world.scheduler.plan_ahead(world.plan, ahead));
  world.scheduler.release_kept_leases();
  world.run_planned();
  world.cancel(second);
  world.scheduler.end_ahead();
  std::swap(world.plan, ahead);
  BOOST_TEST_REQUIRE(world.plan.entries.size() == 1U);
  BOOST_TEST(world.plan.num_tokens == 1);
  BOOST_TEST(world.plan.num_generation_sequences == 1);
  BOOST_TEST(!world.scheduler.plan_ahead(world.plan, ahead));
  world.run_planned();
  world.plan_only();
  BOOST_TEST(world.plans(waiting));
}

BOOST_AUTO_TEST_CASE(drafts_and_beams_are_not_planned_ahead) {
  World drafting({});
  drafting.make_drafts = [](Sequence& sequence) { sequence.drafts = World::coming_tokens(sequence, 2); };
  drafting.add(5, 9);
  drafting.step();
  drafting.plan_only();
  BOOST_TEST(drafting.plan.num_draft_tokens == 2);
  StepPlan ahead;
  BOOST_TEST(!drafting.scheduler.plan_ahead(drafting.plan, ahead));
  World searching({});
  searching.add(5, 9, {.num_sequences = 2, .are_beams = true});
  searching.step();
  searching.plan_only();
  BOOST_TEST(searching.plan.num_generation_sequences == 2);
  BOOST_TEST(!searching.scheduler.plan_ahead(searching.plan, ahead));
}

BOOST_AUTO_TEST_CASE(no_step_is_planned_ahead_if_blocks_would_run_out) {
  World world({.num_blocks = 5, .policy = kMaxUtilization});
  world.add(7, 9);
  world.add(7, 9);
  world.step();
  world.plan_only();  // four blocks hold eight tokens each
  StepPlan ahead;
  // Both need another block, and one is left.
  BOOST_TEST(world.memory.num_available() == 1);
  BOOST_TEST(!world.scheduler.plan_ahead(world.plan, ahead));
  BOOST_TEST(ahead.empty());
  BOOST_TEST(world.memory.num_available() == 1);
  world.run_planned();
  world.plan_only();
  BOOST_TEST(world.plan.preempted.size() == 1U);
  // The preempted sequence may resume.
  BOOST_TEST(!world.scheduler.plan_ahead(world.plan, ahead));
}

BOOST_AUTO_TEST_CASE(a_lease_is_kept_until_the_step_ahead_is_computed) {
  World world({.device_pages = 1});
  Sequence& adapted = world.add(5, 9, {.adapter = world.adapter(1)});
  world.add(5, 9);
  world.step();
  Sequence& other = world.add(5, 9, {.adapter = adapted.adapter});
  world.plan_only();
  world.run_planned();
  world.plan_only();
  StepPlan ahead;
  const std::shared_ptr<const HostAdapter> adapter = adapted.adapter;
  BOOST_TEST_REQUIRE(world.scheduler.plan_ahead(world.plan, ahead));
  world.scheduler.release_kept_leases();
  world.run_planned();
  const std::weak_ptr<const DeviceLease> lease = adapted.lease;
  world.cancel(adapted);
  BOOST_TEST(ahead.entries.size() == 2U);
  BOOST_TEST(!lease.expired());
  BOOST_TEST(world.scheduler.kept_leases().size() == 1U);
  world.cancel(other);
  BOOST_TEST(world.scheduler.kept_leases().size() == 2U);
  BOOST_TEST(world.cache().is_leased(*adapter));
  world.require_sound();
  world.scheduler.end_ahead();
  std::swap(world.plan, ahead);
  world.scheduler.release_kept_leases();
  BOOST_TEST(lease.expired());
  BOOST_TEST(!world.cache().is_leased(*adapter));
  // Sequences that no step reads ahead keep none.
  world.run_planned();
  Sequence& later = world.add(5, 9, {.adapter = adapter});
  world.step();
  world.cancel(later);
  BOOST_TEST(world.scheduler.kept_leases().empty());
}

BOOST_AUTO_TEST_CASE(a_sequence_may_wait_for_an_adapter_whose_lease_is_kept) {
  World world({.limits = limits(2, 32), .device_pages = 1});
  const std::shared_ptr<const HostAdapter> adapter = world.adapter(1);
  Sequence& adapted = world.add(5, 9, {.adapter = adapter});
  world.add(5, 9);
  world.add(5, 9, {.adapter = adapter});
  world.step();
  world.plan_only();
  StepPlan ahead;
  BOOST_TEST_REQUIRE(world.scheduler.plan_ahead(world.plan, ahead));
  world.run_planned();
  world.cancel(adapted);  // checks the invariants
  world.scheduler.end_ahead();
  world.scheduler.release_kept_leases();
  world.require_sound();
}

BOOST_AUTO_TEST_CASE(adapters_that_are_awaited_come_first) {
  // The first adapter has all pages.
  World full({.device_pages = 1});
  full.add(5, 9, {.adapter = full.adapter(1)});
  full.step();
  full.add(5, 9, {.adapter = full.adapter(2)});
  full.plan_only();
  BOOST_TEST(full.plan.awaits_adapter_room);
  StepPlan ahead;
  BOOST_TEST(!full.scheduler.plan_ahead(full.plan, ahead));

  Door door;
  door.shut();
  World loading({.device_pages = 2, .num_load_workers = 1, .in_load = [&] { door.pass(); }});
  loading.add(5, 9);
  loading.step();
  loading.add(5, 9, {.adapter = loading.adapter(1)});
  loading.plan_only();
  BOOST_TEST(loading.plan.awaits_loads);
  BOOST_TEST(!loading.scheduler.plan_ahead(loading.plan, ahead));
  door.open();
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::ahead_test
