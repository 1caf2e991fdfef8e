// Engines without KV: sequences have no blocks, and each is computed whole in the step that starts it.

#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <random>

#include "adaptrt/core/error.h"
#include "world.h"

namespace adaptrt::testing::whole_sequences_test {
namespace {

namespace data = boost::unit_test::data;

using enum CapacitySchedulerPolicy;
using enum ContextChunkingPolicy;

WorldConfig without_kv(CapacitySchedulerPolicy policy = kGuaranteedNoEvict,
                       ContextChunkingPolicy chunking = kFirstComeFirstServed) {
  return {.num_blocks = 0,
          .tokens_per_block = 4,
          .policy = policy,
          .chunking = chunking,
          .limits = limits(4, 20),
          .device_pages = 2};
}

BOOST_AUTO_TEST_SUITE(whole_sequences)

BOOST_AUTO_TEST_CASE(a_sequence_waits_for_room_for_all_of_it) {
  World world(without_kv());
  Sequence& first = world.add(12, 1);
  Sequence& second = world.add(9, 1);  // would need 21 of a step's 20 tokens
  Sequence& third = world.add(3, 1);   // comes after it
  world.step();
  BOOST_TEST(world.plan.num_tokens == 12);
  BOOST_CHECK(first.state == SequenceState::kFinished);
  BOOST_CHECK(third.state == SequenceState::kWaiting);
  world.step();
  BOOST_TEST(world.plan.num_tokens == 12);
  BOOST_CHECK(second.state == SequenceState::kFinished);
  BOOST_TEST(world.num_finished == 3);
}

BOOST_AUTO_TEST_CASE(no_more_than_the_batch_start) {
  World world(without_kv());
  for (int i = 0; i < 6; ++i) world.add(2, 1);
  world.step();
  BOOST_TEST(world.num_finished == 4);
  world.step();
  BOOST_TEST(world.num_finished == 6);
}

BOOST_AUTO_TEST_CASE(prompts_longer_than_a_step_are_refused_with_the_numbers) {
  const World world(without_kv());
  const auto reason = world.scheduler.check_capacity(21, 1);
  BOOST_TEST_REQUIRE(reason.has_value());
  BOOST_TEST(
      *reason ==
      "the prompt has 21 tokens, a step takes max_num_tokens = 20 and the engine computes prompts whole");
  BOOST_TEST(!world.scheduler.check_capacity(20, 1).has_value());
}

BOOST_DATA_TEST_CASE(crowds_come_to_an_end, data::xrange(3) * data::xrange(2) * data::xrange(8), policy,
                     chunking, seed) {
  World world(
      without_kv(static_cast<CapacitySchedulerPolicy>(policy), static_cast<ContextChunkingPolicy>(chunking)));
  std::mt19937 random(static_cast<unsigned>(seed));
  const auto draw = [&](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
  for (int i = 0; i < 60; ++i) {
    RequestOptions options{.priority = static_cast<float>(draw(0, 2)) / 2.0F};
    if (const int task_id = draw(0, 4); task_id > 0) {
      options.adapter = world.adapter(static_cast<std::uint64_t>(task_id));
    }
    world.add(draw(1, 20), 1, options);
    if (draw(0, 2) == 0) world.step();
  }
  world.run_to_the_end();
  BOOST_TEST(world.num_finished == 60);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::whole_sequences_test
