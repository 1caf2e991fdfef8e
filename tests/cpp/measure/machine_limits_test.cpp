#include "adaptrt/measure/machine_limits.h"

#include <boost/test/unit_test.hpp>

#include "adaptrt/core/thread_pool.h"
#include "adaptrt/cpu/amx.h"

namespace adaptrt::machine_limits_test {
namespace {

BOOST_AUTO_TEST_SUITE(machine_limits)

BOOST_AUTO_TEST_CASE(amx_is_among_the_limits_where_it_is_permitted) {
  ThreadPool threads(1);
  const MachineLimits limits = measure_machine_limits(&threads, 1);
  BOOST_TEST(limits.read_bandwidth > 0.0);
  BOOST_TEST(limits.float32_flops > 0.0);
  BOOST_TEST((limits.bfloat16_from_l2_flops > 0.0) == amx_is_permitted());
  BOOST_TEST((limits.int8_from_l2_ops > 0.0) == amx_is_permitted());
  // About fifteen times on an idle machine.
  if (amx_is_permitted()) BOOST_TEST(limits.bfloat16_flops > 2.0 * limits.float32_flops);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::machine_limits_test
