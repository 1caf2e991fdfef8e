// States that sequences await when a step fails.

#include <boost/test/unit_test.hpp>
#include <cstddef>

#include "world.h"

namespace adaptrt::testing::states_test {
namespace {

BOOST_AUTO_TEST_SUITE(states)

BOOST_AUTO_TEST_CASE(a_failed_step_takes_forks_along_that_it_did_not_plan) {
  World world({.tokens_per_block = 1, .limits = limits(4, 1), .has_states = true, .num_state_snapshots = 2});
  Sequence& parent = world.add(1, 4, {.num_sequences = 3});
  world.step();
  BOOST_TEST(world.scheduler.running().size() == 3U);
  world.plan_only();
  BOOST_TEST(world.plan.entries.size() == 1U);
  BOOST_TEST(world.plan.copies.empty());
  std::size_t num_awaiting = 0;
  for (const PlannedStateCopy& copy : world.plan.state_copies) {
    if (copy.sequence != nullptr) ++num_awaiting;
  }
  BOOST_TEST(num_awaiting == 2U);
  world.fail_step();
  BOOST_TEST(world.scheduler.empty());
  BOOST_TEST((parent.state == SequenceState::kFinished));
  BOOST_TEST(world.memory.state_pool()->stats().used_slots == 0);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::states_test
