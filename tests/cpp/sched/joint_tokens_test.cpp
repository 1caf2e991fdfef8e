// Prompts with tokens that attend to each other in both directions: no step cuts them.

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "world.h"

namespace adaptrt::testing::joint_tokens_test {
namespace {

constexpr auto kEqualProgress = ContextChunkingPolicy::kEqualProgress;
constexpr auto kMaxUtilization = CapacitySchedulerPolicy::kMaxUtilization;

Sequence& add(World& world, std::int32_t prompt_length, std::int32_t max_tokens,
              const std::vector<JointTokens>& joint) {
  std::vector<std::int32_t> prompt(static_cast<std::size_t>(prompt_length));
  for (std::int32_t i = 0; i < prompt_length; ++i) prompt[static_cast<std::size_t>(i)] = 1000 + i;
  Sequence& sequence = world.make(prompt, max_tokens, {});
  sequence.joint = std::make_shared<const std::vector<JointTokens>>(joint);
  world.scheduler.add(sequence);
  return sequence;
}

/// Runs steps until the prompt is computed; returns the number of its tokens after each step.
std::vector<std::int32_t> ends_of_chunks(World& world, const Sequence& sequence) {
  std::vector<std::int32_t> ends;
  while (ends.empty() || ends.back() < sequence.prompt_length) {
    BOOST_TEST_REQUIRE(ends.size() < 100U);
    world.step();
    ends.push_back(sequence.num_computed());
  }
  return ends;
}

BOOST_AUTO_TEST_SUITE(scheduler_joint_tokens)

BOOST_AUTO_TEST_CASE(a_chunk_ends_before_tokens_that_do_not_fit) {
  World world({.limits = limits(8, 10)});
  const Sequence& sequence = add(world, 30, 2, {{6, 14}, {20, 30}});
  BOOST_TEST(ends_of_chunks(world, sequence) == (std::vector<std::int32_t>{6, 16, 20, 30}),
             boost::test_tools::per_element());
  world.run_to_the_end();
}

BOOST_AUTO_TEST_CASE(equal_shares_grow_to_the_end_of_tokens_that_fit) {
  World world({.tokens_per_block = 4, .chunking = kEqualProgress, .limits = limits(8, 13)});
  const Sequence& first = add(world, 20, 2, {{2, 9}});
  world.add(20, 1);
  world.step();
  BOOST_TEST(first.num_computed() == 9);
  world.run_to_the_end();
}

BOOST_AUTO_TEST_CASE(tokens_wait_until_a_step_has_room_for_all) {
  World world({.limits = limits(8, 8)});
  const Sequence& other = world.add(3, 5);
  world.step();
  const Sequence& sequence = add(world, 12, 2, {{0, 8}});
  while (other.state == SequenceState::kRunning) {
    BOOST_TEST(sequence.num_computed() == 0);
    world.step();
  }
  BOOST_TEST(ends_of_chunks(world, sequence).front() == 8);
}

BOOST_AUTO_TEST_CASE(every_world_ends_and_cuts_nothing) {
  std::mt19937 random(1);
  const auto below = [&](std::int32_t end) {
    return static_cast<std::int32_t>(random() % static_cast<unsigned>(end));
  };
  for (int seed = 0; seed < 12; ++seed) {
    World world({.num_blocks = 20,
                 .policy = seed % 2 == 0 ? kMaxUtilization : CapacitySchedulerPolicy::kGuaranteedNoEvict,
                 .chunking = seed % 3 == 0 ? kEqualProgress : ContextChunkingPolicy::kFirstComeFirstServed,
                 .limits = limits(8, 13)});
    for (int i = 0; i < 8; ++i) {
      std::vector<JointTokens> joint;
      std::int32_t at = below(6);
      while (at < 30) {
        joint.push_back({.begin = at, .end = at + 1 + below(12)});
        at = joint.back().end + below(5);
      }
      add(world, joint.back().end + below(3), 1 + below(6), joint);
    }
    world.run_to_the_end();
    BOOST_TEST(world.num_finished == 8);
  }
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::joint_tokens_test
