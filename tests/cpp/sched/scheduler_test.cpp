#include "adaptrt/sched/scheduler.h"

#include <boost/test/unit_test.hpp>
#include <limits>
#include <numeric>
#include <vector>

#include "adaptrt/core/error.h"
#include "world.h"

namespace adaptrt::testing::scheduler_test {
namespace {

using enum CapacitySchedulerPolicy;

std::vector<std::int32_t> counting(std::int32_t count) {
  std::vector<std::int32_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), 0);
  return tokens;
}

BOOST_AUTO_TEST_SUITE(scheduler)

BOOST_AUTO_TEST_CASE(limits_and_configs_that_make_no_sense_are_refused) {
  SequenceMemoryPool memory({.num_blocks = 4, .tokens_per_block = 4});
  BOOST_CHECK_THROW(Scheduler({}, limits(0, 1), memory, nullptr), ConfigError);
  BOOST_CHECK_THROW(Scheduler({}, limits(1, 0), memory, nullptr), ConfigError);
  SchedulerConfig config;
  config.context_chunking_policy = ContextChunkingPolicy::kEqualProgress;
  SchedulerLimits whole_prompts = limits(1, 1);
  whole_prompts.enable_chunked_context = false;
  BOOST_CHECK_THROW(Scheduler(config, whole_prompts, memory, nullptr), ConfigError);
  SchedulerLimits no_reuse = limits(1, 1);
  no_reuse.max_reusable_prompt_len = -1;
  BOOST_CHECK_THROW(Scheduler({}, no_reuse, memory, nullptr), ConfigError);
  no_reuse.max_reusable_prompt_len = 0;
  BOOST_CHECK_NO_THROW(Scheduler({}, no_reuse, memory, nullptr));
}

BOOST_AUTO_TEST_CASE(a_sequence_goes_from_prefill_through_decodes_to_its_end) {
  World world({});
  Sequence& sequence = world.add(5, 3);
  BOOST_CHECK(sequence.state == SequenceState::kWaiting);
  world.step();
  BOOST_TEST_REQUIRE(world.plan.entries.size() == 1U);
  BOOST_TEST(world.plan.entries[0].count == 5);
  BOOST_TEST(world.plan.entries[0].is_prefill);
  BOOST_TEST(world.plan.entries[0].wants_logits);
  BOOST_TEST(world.plan.started.size() == 1U);
  BOOST_TEST(world.plan.num_context_tokens == 5);
  for (int i = 0; i < 2; ++i) {
    BOOST_CHECK(sequence.state == SequenceState::kRunning);
    world.step();
    BOOST_TEST_REQUIRE(world.plan.entries.size() == 1U);
    BOOST_TEST(world.plan.entries[0].count == 1);
    BOOST_TEST(world.plan.entries[0].first_token == 5 + i);
    BOOST_TEST(!world.plan.entries[0].is_prefill);
    BOOST_TEST(world.plan.num_generation_sequences == 1);
  }
  BOOST_CHECK(sequence.state == SequenceState::kFinished);
  BOOST_TEST(world.memory.block_pool().num_used() == 0);
  BOOST_TEST(world.step().empty());
}

BOOST_AUTO_TEST_CASE(one_token_in_and_one_out) {
  World world({});
  Sequence& sequence = world.add(1, 1);
  world.step();
  BOOST_TEST(world.plan.entries[0].is_prefill);
  BOOST_CHECK(sequence.state == SequenceState::kFinished);
}

BOOST_AUTO_TEST_CASE(decodes_come_before_prefills_within_the_token_budget) {
  World world({.limits = limits(8, 10)});
  Sequence& first = world.add(4, 8);
  Sequence& second = world.add(4, 8);
  world.step();
  BOOST_TEST(world.plan.num_tokens == 8);
  Sequence& third = world.add(30, 2);
  world.step();
  BOOST_TEST_REQUIRE(world.plan.entries.size() == 3U);
  BOOST_TEST(world.plan.entries[0].sequence == &first);
  BOOST_TEST(world.plan.entries[1].sequence == &second);
  BOOST_TEST(world.plan.entries[2].sequence == &third);
  BOOST_TEST(world.plan.entries[2].count == 8);
  BOOST_TEST(!world.plan.entries[2].wants_logits);
  world.step();
  BOOST_TEST(world.plan.entries[2].first_token == 8);
  world.run_to_the_end();
}

BOOST_AUTO_TEST_CASE(a_prompt_that_runs_already_goes_before_one_that_waits) {
  World world({.limits = limits(8, 10)});
  Sequence& first = world.add(15, 2);
  Sequence& second = world.add(15, 2);
  world.step();
  BOOST_TEST(world.plan.entries.size() == 1U);
  world.step();
  BOOST_TEST_REQUIRE(world.plan.entries.size() == 2U);
  BOOST_TEST(world.plan.entries[0].sequence == &first);
  BOOST_TEST(world.plan.entries[0].count == 5);
  BOOST_TEST(world.plan.entries[1].sequence == &second);
  BOOST_TEST(world.plan.entries[1].count == 5);
  world.run_to_the_end();
}

BOOST_AUTO_TEST_CASE(with_equal_progress_prompts_share_the_step) {
  World world(
      {.tokens_per_block = 4, .chunking = ContextChunkingPolicy::kEqualProgress, .limits = limits(8, 21)});
  Sequence& first = world.add(30, 2);
  world.add(30, 2);
  world.add(5, 2);
  const auto counts = [&] {
    std::vector<std::int32_t> all;
    for (const auto& entry : world.plan.entries) all.push_back(entry.count);
    return all;
  };
  world.step();  // the third ends; the first has one chunk more than the second, and then the rest
  BOOST_TEST(counts() == (std::vector<std::int32_t>{8, 8, 5}), boost::test_tools::per_element());
  BOOST_TEST(world.plan.num_context_tokens == 21);
  Sequence& late = world.add(30, 2);
  world.step();
  BOOST_TEST(counts() == (std::vector<std::int32_t>{1, 8, 8, 4}), boost::test_tools::per_element());
  BOOST_TEST(world.plan.entries[1].sequence == &first);
  BOOST_TEST(world.plan.entries[3].sequence == &late);
  world.run_to_the_end();
  BOOST_TEST(world.num_finished == 4);
}

BOOST_AUTO_TEST_CASE(equal_progress_starts_no_more_than_get_a_chunk) {
  World world(
      {.tokens_per_block = 4, .chunking = ContextChunkingPolicy::kEqualProgress, .limits = limits(8, 10)});
  for (int i = 0; i < 4; ++i) world.add(12, 1);
  world.step();
  BOOST_TEST(world.scheduler.running().size() == 3U);
  world.run_to_the_end();
  BOOST_TEST(world.num_finished == 4);
}

BOOST_AUTO_TEST_CASE(equal_progress_needs_chunks) {
  SequenceMemoryPool memory({.num_blocks = 4, .tokens_per_block = 4});
  const SchedulerConfig config{.context_chunking_policy = ContextChunkingPolicy::kEqualProgress};
  BOOST_CHECK_THROW(Scheduler(config, limits(1, 1, false), memory, nullptr), ConfigError);
  BOOST_CHECK_NO_THROW(Scheduler(config, limits(1, 1, true), memory, nullptr));
}

BOOST_AUTO_TEST_CASE(blocks_are_retained_as_the_request_says) {
  // Number of tokens of a request that are still cached after a later request has evicted two blocks.
  const auto reused = [](std::int32_t prompt_length, std::int32_t max_tokens,
                         const KvCacheRetentionConfig& config) {
    World world({.num_blocks = 12, .tokens_per_block = 4, .limits = limits(1, 64)});
    world.add(counting(prompt_length), max_tokens,
              {.retention = std::make_shared<KvCacheRetentionConfig>(config)});
    world.add(13, 1);
    world.run_to_the_end();
    const auto tokens = world.any_sequence(0).tokens;
    world.add((world.memory.block_pool().num_free() + 2) * 4, 1);
    world.run_to_the_end();
    world.add(tokens, 1);
    world.step();
    return world.plan.entries[0].first_token;
  };
  KvCacheRetentionConfig config;
  BOOST_TEST(reused(13, 1, config) == 4);
  BOOST_TEST(reused(5, 12, config) == 8);
  config.decode_retention_priority = 80;
  BOOST_TEST(reused(13, 1, config) == 4);
  BOOST_TEST(reused(5, 12, config) == 16);
  config = {.token_range_retention_configs = {{.token_start = 0, .token_end = 9, .priority = 80}}};
  BOOST_TEST(reused(13, 1, config) == 12);
  BOOST_TEST(reused(5, 12, config) == 8);
}

BOOST_AUTO_TEST_CASE(higher_priority_goes_first_then_arrival) {
  World world({.limits = limits(1, 32)});
  Sequence& low = world.add(4, 1, {.priority = 0.1F});
  Sequence& middle = world.add(4, 1);
  Sequence& high = world.add(4, 1, {.priority = 1.0F});
  Sequence& also_middle = world.add(4, 1);
  for (Sequence* expected : {&high, &middle, &also_middle, &low}) {
    world.step();
    BOOST_TEST_REQUIRE(world.plan.entries.size() == 1U);
    BOOST_TEST(world.plan.entries[0].sequence == expected);
  }
}

BOOST_AUTO_TEST_CASE(no_more_than_max_batch_size_run) {
  World world({.limits = limits(3, 32)});
  for (int i = 0; i < 7; ++i) world.add(2, 3);
  world.step();
  BOOST_TEST(world.scheduler.running().size() == 3U);
  BOOST_TEST(world.scheduler.waiting().size() == 4U);
  world.run_to_the_end();
  BOOST_TEST(world.num_finished == 7);
}

BOOST_AUTO_TEST_CASE(without_chunking_a_prompt_waits_for_a_step_with_room_for_all_of_it) {
  World world({.limits = limits(8, 10, false)});
  world.add(6, 3);
  Sequence& second = world.add(10, 1);
  Sequence& third = world.add(2, 1);
  world.step();
  BOOST_TEST(world.plan.num_tokens == 6);  // the third does not overtake the second
  world.step();
  world.step();
  BOOST_CHECK(second.state == SequenceState::kWaiting);
  world.step();
  BOOST_TEST(world.plan.num_tokens == 10);
  BOOST_CHECK(second.state == SequenceState::kFinished);
  world.step();
  BOOST_CHECK(third.state == SequenceState::kFinished);
}

BOOST_AUTO_TEST_CASE(requests_that_never_fit_are_refused_with_the_numbers) {
  World world({.num_blocks = 5, .tokens_per_block = 4, .limits = limits(8, 16, false)});
  BOOST_TEST(
      !world.scheduler.check_capacity(16, 5).has_value());  // 20 tokens of KV: the last one is never computed
  const auto blocks = world.scheduler.check_capacity(16, 6);
  BOOST_TEST_REQUIRE(blocks.has_value());
  BOOST_TEST(contains(*blocks, "needs 6 KV blocks of 4 tokens; there are 5"));
  const auto step = world.scheduler.check_capacity(17, 1);
  BOOST_TEST_REQUIRE(step.has_value());
  BOOST_TEST(contains(*step, "17 tokens"));
  BOOST_TEST(contains(*step, "max_num_tokens = 16"));
  BOOST_TEST(world.scheduler.check_capacity(0, 1).has_value());
  BOOST_TEST(world.scheduler.check_capacity(1, 0).has_value());
  constexpr auto kHuge = std::numeric_limits<std::int64_t>::max();
  BOOST_TEST(world.scheduler.check_capacity(kHuge, kHuge).has_value());
  BOOST_CHECK_THROW(world.add(16, 6), RequestError);
  BOOST_TEST(world.scheduler.empty());
}

BOOST_AUTO_TEST_CASE(sequences_with_fields_that_disagree_are_refused) {
  World world({});
  const auto refused = [&](const auto& change) {
    Sequence& sequence = world.make(counting(4), 2, {});
    change(sequence);
    BOOST_CHECK_THROW(world.scheduler.add(sequence), RequestError);
    BOOST_TEST(world.scheduler.empty());
  };
  refused([](Sequence& s) { s.prompt_length = 3; });
  refused([](Sequence& s) { s.priority = 1.5F; });
  refused([](Sequence& s) { s.priority = std::numeric_limits<float>::quiet_NaN(); });
  refused([](Sequence& s) { s.state = SequenceState::kFinished; });
  World with_cache({.device_pages = 2});
  auto adapter = with_cache.adapter(1);
  refused([&](Sequence& s) { s.adapter = adapter; });
}

BOOST_AUTO_TEST_CASE(guaranteed_no_evict_starts_only_what_can_run_to_its_end) {
  World world({.num_blocks = 10, .tokens_per_block = 4, .limits = limits(8, 64)});
  world.add(4, 13);                    // 4 blocks in the end
  world.add(4, 13);                    // 4 blocks
  Sequence& third = world.add(4, 9);   // 3 blocks: too many
  Sequence& fourth = world.add(1, 1);  // would fit, but does not overtake
  world.step();
  BOOST_TEST(world.plan.entries.size() == 2U);
  BOOST_TEST(world.scheduler.num_promised_blocks() == 6);
  BOOST_CHECK(third.state == SequenceState::kWaiting);
  BOOST_CHECK(fourth.state == SequenceState::kWaiting);
  world.run_to_the_end();
  BOOST_TEST(third.times_preempted == 0);
}

BOOST_AUTO_TEST_CASE(a_static_batch_ends_before_the_next_begins) {
  World world({.policy = kStaticBatch, .limits = limits(2, 32)});
  Sequence& first = world.add(4, 1);
  Sequence& second = world.add(4, 5);
  Sequence& third = world.add(4, 1);
  world.step();
  BOOST_CHECK(first.state == SequenceState::kFinished);
  for (int i = 0; i < 4; ++i) {
    BOOST_CHECK(second.state == SequenceState::kRunning);
    world.step();
    BOOST_CHECK(third.state == SequenceState::kWaiting);
  }
  BOOST_CHECK(second.state == SequenceState::kFinished);
  world.step();
  BOOST_CHECK(third.state == SequenceState::kFinished);
}

BOOST_AUTO_TEST_CASE(a_computed_prefix_is_not_computed_again) {
  World world({.tokens_per_block = 4});
  world.add(counting(10), 1);
  world.step();
  Sequence& same = world.add(counting(10), 1);
  Sequence& salted = world.add(counting(10), 1, {.cache_salt = 1});
  world.step();
  BOOST_TEST(world.plan.entries[0].first_token == 8);
  BOOST_TEST(world.plan.entries[0].count == 2);
  BOOST_TEST(same.memory.table.reused_blocks == 2);
  BOOST_TEST(world.plan.entries[1].sequence == &salted);
  BOOST_TEST(world.plan.entries[1].first_token == 0);
}

BOOST_AUTO_TEST_CASE(generated_tokens_are_reused_too) {
  World world({.tokens_per_block = 4});
  Sequence& first = world.add(counting(5), 8);
  world.run_to_the_end();
  std::vector<std::int32_t> follow_up = first.tokens;
  world.add(follow_up, 1);
  world.step();
  BOOST_TEST(world.plan.entries[0].first_token == 12);
}

BOOST_AUTO_TEST_CASE(a_request_for_the_prompt_s_logits_computes_the_whole_prompt) {
  World world({.tokens_per_block = 4});
  world.add(counting(10), 1);
  world.step();
  world.add(counting(10), 2, {.compute_whole_prompt = true});
  world.step();
  BOOST_TEST(world.plan.entries[0].first_token == 0);
  BOOST_TEST(world.plan.entries[0].count == 10);
}

BOOST_AUTO_TEST_CASE(prompts_whose_kv_depends_on_their_length_are_not_shared) {
  auto config = WorldConfig{.tokens_per_block = 4};
  config.limits.max_reusable_prompt_len = 9;
  World world(config);
  world.add(counting(10), 1);
  world.step();
  world.add(counting(9), 1);
  world.step();
  BOOST_TEST(world.plan.entries[0].first_token == 0);
  world.add(counting(10), 1);
  world.step();
  BOOST_TEST(world.plan.entries[0].first_token == 0);
  world.add(counting(9), 1);
  world.step();
  BOOST_TEST(world.plan.entries[0].first_token == 8);
}

BOOST_AUTO_TEST_CASE(nothing_of_a_failed_step_is_reused) {
  World world({.tokens_per_block = 4});
  Sequence& running = world.add(4, 10);
  world.step();
  Sequence& fresh = world.add(counting(10), 3);
  Sequence& waiting = world.add(40, 3);
  world.plan_only();
  BOOST_TEST(world.plans(running));
  BOOST_TEST(world.plans(fresh));
  const bool planned = world.plans(waiting);
  world.scheduler.fail(world.plan);
  world.require_sound();
  BOOST_CHECK(running.state == SequenceState::kFinished);
  BOOST_CHECK(fresh.state == SequenceState::kFinished);
  BOOST_CHECK((waiting.state == (planned ? SequenceState::kFinished : SequenceState::kWaiting)));
  BOOST_TEST(world.memory.block_pool().num_used() == 0);
  world.add(counting(10), 1);
  world.run_to_the_end();
  BOOST_TEST(world.memory.block_pool().stats().reused_blocks == 0);
}

BOOST_AUTO_TEST_CASE(sequences_can_be_removed_in_any_state) {
  World world({.num_blocks = 10, .tokens_per_block = 4, .policy = kMaxUtilization, .limits = limits(8, 64)});
  Sequence& first = world.add(8, 20);
  world.add(8, 20);
  Sequence& third = world.add(8, 20);
  Sequence& waiting = world.add(36, 1);
  world.step();
  while (!third.preempted) world.step();
  BOOST_CHECK(waiting.state == SequenceState::kWaiting);
  for (Sequence* sequence : {&third, &waiting, &first, &first}) {
    world.scheduler.remove(*sequence);
    world.require_sound();
    BOOST_CHECK(sequence->state == SequenceState::kFinished);
  }
  BOOST_TEST(world.scheduler.num_preempted() == 0);
  world.run_to_the_end();
  BOOST_TEST(world.num_finished == 1);
}

BOOST_AUTO_TEST_CASE(a_finished_sequence_that_was_left_in_is_a_named_fault) {
  World world({});
  Sequence& sequence = world.add(4, 1);
  world.plan_only();
  world.scheduler.commit(world.plan);
  BOOST_CHECK_THROW(world.scheduler.plan(world.plan), std::logic_error);  // nothing was sampled
  sequence.tokens.push_back(1);
  BOOST_CHECK_THROW(world.scheduler.plan(world.plan), std::logic_error);  // max_tokens reached
}

BOOST_AUTO_TEST_CASE(planning_a_steady_batch_allocates_nothing) {
  World world({.num_blocks = 200, .limits = limits(16, 64)});
  for (int i = 0; i < 16; ++i) world.add(4, 30);
  world.step();
  world.step();
  const auto* entries = world.plan.entries.data();
  std::vector<const BlockId*> tables;
  for (const Sequence* sequence : world.scheduler.running())
    tables.push_back(sequence->memory.table.blocks.data());
  for (int i = 0; i < 20; ++i) {
    world.step();
    BOOST_TEST(world.plan.entries.data() == entries);
  }
  for (std::size_t i = 0; i < tables.size(); ++i) {
    BOOST_TEST(world.scheduler.running()[i]->memory.table.blocks.data() == tables[i]);
  }
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::scheduler_test
