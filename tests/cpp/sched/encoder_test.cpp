// Sequences with encoder inputs: separate blocks, and steps that take only whole inputs.

#include <boost/test/unit_test.hpp>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "adaptrt/core/error.h"
#include "world.h"

namespace adaptrt::testing::encoder_test {
namespace {

using enum CapacitySchedulerPolicy;

RequestOptions with_input(std::int32_t length, std::int32_t token = 7) {
  RequestOptions options;
  options.encoder_tokens =
      std::make_shared<const std::vector<std::int32_t>>(static_cast<std::size_t>(length), token);
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
  Sequence& second = world.add(1, 3, with_input(10));  // would need 22 of a step's 20 tokens
  Sequence& third = world.add(1, 3, with_input(8));    // needs 2 blocks, but only 1 is free
  world.step();
  BOOST_TEST(world.plan.num_encoder_tokens == 12);
  BOOST_CHECK(second.state == SequenceState::kWaiting);
  world.step();
  BOOST_TEST(world.plan.num_encoder_tokens == 10);
  BOOST_TEST(world.plan.num_tokens == 2);  // a decode and a start
  BOOST_TEST(world.memory.cross_pool()->num_available() == 1);
  BOOST_CHECK(third.state == SequenceState::kWaiting);
  BOOST_TEST(first.memory.cross->blocks().size() == 3U);
  world.run_to_the_end();
  BOOST_TEST(world.num_finished == 3);
  BOOST_TEST(world.memory.cross_pool()->num_available() == 7);
}

BOOST_AUTO_TEST_CASE(forked_sequences_share_their_input) {
  World world(small_world(3));
  RequestOptions options = with_input(12);
  options.num_sequences = 3;
  Sequence& first = world.add(2, 4, options);
  world.step();
  for (const Sequence* sequence : world.scheduler.running())
    BOOST_TEST(sequence->memory.cross == first.memory.cross);
  BOOST_TEST(world.scheduler.running().size() == 3U);
  world.cancel(first);
  BOOST_TEST(world.memory.cross_pool()->num_available() == 0);
  world.run_to_the_end();
  BOOST_TEST(world.memory.cross_pool()->num_available() == 3);
}

/// Runs two sequences until one is preempted, which is the second; returns it.
Sequence& add_until_one_is_preempted(World& world) {
  world.add(4, 9, with_input(8, 1));
  Sequence& second = world.add(4, 9, with_input(8, 2));
  while (second.times_preempted == 0) world.step();
  BOOST_TEST(second.memory.cross == nullptr);
  BOOST_TEST(world.memory.cross_pool()->num_available() == 6);
  return second;
}

void step_until_it_runs(World& world, const Sequence& sequence) {
  while (sequence.state != SequenceState::kRunning) world.step();
}

WorldConfig world_of_preemptions(bool enable_block_reuse) {
  WorldConfig config = small_world(8);
  config.num_blocks = 4;
  config.policy = kMaxUtilization;
  config.enable_block_reuse = enable_block_reuse;
  return config;
}

BOOST_AUTO_TEST_CASE(a_preempted_sequence_gives_its_blocks_back_and_is_encoded_again) {
  World world(world_of_preemptions(false));
  Sequence& second = add_until_one_is_preempted(world);
  BOOST_TEST(world.memory.cross_pool()->num_free() == 6);
  step_until_it_runs(world, second);
  BOOST_TEST(world.plan.num_encoder_tokens == 8);
  world.run_to_the_end();
  BOOST_TEST(world.num_finished == 2);
}

BOOST_AUTO_TEST_CASE(a_preempted_sequence_finds_its_input_where_there_was_room_for_it) {
  World world(world_of_preemptions(true));
  Sequence& second = add_until_one_is_preempted(world);
  BOOST_TEST(world.memory.cross_pool()->num_free() == 4);
  step_until_it_runs(world, second);
  BOOST_TEST(world.plan.num_encoder_tokens == 0);
  BOOST_TEST(second.memory.cross_counts.reused_blocks == 2);
  world.run_to_the_end();
  BOOST_TEST(world.num_finished == 2);
}

BOOST_AUTO_TEST_CASE(an_input_is_computed_once_for_those_that_start_together_and_later) {
  World world(small_world(3));
  Sequence& first = world.add(1, 3, with_input(12));
  Sequence& second =
      world.add(1, 9, with_input(12));  // there is no room for two inputs, nor for their tokens
  world.step();
  BOOST_TEST(world.plan.encoded.size() == 1U);
  BOOST_TEST(world.plan.num_encoder_tokens == 12);
  BOOST_TEST(first.memory.cross == second.memory.cross);
  world.step();
  Sequence& third = world.add(1, 2, with_input(12));
  world.step();
  BOOST_TEST(world.plan.started.size() == 1U);
  BOOST_TEST(world.plan.encoded.empty());
  BOOST_TEST(third.memory.cross == second.memory.cross);
  world.run_to_the_end();
  Sequence& last = world.add(1, 2, with_input(12));
  world.step();
  BOOST_TEST(world.plan.encoded.empty());
  BOOST_TEST(last.memory.cross_counts.reused_blocks == 3);
  BOOST_TEST(last.memory.cross_counts.alloc_new_blocks == 0);
  world.run_to_the_end();
  const KvCacheStats stats = world.memory.cross_pool()->stats();
  BOOST_TEST(stats.alloc_new_blocks == 3);
  BOOST_TEST(stats.reused_blocks == 9);
  BOOST_TEST(stats.missed_blocks == 3);
}

BOOST_AUTO_TEST_CASE(inputs_of_other_adapters_and_salts_are_others) {
  WorldConfig config = small_world(8);
  config.device_pages = 4;
  World world(config);
  RequestOptions options = with_input(4);
  Sequence& base = world.add(1, 4, options);
  options.cache_salt = 3;
  Sequence& salted = world.add(1, 4, options);
  options.adapter = world.adapter(5);
  Sequence& adapted = world.add(1, 4, options);
  Sequence& same = world.add(1, 4, options);
  world.step();
  BOOST_TEST(world.plan.encoded.size() == 3U);
  BOOST_TEST(base.memory.cross != salted.memory.cross);
  BOOST_TEST(salted.memory.cross != adapted.memory.cross);
  BOOST_TEST(adapted.memory.cross == same.memory.cross);
  world.run_to_the_end();
}

BOOST_AUTO_TEST_CASE(a_request_for_the_encoders_output_has_it_computed) {
  World world(small_world(6));
  world.add(1, 2, with_input(12));
  world.run_to_the_end();
  RequestOptions options = with_input(12);
  options.compute_encoder_input = true;
  Sequence& sequence = world.add(1, 5, options);
  world.step();
  BOOST_TEST(world.plan.num_encoder_tokens == 12);
  BOOST_TEST(sequence.memory.cross_counts.reused_blocks + sequence.memory.cross_counts.missed_blocks == 0);
  // The existing blocks replaced its own.
  BOOST_TEST(world.memory.cross_pool()->num_available() == 3);
  BOOST_TEST(world.memory.cross_pool()->num_free() == 3);
  Sequence& another = world.add(1, 5, with_input(12));
  world.step();
  BOOST_TEST(another.memory.cross == sequence.memory.cross);
  world.run_to_the_end();
}

BOOST_AUTO_TEST_CASE(an_input_of_a_step_that_failed_is_computed_again) {
  World world(small_world(6));
  world.add(1, 5, with_input(8, 1));
  world.step();
  world.add(1, 5, with_input(8, 2));
  world.add(1, 5, with_input(8, 2));
  world.plan_only();
  BOOST_TEST(world.plan.encoded.size() == 1U);
  world.fail_step();
  BOOST_TEST(world.memory.cross_pool()->num_available() == 6);
  Sequence& written = world.add(1, 5, with_input(8, 1));
  Sequence& unwritten = world.add(1, 5, with_input(8, 2));
  world.step();
  BOOST_TEST(written.memory.cross_counts.reused_blocks == 2);
  BOOST_TEST(unwritten.memory.cross_counts.reused_blocks == 0);
  BOOST_TEST(world.plan.encoded.size() == 1U);
  world.run_to_the_end();
}

BOOST_AUTO_TEST_CASE(each_damage_to_what_is_encoded_is_named) {
  const std::vector<std::pair<std::string, std::function<void(StepPlan&)>>> damages = {
      {"num_encoder_tokens does not count", [](StepPlan& plan) { ++plan.num_encoder_tokens; }},
      {"does not start, but its encoder input is computed", [](StepPlan& plan) { plan.started.clear(); }},
      {"is computed again", [](StepPlan& plan) { plan.encoded.push_back(plan.entries.front().sequence); }},
      {"is computed twice, to the same blocks", [](StepPlan& plan) { plan.encoded = plan.started; }},
      {"reads an encoder input that no sequence computes", [](StepPlan& plan) { plan.encoded.clear(); }},
  };
  World world(small_world(8));
  world.add(1, 5, with_input(8, 1));
  world.step();
  world.add(1, 5, with_input(8, 2));
  world.add(1, 5, with_input(8, 2));
  world.plan_only();
  BOOST_TEST_REQUIRE(world.plan.entries.size() == 3U);
  for (const auto& [said, damage] : damages) check_found(problems_of_damaged_plan(world, damage), said);
  world.run_planned();
  world.run_to_the_end();
}

BOOST_AUTO_TEST_CASE(inputs_that_never_fit_are_refused_with_the_numbers) {
  World world(small_world(4));
  const auto long_for_a_step = world.scheduler.check_capacity(1, 1, 1, false, 21);
  BOOST_TEST_REQUIRE(long_for_a_step.has_value());
  BOOST_TEST(long_for_a_step->find("21 tokens, a step takes max_num_tokens = 20") != std::string::npos);
  const auto long_for_the_pool = world.scheduler.check_capacity(1, 1, 1, false, 17);
  BOOST_TEST_REQUIRE(long_for_the_pool.has_value());
  BOOST_TEST(long_for_the_pool->find("17 tokens needs 5 blocks of 4 tokens; there are 4") !=
             std::string::npos);
  BOOST_TEST(!world.scheduler.check_capacity(1, 1, 1, false, 16).has_value());
  BOOST_CHECK_THROW(world.add(3, 2), RequestError);
  World without({});
  BOOST_CHECK_THROW(without.add(3, 2, with_input(2)), RequestError);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::encoder_test
