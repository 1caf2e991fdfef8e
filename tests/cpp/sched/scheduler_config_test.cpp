#include "adaptrt/sched/scheduler_config.h"

#include <boost/test/unit_test.hpp>

namespace adaptrt::scheduler_config_test {
namespace {

BOOST_AUTO_TEST_SUITE(scheduler_config)

BOOST_AUTO_TEST_CASE(defaults_and_every_policy_are_valid) {
  SchedulerConfig config;
  BOOST_CHECK(config.capacity_scheduler_policy == CapacitySchedulerPolicy::kGuaranteedNoEvict);
  for (const auto policy :
       {CapacitySchedulerPolicy::kGuaranteedNoEvict, CapacitySchedulerPolicy::kMaxUtilization,
        CapacitySchedulerPolicy::kStaticBatch}) {
    config.capacity_scheduler_policy = policy;
    for (const auto chunking :
         {ContextChunkingPolicy::kFirstComeFirstServed, ContextChunkingPolicy::kEqualProgress}) {
      config.context_chunking_policy = chunking;
      BOOST_TEST(config.validate(true).empty());
    }
  }
}

BOOST_AUTO_TEST_CASE(equal_progress_needs_chunks) {
  SchedulerConfig config;
  config.context_chunking_policy = ContextChunkingPolicy::kEqualProgress;
  config.dynamic_batch_config = DynamicBatchConfig{};  // no effect, so not refused
  const auto problems = config.validate(false);
  BOOST_TEST_REQUIRE(problems.list().size() == 1U);
  BOOST_TEST(problems.list()[0].starts_with("context_chunking_policy is EQUAL_PROGRESS"));
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::scheduler_config_test
