#include "adaptrt/kv/kv_cache_config.h"

#include <boost/test/unit_test.hpp>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace adaptrt::kv_cache_config_test {
namespace {

const KvPoolDemand kDemand{.tokens_per_block = 16,
                           .block_bytes = 1000,
                           .free_memory_bytes = 100'000,
                           .max_batch_size = 4,
                           .max_seq_len = 100};

BOOST_AUTO_TEST_SUITE(kv_cache_config)

BOOST_AUTO_TEST_CASE(defaults_are_valid) {
  BOOST_TEST(KvCacheConfig{}.validate().empty());
}

BOOST_AUTO_TEST_CASE(each_unsupported_or_senseless_field_is_refused_by_name) {
  const std::vector<std::pair<std::string, std::function<void(KvCacheConfig&)>>> cases = {
      {"max_tokens", [](KvCacheConfig& c) { c.max_tokens = 0; }},
      {"max_tokens", [](KvCacheConfig& c) { c.max_tokens = -5; }},
      {"max_attention_window",
       [](KvCacheConfig& c) { c.max_attention_window = std::vector<std::int64_t>{}; }},
      {"sink_token_length", [](KvCacheConfig& c) { c.sink_token_length = 4; }},
      {"free_gpu_memory_fraction", [](KvCacheConfig& c) { c.free_gpu_memory_fraction = 0.0; }},
      {"free_gpu_memory_fraction", [](KvCacheConfig& c) { c.free_gpu_memory_fraction = 1.5; }},
      {"free_gpu_memory_fraction",
       [](KvCacheConfig& c) { c.free_gpu_memory_fraction = std::numeric_limits<double>::quiet_NaN(); }},
      {"host_cache_size", [](KvCacheConfig& c) { c.host_cache_size = 1; }},
      {"host_cache_dir", [](KvCacheConfig& c) { c.host_cache_dir = "/tmp"; }},
      {"host_cache_dir",
       [](KvCacheConfig& c) {
         c.host_cache_size = 1;
         c.host_cache_dir = "";
       }},
      {"host_cache_size",
       [](KvCacheConfig& c) {
         c.host_cache_size = 1;
         c.host_cache_dir = "/tmp";
         c.enable_block_reuse = false;
       }},
      {"max_state_snapshots", [](KvCacheConfig& c) { c.max_state_snapshots = -1; }},
      {"max_state_snapshots",
       [](KvCacheConfig& c) {
         c.max_state_snapshots = 1;
         c.enable_block_reuse = false;
       }},
      {"onboard_blocks", [](KvCacheConfig& c) { c.onboard_blocks = false; }},
      {"cross_kv_cache_fraction", [](KvCacheConfig& c) { c.cross_kv_cache_fraction = 1.0; }},
      {"secondary_offload_min_priority", [](KvCacheConfig& c) { c.secondary_offload_min_priority = 0; }},
      {"secondary_offload_min_priority",
       [](KvCacheConfig& c) {
         c.host_cache_size = 1;
         c.host_cache_dir = "/tmp";
         c.secondary_offload_min_priority = 101;
       }},
  };
  for (const auto& [field, change] : cases) {
    KvCacheConfig config;
    change(config);
    const Problems problems = config.validate();
    BOOST_TEST_REQUIRE(problems.list().size() == 1U, field);
    BOOST_TEST(problems.list()[0].starts_with(field));
    BOOST_CHECK_THROW((void)resolve_num_blocks(config, kDemand), ConfigError);
  }
}

BOOST_AUTO_TEST_CASE(harmless_values_of_unsupported_fields_are_accepted) {
  KvCacheConfig config;
  config.sink_token_length = 0;
  config.host_cache_size = 0;
  config.cross_kv_cache_fraction = 0.0;
  config.max_attention_window = std::vector<std::int64_t>{64};  // the engine decides
  BOOST_TEST(config.validate().empty());
}

BOOST_AUTO_TEST_CASE(a_second_level_needs_a_size_and_a_directory) {
  KvCacheConfig config;
  config.host_cache_size = 1;
  config.host_cache_dir = "/tmp";
  config.secondary_offload_min_priority = 100;
  BOOST_TEST(config.validate().empty());
  BOOST_TEST(config.has_second_level());
  BOOST_TEST(!KvCacheConfig{}.has_second_level());
}

BOOST_AUTO_TEST_CASE(any_share_of_memory_up_to_all_of_it_is_accepted) {
  KvCacheConfig config;
  for (const double share : {1e-9, 0.5, 1.0}) {
    config.free_gpu_memory_fraction = share;
    BOOST_TEST(config.validate().empty());
  }
  BOOST_TEST(resolve_num_blocks(config, {.tokens_per_block = 16,
                                         .block_bytes = 1000,
                                         .free_memory_bytes = 9'999,
                                         .max_batch_size = 4,
                                         .max_seq_len = 100}) == 9);
}

BOOST_AUTO_TEST_CASE(all_problems_are_told_at_once) {
  KvCacheConfig config;
  config.max_tokens = 0;
  config.onboard_blocks = false;
  config.sink_token_length = 4;
  BOOST_TEST(config.validate().list().size() == 3U);
}

BOOST_AUTO_TEST_CASE(the_pool_is_what_the_batch_can_use_or_what_memory_holds) {
  KvCacheConfig config;
  BOOST_TEST(resolve_num_blocks(config, kDemand) == 4 * 7);
  config.free_gpu_memory_fraction = 0.1;
  BOOST_TEST(resolve_num_blocks(config, kDemand) == 10);
  config.max_tokens = 5 * 16 + 15;
  BOOST_TEST(resolve_num_blocks(config, kDemand) == 5);
  config.max_tokens = 10'000;
  BOOST_TEST(resolve_num_blocks(config, kDemand) == 10);
}

BOOST_AUTO_TEST_CASE(a_pool_without_a_block_is_refused) {
  KvCacheConfig config;
  config.max_tokens = 15;
  BOOST_CHECK_THROW((void)resolve_num_blocks(config, kDemand), ConfigError);
  KvPoolDemand poor = kDemand;
  poor.free_memory_bytes = 1000;
  BOOST_CHECK_THROW((void)resolve_num_blocks(KvCacheConfig{}, poor), ConfigError);
  BOOST_CHECK_THROW((void)resolve_num_blocks(KvCacheConfig{}, KvPoolDemand{}), ConfigError);
}

BOOST_AUTO_TEST_CASE(states_take_their_memory_before_blocks) {
  KvCacheConfig config;
  config.free_gpu_memory_fraction = 0.5;
  const StatePoolDemand demand{.slot_bytes = 100, .free_memory_bytes = 10'000, .max_batch_size = 4};
  const auto slots_of = [&] {
    const StateSlots slots = resolve_state_slots(config, demand);
    return std::vector<std::int32_t>{slots.num_sequences, slots.num_snapshots, slots.total()};
  };
  const auto check_slots = [&](const std::vector<std::int32_t>& expected) {
    BOOST_TEST(slots_of() == expected, boost::test_tools::per_element());
  };
  check_slots({4, 8, 12});
  config.free_gpu_memory_fraction = 0.2;
  check_slots({4, 5, 9});  // a quarter of the memory
  config.max_state_snapshots = 16;
  check_slots({4, 16, 20});
  config.max_state_snapshots = 17;
  BOOST_CHECK_THROW(static_cast<void>(slots_of()), ConfigError);
  config.max_state_snapshots = 0;
  check_slots({4, 0, 4});
  config.max_state_snapshots.reset();
  config.enable_block_reuse = false;
  check_slots({4, 0, 4});
  config.free_gpu_memory_fraction = 0.03;
  BOOST_CHECK_THROW(static_cast<void>(slots_of()), ConfigError);

  config = {};
  config.free_gpu_memory_fraction = 1.0;
  KvPoolDemand next_to_states = kDemand;
  next_to_states.free_memory_bytes = 12 * kDemand.block_bytes;
  next_to_states.state_bytes = 2 * kDemand.block_bytes + 1;
  BOOST_TEST(resolve_num_blocks(config, next_to_states) == 9);
  next_to_states.state_bytes = 12 * kDemand.block_bytes;
  BOOST_CHECK_THROW(static_cast<void>(resolve_num_blocks(config, next_to_states)), ConfigError);
}

BOOST_AUTO_TEST_CASE(huge_sizes_do_not_overflow) {
  KvPoolDemand huge = kDemand;
  huge.free_memory_bytes = std::numeric_limits<std::size_t>::max();
  huge.max_batch_size = std::numeric_limits<std::int32_t>::max();
  huge.max_seq_len = std::numeric_limits<std::int32_t>::max();
  huge.block_bytes = 1;
  BOOST_TEST(resolve_num_blocks(KvCacheConfig{}, huge) == std::numeric_limits<std::int32_t>::max());
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::kv_cache_config_test
