#include "adaptrt/sched/invariants.h"

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "world.h"

namespace adaptrt::testing::invariants_test {
namespace {

BOOST_AUTO_TEST_SUITE(invariants)

/// A plan of two decodes, a prefill that ends and one that does not, with one damage each.
BOOST_AUTO_TEST_CASE(each_damage_to_a_plan_is_named) {
  const std::vector<std::pair<std::string, std::function<void(StepPlan&)>>> damages = {
      {"num_tokens does not count the planned tokens", [](StepPlan& plan) { ++plan.num_tokens; }},
      {"num_context_tokens does not count the prefills' tokens",
       [](StepPlan& plan) { ++plan.num_context_tokens; }},
      {"num_context_sequences does not count the prefills",
       [](StepPlan& plan) { ++plan.num_context_sequences; }},
      {"num_generation_sequences does not count the decodes",
       [](StepPlan& plan) { ++plan.num_generation_sequences; }},
      {"is a decode after a prefill",
       [](StepPlan& plan) { std::ranges::rotate(plan.entries, plan.entries.begin() + 1); }},
      {"is planned twice", [](StepPlan& plan) { plan.entries.push_back(plan.entries.front()); }},
      {"is planned without tokens", [](StepPlan& plan) { plan.entries.back().count = 0; }},
      {"does not continue after its computed tokens",
       [](StepPlan& plan) { ++plan.entries.back().first_token; }},
      {"is planned beyond its tokens", [](StepPlan& plan) { plan.entries.front().count = 2; }},
      {"wants logits at the wrong time", [](StepPlan& plan) { plan.entries.back().wants_logits = true; }},
      {"is planned as a decode, but is a prefill",
       [](StepPlan& plan) { plan.entries.back().is_prefill = false; }},
      {"sequences start although others had to be preempted",
       [](StepPlan& plan) { plan.preempted.push_back(plan.entries.front().sequence); }},
      {"is unservable and does not wait",
       [](StepPlan& plan) { plan.unservable.push_back(plan.entries.front().sequence); }},
      {"has failed to start and does not wait",
       [](StepPlan& plan) { plan.failed.push_back({plan.entries.front().sequence, {}}); }},
  };
  World world({.limits = limits(8, 12)});
  world.add(3, 8);
  world.add(3, 8);
  world.step();
  world.add(4, 2);
  world.add(30, 2);
  world.plan_only();
  BOOST_TEST_REQUIRE(world.plan.entries.size() == 4U);
  BOOST_TEST(check_invariants(world.plan, world.scheduler).empty());
  for (const auto& [said, damage] : damages) {
    check_found(problems_of_damaged_plan(world, damage), said);
  }
  world.run_planned();
  world.run_to_the_end();
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::invariants_test
