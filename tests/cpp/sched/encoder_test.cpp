// Sequences with encoder inputs: blocks of their own, and steps that have room for whole inputs.

#include <boost/test/unit_test.hpp>
#include <memory>
#include <vector>

#include "adaptrt/core/error.h"
#include "world.h"

namespace adaptrt::testing {
namespace {

using enum CapacitySchedulerPolicy;

RequestOptions with_input(std::int32_t length) {
  RequestOptions options;
  options.encoder_tokens =
      std::make_shared<const std::vector<std::int32_t>>(static_cast<std::size_t>(length), 7);
  return options;
}

WorldConfig small_world(std::int32_t num_cross_blocks) {
  WorldConfig config{.tokens_per_block = 4, .limits = limits(8, 20)};
  config.limits.max_reusable_prompt_len = 0;
  config.num_cross_blocks = num_cross_blocks;
  return config;
}

BOOST_AUTO_TEST_SUITE(encoder_inputs)

BOOST_AUTO_TEST_CASE(a_request_waits_for_blocks_and_for_room_in_a_step) {
  World world(small_world(7));
  Sequence& first = world.add(1, 5, with_input(12));   // 3 blocks
  Sequence& second = world.add(1, 3, with_input(10));  // would make 22 tokens of a step's 20
  Sequence& third = world.add(1, 3, with_input(8));    // 2 blocks, where there is 1
  world.step();
  BOOST_TEST(world.plan.num_encoder_tokens == 12);
  BOOST_CHECK(second.state == SequenceState::kWaiting);
  world.step();
  BOOST_TEST(world.plan.num_encoder_tokens == 10);
  BOOST_TEST(world.plan.num_tokens == 2);  // a decode and a start
  BOOST_TEST(world.cross_pool()->num_free() == 1);
  BOOST_CHECK(third.state == SequenceState::kWaiting);
  BOOST_TEST(first.cross->blocks().size() == 3U);
  world.run_to_the_end();
  BOOST_TEST(world.num_finished == 3);
  BOOST_TEST(world.cross_pool()->num_free() == 7);
}

BOOST_AUTO_TEST_CASE(forked_sequences_share_their_input) {
  World world(small_world(3));
  RequestOptions options = with_input(12);
  options.num_sequences = 3;
  Sequence& first = world.add(2, 4, options);
  world.step();
  for (const Sequence* sequence : world.scheduler.running()) BOOST_TEST(sequence->cross == first.cross);
  BOOST_TEST(world.scheduler.running().size() == 3U);
  world.cancel(first);
  BOOST_TEST(world.cross_pool()->num_free() == 0);
  world.run_to_the_end();
  BOOST_TEST(world.cross_pool()->num_free() == 3);
}

BOOST_AUTO_TEST_CASE(a_paused_sequence_gives_its_blocks_back_and_is_encoded_again) {
  WorldConfig config = small_world(8);
  config.num_blocks = 4;
  config.policy = kMaxUtilization;
  World world(config);
  world.add(4, 9, with_input(8));
  Sequence& second = world.add(4, 9, with_input(8));
  while (second.times_paused == 0) world.step();
  BOOST_TEST(second.cross == nullptr);
  BOOST_TEST(world.cross_pool()->num_free() == 6);
  world.run_to_the_end();
  BOOST_TEST(world.num_finished == 2);
}

BOOST_AUTO_TEST_CASE(what_never_fits_is_refused_with_the_numbers) {
  World world(small_world(4));
  const auto long_for_a_step = world.scheduler.why_never_fits(1, 1, 1, false, 21);
  BOOST_TEST_REQUIRE(long_for_a_step.has_value());
  BOOST_TEST(long_for_a_step->find("21 tokens, a step takes max_num_tokens = 20") != std::string::npos);
  const auto long_for_the_pool = world.scheduler.why_never_fits(1, 1, 1, false, 17);
  BOOST_TEST_REQUIRE(long_for_the_pool.has_value());
  BOOST_TEST(long_for_the_pool->find("17 tokens needs 5 blocks of 4 tokens; there are 4") !=
             std::string::npos);
  BOOST_TEST(!world.scheduler.why_never_fits(1, 1, 1, false, 16).has_value());
  BOOST_CHECK_THROW(world.add(3, 2), RequestError);
  World without({});
  BOOST_CHECK_THROW(without.add(3, 2, with_input(2)), RequestError);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing
