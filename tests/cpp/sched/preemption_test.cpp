// Sequences that lose their KV blocks under MAX_UTILIZATION and resume later.

#include <boost/test/unit_test.hpp>

#include "adaptrt/sched/scheduler.h"
#include "world.h"

namespace adaptrt::testing::preemption_test {
namespace {

using enum CapacitySchedulerPolicy;

BOOST_AUTO_TEST_SUITE(preemption)

BOOST_AUTO_TEST_CASE(max_utilization_starts_more_and_preempts_the_newest) {
  World world({.num_blocks = 10, .tokens_per_block = 4, .policy = kMaxUtilization, .limits = limits(8, 64)});
  Sequence& first = world.add(8, 20);
  Sequence& second = world.add(8, 20);
  Sequence& third = world.add(8, 20);
  world.step();
  BOOST_TEST(world.plan.entries.size() == 3U);
  while (world.plan.preempted.empty()) world.step();
  BOOST_TEST_REQUIRE(world.plan.preempted.size() == 1U);
  BOOST_TEST(world.plan.preempted[0] == &third);
  BOOST_TEST(third.preempted);
  BOOST_CHECK(third.state == SequenceState::kWaiting);
  BOOST_TEST(third.num_computed() == 0);
  BOOST_TEST(third.num_generated() > 0);
  BOOST_TEST(world.scheduler.num_preempted() == 1);
  world.run_to_the_end();
  BOOST_TEST(first.times_preempted == 0);
  BOOST_TEST(second.times_preempted + third.times_preempted > 0);
  BOOST_TEST(world.num_finished == 3);
  BOOST_TEST(world.scheduler.num_preempted() == 0);
}

BOOST_AUTO_TEST_CASE(whoever_needs_a_block_the_newest_is_preempted) {
  // Three times three blocks; then the first sequence needs its fourth.
  World world({.num_blocks = 9, .tokens_per_block = 4, .policy = kMaxUtilization, .limits = limits(8, 64)});
  world.add(8, 20);
  Sequence& second = world.add(8, 20);
  Sequence& third = world.add(8, 20);
  while (world.step().preempted.empty()) BOOST_TEST_REQUIRE(world.scheduler.running().size() == 3U);
  BOOST_TEST_REQUIRE(world.plan.preempted.size() == 1U);
  BOOST_TEST(world.plan.preempted[0] == &third);
  BOOST_TEST(world.plans(second));
  world.run_to_the_end();
}

BOOST_AUTO_TEST_CASE(a_preempted_request_goes_before_later_ones) {
  World world({.num_blocks = 8, .tokens_per_block = 4, .policy = kMaxUtilization, .limits = limits(8, 64)});
  world.add(8, 16);
  Sequence& second = world.add(8, 16);
  world.step();
  while (!second.preempted) world.step();
  Sequence& third = world.add(1, 16);
  while (second.preempted) {
    world.step();
    BOOST_CHECK((third.state == SequenceState::kWaiting || !second.preempted));
  }
  world.run_to_the_end();
}

BOOST_AUTO_TEST_CASE(a_preempted_request_longer_than_a_step_resumes_without_chunking) {
  World world({.num_blocks = 8,
               .tokens_per_block = 2,
               .enable_block_reuse = false,
               .policy = kMaxUtilization,
               .limits = limits(8, 5, false)});
  world.add(4, 10);
  Sequence& second = world.add(4, 10);
  world.run_to_the_end();
  BOOST_TEST(second.times_preempted > 0);
  BOOST_TEST(world.num_finished == 2);
}

BOOST_AUTO_TEST_CASE(two_half_computed_prompts_do_not_block_each_other) {
  World world({.num_blocks = 8, .tokens_per_block = 2, .policy = kMaxUtilization, .limits = limits(8, 6)});
  world.add(10, 6);
  world.add(12, 4);
  world.run_to_the_end();
  BOOST_TEST(world.num_finished == 2);
}

BOOST_AUTO_TEST_CASE(once_the_prompt_s_logits_were_there_a_preempted_request_resumes_from_what_is_cached) {
  World world({.num_blocks = 8, .tokens_per_block = 4, .policy = kMaxUtilization, .limits = limits(8, 64)});
  world.add(8, 10);
  Sequence& second = world.add(8, 10, {.compute_whole_prompt = true});
  world.step();
  while (!second.preempted) world.step();
  while (second.preempted) world.step();
  BOOST_TEST_REQUIRE(world.plan.entries.size() == 1U);
  BOOST_TEST(world.plan.entries[0].sequence == &second);
  BOOST_TEST(world.plan.entries[0].first_token == 12);
  world.run_to_the_end();
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::preemption_test
