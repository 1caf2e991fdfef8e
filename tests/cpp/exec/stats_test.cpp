#include "adaptrt/exec/stats.h"

#include <boost/test/unit_test.hpp>
#include <limits>

namespace adaptrt::stats_test {
namespace {

BOOST_AUTO_TEST_SUITE(stats)

BOOST_AUTO_TEST_CASE(json_has_tensorrt_llms_keys) {
  IterationStats stats;
  stats.timestamp = "a \"quoted\" \\ line\nbreak \x01";
  stats.iter = 7;
  stats.iter_latency_ms = 0.25;
  stats.kv_cache_stats = KvCacheStats{};
  const std::string json = to_json_str(stats);
  BOOST_TEST(json.find(R"("timestamp":"a \"quoted\" \\ line\u000abreak \u0001")") != std::string::npos);
  BOOST_TEST(json.find(R"("iterLatencyMS":0.25)") != std::string::npos);
  BOOST_TEST(json.find(R"("iter":7)") != std::string::npos);
  BOOST_TEST(json.find(R"("maxNumBlocks":0)") != std::string::npos);
  BOOST_TEST(json.find(R"("inflightBatchingStats":null)") != std::string::npos);
  BOOST_TEST(json.find(R"("staticBatchingStats":null)") != std::string::npos);
  BOOST_TEST(json.find(R"("newActiveRequestsQueueLatencyMS":0)") != std::string::npos);
}

BOOST_AUTO_TEST_CASE(json_of_requests) {
  RequestStatsPerIteration stats;
  stats.iter = 3;
  stats.request_stats.resize(2);
  stats.request_stats[1].stage = RequestStage::kContextInProgress;
  stats.request_stats[1].kv_cache_hit_rate_per_request = std::numeric_limits<double>::quiet_NaN();
  const std::string json = to_json_str(stats);
  BOOST_TEST(json.starts_with(R"({"iter":3,"requestStats":[{"id":0,"stage":"QUEUED",)"));
  BOOST_TEST(json.find(R"("stage":"CONTEXT_IN_PROGRESS")") != std::string::npos);
  BOOST_TEST(json.ends_with(R"("kvCacheHitRatePerRequest":null,"disServingStats":null}]})"));
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::stats_test
