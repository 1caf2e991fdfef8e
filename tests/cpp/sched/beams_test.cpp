// Beams: sequences of one request, some of which continue from others after a step.

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "adaptrt/core/error.h"
#include "world.h"

namespace adaptrt::testing::beams_test {
namespace {

using enum CapacitySchedulerPolicy;

bool contains(const std::vector<std::string>& texts, const std::string& part) {
  return std::ranges::any_of(texts,
                             [&](const std::string& text) { return text.find(part) != std::string::npos; });
}

BOOST_AUTO_TEST_SUITE(beams)

BOOST_AUTO_TEST_CASE(a_beam_that_is_given_up_goes_on_with_anothers_blocks) {
  World world({});
  Sequence& first = world.add(6, 8, {.num_sequences = 3, .are_beams = true});
  world.step();
  const std::vector<Sequence*> beams = world.beams_of(first);
  BOOST_TEST_REQUIRE(beams.size() == 3U);
  BOOST_TEST(world.memory.block_pool().num_used() == 1 + 3);
  world.plan_only();
  BOOST_TEST(world.plan.num_generation_sequences == 3);
  BOOST_TEST(world.plan.copies.size() == 2U);
  world.scheduler.commit(world.plan);
  // Two of them continue from the second, within its second block.
  for (const std::size_t i : {0, 2}) beams[i]->tokens = beams[1]->tokens;
  const std::vector<BeamMove> moves = {{beams[1], beams[0]}, {beams[1], beams[2]}};
  world.scheduler.move_beams(moves);
  for (Sequence* beam : beams) beam->tokens.push_back(beam->index);
  world.require_sound();
  BOOST_TEST(world.memory.block_pool().num_used() == 1 + 3);
  const auto copies = world.scheduler.pending_copies();
  BOOST_TEST_REQUIRE(copies.size() == 2U);
  for (const PlannedCopy& copy : copies) {
    BOOST_TEST(copy.blocks.from == beams[1]->memory.table.blocks[1]);
    BOOST_TEST(copy.blocks.to == copy.sequence->memory.table.blocks[1]);
    BOOST_TEST(copy.sequence->num_computed() == 7);
  }
  world.plan_only();
  BOOST_TEST(world.plan.copies.size() == 2U);
  BOOST_TEST(world.plan.num_generation_sequences == 3);
  world.cancel(first);
  BOOST_TEST(world.memory.block_pool().num_used() == 0);
}

BOOST_AUTO_TEST_CASE(beams_at_the_end_of_a_block_share_it_without_copies) {
  World world({});
  Sequence& first = world.add(7, 8, {.num_sequences = 4, .are_beams = true});
  world.step();
  const std::vector<Sequence*> beams = world.beams_of(first);
  world.plan_only();
  world.scheduler.commit(world.plan);
  std::vector<BeamMove> moves;
  for (const std::size_t i : {1, 2, 3}) {
    beams[i]->tokens = first.tokens;
    moves.push_back({&first, beams[i]});
  }
  world.scheduler.move_beams(moves);
  for (Sequence* beam : beams) beam->tokens.push_back(beam->index);
  world.require_sound();
  BOOST_TEST(world.scheduler.pending_copies().empty());
  BOOST_TEST(world.memory.block_pool().num_used() == 2);
}

BOOST_AUTO_TEST_CASE(a_beam_waits_for_those_that_a_step_had_no_room_for) {
  World world({.limits = limits(8, 3)});
  Sequence& first = world.add(3, 4, {.num_sequences = 5, .are_beams = true});
  Sequence& other = world.add(2, 6);
  world.step();
  BOOST_TEST(first.num_generated() == 1);
  world.step();
  BOOST_TEST(world.plan.entries.size() == 3U);
  BOOST_TEST(first.num_generated() == 1);
  BOOST_TEST(first.num_to_compute() == 0);
  world.step();
  // The two remaining ones and the other request.
  BOOST_TEST(world.plan.entries.size() == 3U);
  BOOST_TEST(world.plans(other));
  BOOST_TEST(!world.plans(first));
  BOOST_TEST(first.num_generated() == 2);
  world.run_to_the_end();
  BOOST_TEST(world.num_finished == 6);
}

BOOST_AUTO_TEST_CASE(blocks_are_reserved_for_beams_where_others_are_preempted) {
  // The beams can need 1 + 2 * 4 of the blocks.
  World world({.num_blocks = 12, .tokens_per_block = 4, .policy = kMaxUtilization, .limits = limits(8, 32)});
  Sequence& first = world.add(6, 12, {.num_sequences = 2, .are_beams = true});
  world.step();
  BOOST_TEST(world.scheduler.num_reserved_blocks() == 9 - 3);
  std::vector<Sequence*> others;
  for (int i = 0; i < 3; ++i) others.push_back(&world.add(3, 9));
  while (first.state == SequenceState::kRunning) {
    world.step();
    BOOST_TEST_REQUIRE(!world.plan.empty());
    for (const Sequence* beam : world.beams_of(first)) BOOST_TEST(beam->times_preempted == 0);
  }
  BOOST_TEST(std::ranges::any_of(others, [](const Sequence* other) { return other->times_preempted > 0; }));
  world.run_to_the_end();
  BOOST_TEST(world.num_finished == 5);
}

BOOST_AUTO_TEST_CASE(forks_of_others_leave_the_blocks_of_beams) {
  // 1 + 2 * 2 for the beams and 1 for the other request's prompt: its forks get no block.
  World world({.num_blocks = 6, .tokens_per_block = 4, .policy = kMaxUtilization, .limits = limits(8, 32)});
  Sequence& other = world.make({1, 2, 3}, 4, {.num_sequences = 2});
  Sequence& first = world.add(4, 9, {.num_sequences = 2, .are_beams = true});
  world.plan_only();
  world.run_planned();
  world.scheduler.add(other);
  while (!world.scheduler.empty()) {
    world.step();
    BOOST_TEST_REQUIRE(!world.plan.empty());
  }
  BOOST_TEST(first.times_preempted == 0);
  BOOST_TEST(world.num_finished == 4);
}

BOOST_AUTO_TEST_CASE(the_capacity_check_counts_all_beams_with_any_policy) {
  for (const auto policy : {kGuaranteedNoEvict, kMaxUtilization, kStaticBatch}) {
    World world({.num_blocks = 7, .tokens_per_block = 4, .policy = policy, .limits = limits(3, 64)});
    BOOST_TEST(!world.scheduler.check_capacity(6, 6, 3, true).has_value());
    const auto blocks = world.scheduler.check_capacity(6, 8, 3, true);
    BOOST_TEST_REQUIRE(blocks.has_value());
    BOOST_TEST(contains({*blocks}, "max_tokens = 8 and 3 beams needs 10 KV blocks of 4 tokens; there are 7"));
    BOOST_CHECK_THROW(world.add(6, 8, {.num_sequences = 3, .are_beams = true}), RequestError);
    BOOST_TEST(world.scheduler.check_capacity(6, 1, 4, true).has_value());
  }
}

BOOST_AUTO_TEST_CASE(only_running_beams_are_moved_and_none_both_ways) {
  World world({});
  Sequence& first = world.add(6, 8, {.num_sequences = 3, .are_beams = true});
  Sequence& alone = world.add(6, 8);
  world.step();
  const std::vector<Sequence*> beams = world.beams_of(first);
  Sequence& unknown = world.make({1, 2}, 3, {.are_beams = true});
  for (const auto& moves : std::vector<std::vector<BeamMove>>{{{&alone, beams[0]}},
                                                              {{beams[0], &alone}},
                                                              {{&unknown, beams[0]}},
                                                              {{beams[0], &unknown}},
                                                              {{beams[0], beams[0]}},
                                                              {{beams[0], beams[1]}, {beams[1], beams[2]}}}) {
    BOOST_CHECK_THROW(world.scheduler.move_beams(moves), std::logic_error);
    world.require_sound();
  }
  world.run_to_the_end();
}

BOOST_AUTO_TEST_CASE(each_damage_to_beams_is_named) {
  World world({});
  Sequence& first = world.add(6, 8, {.num_sequences = 2, .are_beams = true});
  world.step();
  Sequence& second = *world.beams_of(first)[1];
  const auto problems = [&] { return check_invariants(world.plan, world.scheduler); };
  world.plan_only();
  second.tokens.push_back(1);
  BOOST_TEST(contains(problems(), "is a beam of another length than the others"));
  BOOST_TEST(contains(problems(), "is a beam that continues without its newest tokens"));
  second.tokens.pop_back();
  for (Sequence* beam : {&first, &second}) ++beam->memory.num_computed;
  BOOST_TEST(contains(problems(), "waits for beams that are all computed"));
  for (Sequence* beam : {&first, &second}) --beam->memory.num_computed;
  BOOST_TEST(problems().empty());
  second.times_preempted = 1;
  BOOST_TEST(contains(check_invariants(world.scheduler, nullptr), "is a beam and was preempted"));
  second.times_preempted = 0;
  second.max_tokens = 1000;
  BOOST_TEST(contains(check_invariants(world.scheduler, nullptr),
                      "more blocks are reserved for beams than available"));
  second.max_tokens = 8;
  world.run_planned();
  world.run_to_the_end();
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::beams_test
