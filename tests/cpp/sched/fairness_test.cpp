// Adapters of one priority take turns.

#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <map>
#include <random>
#include <vector>

#include "adaptrt/sched/scheduler.h"
#include "support/sanitized.h"
#include "world.h"

namespace adaptrt::testing::fairness_test {
namespace {

using enum CapacitySchedulerPolicy;

WorldConfig one_at_a_time(bool adapter_fairness = true) {
  return {
      .num_blocks = 400, .adapter_fairness = adapter_fairness, .limits = limits(1, 64), .device_pages = 8};
}

/// Ids in the order of their starts, until nothing is left.
std::vector<std::uint64_t> starts(World& world) {
  std::vector<std::uint64_t> ids;
  while (!world.scheduler.empty()) {
    for (const Sequence* sequence : world.step().started) ids.push_back(sequence->id);
  }
  return ids;
}

BOOST_AUTO_TEST_SUITE(fairness)

BOOST_AUTO_TEST_CASE(a_flood_of_one_adapter_does_not_hold_up_another) {
  World world(one_at_a_time());
  for (int i = 0; i < 10; ++i) world.add(4, 2, {.adapter = world.adapter(1)});
  world.step();
  Sequence& other = world.add(4, 2, {.adapter = world.adapter(2)});
  Sequence& base = world.add(4, 2);
  const auto order = starts(world);
  BOOST_TEST_REQUIRE(order.size() == 11U);
  BOOST_TEST(order[0] == other.id);
  BOOST_TEST(order[1] == base.id);
  BOOST_TEST(order[2] == 1U);
}

BOOST_AUTO_TEST_CASE(without_fairness_requests_start_as_they_came) {
  World world(one_at_a_time(false));
  for (int i = 0; i < 10; ++i) world.add(4, 2, {.adapter = world.adapter(1)});
  world.add(4, 2, {.adapter = world.adapter(2)});
  const auto order = starts(world);
  BOOST_TEST(std::ranges::is_sorted(order));
  BOOST_TEST(order.size() == 11U);
}

BOOST_AUTO_TEST_CASE(turns_are_counted_in_tokens) {
  World world(one_at_a_time());
  // The long requests have four times as many tokens, half of them prompt and half generated.
  for (int i = 0; i < 20; ++i) world.add(16, 17, {.adapter = world.adapter(1)});
  for (int i = 0; i < 80; ++i) world.add(4, 5, {.adapter = world.adapter(2)});
  const auto order = starts(world);
  std::int64_t num_long = 0;
  for (std::size_t i = 0; i < 90; ++i) {
    if (order[i] < 20) ++num_long;
    const auto num_short = static_cast<std::int64_t>(i) + 1 - num_long;
    BOOST_TEST(std::abs(4 * num_long - num_short) <= 4);
  }
}

BOOST_AUTO_TEST_CASE(reused_tokens_do_not_count) {
  World world(one_at_a_time());
  const std::vector<std::int32_t> prompt(33, 7);
  const auto first = world.adapter(1);
  world.add(prompt, 1, {.adapter = first});
  world.add(40, 1, {.adapter = world.adapter(2)});  // keeps the counts of the priority
  world.step();
  // Each computes one of 33 tokens, so 33 of them count like one of the other adapter's.
  for (int i = 0; i < 60; ++i) world.add(prompt, 1, {.adapter = first});
  for (int i = 0; i < 3; ++i) world.add(33, 1, {.adapter = world.adapter(2)});
  const auto order = starts(world);
  const auto second_of_2 = std::ranges::find(order, 62U);
  const auto third_of_2 = std::ranges::find(order, 63U);
  BOOST_TEST((third_of_2 - second_of_2 == 34));
}

BOOST_AUTO_TEST_CASE(a_prompt_counts_once_for_all_its_sequences) {
  World world({.num_blocks = 400, .limits = limits(3, 128), .device_pages = 8});
  world.add(43, 8, {.adapter = world.adapter(1), .num_sequences = 2});
  world.add(60, 9, {.adapter = world.adapter(2)});
  for (int i = 0; i < 2; ++i) world.add(4, 2, {.adapter = world.adapter(1)});
  for (int i = 0; i < 2; ++i) world.add(4, 2, {.adapter = world.adapter(2)});
  // 43 + 2 * 7 tokens of the first adapter are fewer than the other's 60.
  const auto order = starts(world);
  BOOST_TEST(order == (std::vector<std::uint64_t>{0, 1, 2, 3, 4, 5}), boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(an_adapter_without_requests_earns_no_credit) {
  World world(one_at_a_time());
  for (int i = 0; i < 30; ++i) world.add(4, 2, {.adapter = world.adapter(1)});
  while (world.num_finished < 20) world.step();
  for (int i = 0; i < 10; ++i) world.add(4, 2, {.adapter = world.adapter(2)});
  const auto order = starts(world);
  BOOST_TEST_REQUIRE(order.size() == 20U);
  for (std::size_t i = 0; i + 1 < order.size(); i += 2) {
    BOOST_TEST((order[i] < 30) != (order[i + 1] < 30), "two of one adapter in a row");
  }
}

BOOST_AUTO_TEST_CASE(an_adapter_does_not_shed_its_past_by_pausing) {
  World world(one_at_a_time());
  // Its only long request ends before the next arrives; the other adapter's requests wait all the time.
  for (int i = 0; i < 20; ++i) world.add(4, 2, {.adapter = world.adapter(1)});
  world.add(40, 20, {.adapter = world.adapter(2)});
  while (world.any_sequence(20).state != SequenceState::kFinished) world.step();
  const auto finished = world.num_finished;
  Sequence& again = world.add(40, 20, {.adapter = world.adapter(2)});
  while (again.state == SequenceState::kWaiting) world.step();
  BOOST_TEST(world.num_finished - finished >= 59 / 5);  // five tokens each
  world.run_to_the_end();
}

BOOST_AUTO_TEST_CASE(priority_goes_before_turns) {
  World world(one_at_a_time());
  world.add(4, 2, {.adapter = world.adapter(2)});
  for (int i = 0; i < 5; ++i) world.add(4, 2, {.adapter = world.adapter(1), .priority = 1.0F});
  const auto order = starts(world);
  BOOST_TEST(order.back() == 0U);
}

BOOST_AUTO_TEST_CASE(whoever_started_first_is_preempted_last) {
  World world({.num_blocks = 12,
               .tokens_per_block = 4,
               .policy = kMaxUtilization,
               .limits = limits(2, 64),
               .device_pages = 8});
  Sequence& first = world.add(4, 40, {.adapter = world.adapter(1)});
  Sequence& later = world.add(4, 40, {.adapter = world.adapter(1)});
  world.step();
  world.cancel(later);
  Sequence& flood = world.add(4, 30, {.adapter = world.adapter(1)});
  Sequence& other = world.add(4, 30, {.adapter = world.adapter(2)});
  world.step();
  BOOST_CHECK(other.state == SequenceState::kRunning);
  BOOST_CHECK(flood.state == SequenceState::kWaiting);
  world.cancel(first);
  while (world.step().preempted.empty()) BOOST_TEST_REQUIRE(!world.plan.empty());
  // It arrived before the other and started after it.
  BOOST_TEST(world.plan.preempted[0] == &flood);
  world.run_to_the_end();
}

/// Equal arrivals give equal steps.
BOOST_DATA_TEST_CASE(the_order_follows_from_the_arrivals, boost::unit_test::data::xrange(sanitized(2, 10)),
                     seed) {
  const auto run = [&] {
    std::mt19937_64 random(static_cast<std::uint64_t>(seed));
    World world({.num_blocks = 60,
                 .policy = seed % 2 == 0 ? kMaxUtilization : kGuaranteedNoEvict,
                 .limits = limits(3, 16),
                 .device_pages = 3});
    std::vector<std::uint64_t> order;
    for (int i = 0; i < 150 || !world.scheduler.empty(); ++i) {
      if (i < 150 && random() % 2 == 0) {
        const auto task = random() % 5;
        world.add(static_cast<std::int32_t>(1 + random() % 20), static_cast<std::int32_t>(1 + random() % 9),
                  {.adapter = task == 0 ? nullptr : world.adapter(task)});
      }
      for (const auto& entry : world.step().entries) order.push_back(entry.sequence->id);
    }
    return order;
  };
  BOOST_TEST((run() == run()));
}

/// Adapters that always have requests get the same work, up to the size of one batch.
BOOST_DATA_TEST_CASE(work_is_even_among_adapters_that_always_wait,
                     boost::unit_test::data::xrange(sanitized(1, 12)), seed) {
  std::mt19937_64 random(static_cast<std::uint64_t>(seed));
  constexpr std::int32_t kBatch = 4;
  constexpr std::int32_t kLongest = 24;
  World world({.num_blocks = 300, .limits = limits(kBatch, 32), .device_pages = 4});
  std::map<std::uint64_t, std::int64_t> work;
  std::map<std::uint64_t, std::int32_t> waiting;
  for (int i = 0; i < 500; ++i) {
    for (std::uint64_t task = 1; task <= 3; ++task) {
      for (; waiting[task] < 6; ++waiting[task]) {
        const auto half = static_cast<std::uint64_t>(task == 1 ? kLongest / 2 : 2 + task);
        world.add(static_cast<std::int32_t>(1 + random() % half),
                  static_cast<std::int32_t>(1 + random() % half), {.adapter = world.adapter(task)});
      }
    }
    world.plan_only();
    for (const Sequence* sequence : world.plan.started) --waiting[sequence->adapter->task_id()];
    for (const auto& entry : world.plan.entries) work[entry.sequence->adapter->task_id()] += entry.count;
    world.run_planned();
    const auto [least, most] = std::minmax({work[1], work[2], work[3]});
    BOOST_TEST_REQUIRE(most - least <= 2 * kBatch * kLongest);
  }
  BOOST_TEST(std::min({work[1], work[2], work[3]}) > 10 * kBatch * kLongest);
}

/// 99th percentile of the steps from arrival to first token, over the requests of all adapters except the
/// first. Requests arrive at random: the other adapters' at equal rates, the first one's `flood` times as
/// often as theirs together.
std::int64_t slow_start(bool adapter_fairness, double flood) {
  std::mt19937_64 random(7);
  std::exponential_distribution<double> gap(1.0);
  World world({.num_blocks = 200,
               .tokens_per_block = 16,
               .adapter_fairness = adapter_fairness,
               .limits = limits(8, 64),
               .device_pages = 16});
  constexpr std::uint64_t kOthers = 12;
  constexpr double kRate = 0.2;  // requests of the others per step: three quarters of what the batch can
                                 // serve
  constexpr std::int64_t kSteps = 2000;
  std::map<std::uint64_t, double> next;
  for (std::uint64_t task = 1; task <= kOthers + 1; ++task) next[task] = gap(random);
  std::map<const Sequence*, std::int64_t> arrived;
  std::vector<std::int64_t> waits;
  for (std::int64_t now = 0; now < kSteps; ++now) {
    for (auto& [task, time] : next) {
      const double rate = task == 1 ? kRate * flood : kRate / kOthers;
      while (rate > 0.0 && time < static_cast<double>(now)) {
        time += gap(random) / rate;
        if (task == 1 && world.scheduler.waiting().size() > 300) continue;  // limit of the queue
        const auto max_tokens = static_cast<std::int32_t>(15 + random() % 31);
        const Sequence& added = world.add(8, max_tokens, {.adapter = world.adapter(task)});
        if (task != 1) arrived[&added] = now;
      }
    }
    if (world.scheduler.empty()) continue;
    for (const auto& entry : world.step().entries) {
      if (entry.is_prefill && entry.wants_logits && arrived.contains(entry.sequence)) {
        waits.push_back(now - arrived.at(entry.sequence) + 1);
      }
    }
  }
  BOOST_TEST_REQUIRE(waits.size() > 150U);
  std::ranges::sort(waits);
  return waits[waits.size() * 99 / 100];
}

BOOST_AUTO_TEST_CASE(a_flood_at_most_doubles_what_others_wait_for_their_first_token) {
  const auto without_flood = slow_start(true, 0.0);
  BOOST_TEST(slow_start(true, 50.0) <= 2 * without_flood);
  BOOST_TEST(slow_start(false, 50.0) > 5 * without_flood);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::fairness_test
