#include "adaptrt/sched/scheduler_config.h"

#include <boost/test/unit_test.hpp>

namespace adaptrt {
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
      BOOST_TEST(config.validate().empty());
    }
  }
}

BOOST_AUTO_TEST_CASE(what_is_not_supported_is_refused_by_name) {
  SchedulerConfig config;
  config.dynamic_batch_config = DynamicBatchConfig{};
  const auto problems = config.validate().list();
  BOOST_TEST_REQUIRE(problems.size() == 1U);
  BOOST_TEST(problems[0].starts_with("dynamic_batch_config is set"));
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt
