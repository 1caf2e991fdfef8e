#include "adaptrt/lora/peft_cache_config.h"

#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <functional>
#include <limits>

#include "adapters.h"
#include "adaptrt/lora/lora_cache.h"

namespace adaptrt::peft_cache_config_test {
namespace {

using namespace testing;

constexpr std::size_t kGiB = std::size_t{1} << 30;

struct BadField {
  const char* name;
  std::function<void(PeftCacheConfig&)> set;
};
std::ostream& operator<<(std::ostream& out, const BadField& field) {
  return out << field.name;
}

const std::vector<BadField> kBadFields{
    {"num_host_module_layer is -1", [](PeftCacheConfig& c) { c.num_host_module_layer = -1; }},
    {"num_device_module_layer is -1", [](PeftCacheConfig& c) { c.num_device_module_layer = -1; }},
    {"optimal_adapter_size is 0", [](PeftCacheConfig& c) { c.optimal_adapter_size = 0; }},
    {"max_adapter_size is 0", [](PeftCacheConfig& c) { c.max_adapter_size = 0; }},
    {"max_adapter_size is 2147483647", [](PeftCacheConfig& c) { c.max_adapter_size = 2147483647; }},
    {"num_put_workers is 0; accepted: 1 or more", [](PeftCacheConfig& c) { c.num_put_workers = 0; }},
    {"num_ensure_workers is 17; accepted: 0 to 16", [](PeftCacheConfig& c) { c.num_ensure_workers = 17; }},
    {"num_copy_streams is 0; accepted: 1 to 16", [](PeftCacheConfig& c) { c.num_copy_streams = 0; }},
    {"max_pages_per_block_host is 0; accepted: 1 or more",
     [](PeftCacheConfig& c) { c.max_pages_per_block_host = 0; }},
    {"max_pages_per_block_device is -1; accepted: 1 or more",
     [](PeftCacheConfig& c) { c.max_pages_per_block_device = -1; }},
    {"device_cache_percent is 0.0", [](PeftCacheConfig& c) { c.device_cache_percent = 0.0; }},
    {"device_cache_percent is 1.5", [](PeftCacheConfig& c) { c.device_cache_percent = 1.5; }},
    {"device_cache_percent is nan",
     [](PeftCacheConfig& c) { c.device_cache_percent = std::numeric_limits<double>::quiet_NaN(); }},
    {"lora_storage is 'int4'; accepted: 'exact', 'compressed', 'int8'",
     [](PeftCacheConfig& c) { c.lora_storage = "int4"; }},
    {"num_host_module_layer and host_cache_size both",
     [](PeftCacheConfig& c) {
       c.num_host_module_layer = 1000;
       c.host_cache_size = kGiB;
     }},
    {"num_device_module_layer and device_cache_percent both",
     [](PeftCacheConfig& c) {
       c.num_device_module_layer = 1000;
       c.device_cache_percent = 0.5;
     }},
};

/// Returns the error of resolving, or "".
std::string refusal(const PeftCacheConfig& config, const LoraLayout& layout, std::size_t free_bytes = kGiB) {
  try {
    (void)resolve_cache_sizes(config, layout, free_bytes);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

/// Makes an adapter of every module at this rank, with magnitudes.
SentAdapter whole_adapter(const LoraLayout& layout, std::int32_t rank, bool shifts = false) {
  using enum LoraModule;
  std::vector<SentRow> rows;
  for (std::int32_t layer = 0; layer < layout.num_layers; ++layer) {
    for (const LoraModule module : {kAttnQ, kAttnK, kAttnV, kAttnDense, kMlpHTo4H, kMlpGate, kMlp4HToH}) {
      rows.push_back({module, layer, rank, true, shifts});
    }
  }
  return make_adapter(rows, layout, 1, layout.dtype);
}

BOOST_AUTO_TEST_SUITE(peft_cache_config)

BOOST_DATA_TEST_CASE(a_bad_field_is_refused_by_name, boost::unit_test::data::make(kBadFields), field) {
  PeftCacheConfig config;
  field.set(config);
  BOOST_TEST(config.validate().list().size() == 1U);
  const std::string text = refusal(config, small_layout());
  BOOST_TEST(contains(text, field.name), text);
}

BOOST_AUTO_TEST_CASE(two_percent_of_the_free_memory_are_the_default) {
  const LoraLayout layout = small_layout();
  const LoraCacheSizes sizes = resolve_cache_sizes({}, layout, kGiB / 100);
  BOOST_TEST(sizes.host_bytes == kGiB);
  LoraCache cache = make_host_cache(layout, sizes);
  const SentAdapter largest = whole_adapter(layout, layout.max_rank);
  const auto held = cache.admit(largest.send(1));
  BOOST_TEST(cache.acquire(held).has_value());
  BOOST_TEST(cache.pages_needed(*held) == 1);
  BOOST_TEST(sizes.device_pages == static_cast<std::int64_t>(kGiB / 100 / 50 / sizes.page_bytes));
}

BOOST_AUTO_TEST_CASE(the_default_grows_when_two_percent_are_too_little) {
  LoraLayout layout = small_layout();
  layout.max_rank = 64;
  const LoraCacheSizes sizes = resolve_cache_sizes({}, layout, kGiB / 1024);
  LoraCache cache = make_host_cache(layout, sizes);
  const auto held = cache.admit(whole_adapter(layout, 64).send(1));
  BOOST_TEST(cache.pages_needed(*held) + 8 == sizes.device_pages);
  // Every image also fits in a page with its shifts.
  const auto shifted = cache.admit(whole_adapter(layout, 64, /*shifts=*/true).send(2));
  BOOST_TEST(cache.acquire(shifted).has_value());
}

BOOST_AUTO_TEST_CASE(defaults_grow_up_to_a_quarter_of_the_free_memory) {
  const LoraLayout layout = small_layout();
  LoraCacheDemand demand{.free_bytes = kGiB / 64, .free_host_bytes = 100 * kGiB, .max_batch_size = 1000};
  const auto sizes_for = [&](const PeftCacheConfig& config) {
    return resolve_cache_sizes(config, layout, demand);
  };
  const auto grows = [](const LoraCacheSizes& sizes) {
    return std::pair(sizes.max_host_bytes > sizes.host_bytes, sizes.max_device_pages > sizes.device_pages);
  };
  LoraCacheSizes sizes = sizes_for({});
  BOOST_TEST(sizes.max_device_pages == static_cast<std::int64_t>(demand.free_bytes / 4 / sizes.page_bytes));
  BOOST_TEST(sizes.max_host_bytes == sizes.host_bytes);  // the whole batch fits
  demand.free_bytes = 100 * kGiB;
  demand.max_batch_size = 500'000;
  sizes = sizes_for({});
  BOOST_TEST(sizes.max_device_pages == 500'000);
  BOOST_TEST(sizes.max_host_bytes > 5 * kGiB);
  BOOST_TEST(sizes.max_host_bytes <= 25 * kGiB);
  demand.device_level_grows = false;
  BOOST_TEST((grows(sizes_for({})) == std::pair(true, false)));
  demand.device_level_grows = true;
  PeftCacheConfig config;
  config.host_cache_size = kGiB;
  BOOST_TEST((grows(sizes_for(config)) == std::pair(false, true)));
  config.device_cache_percent = 0.01;
  BOOST_TEST((grows(sizes_for(config)) == std::pair(false, false)));
  config = {};
  config.num_host_module_layer = 1000;
  config.num_device_module_layer = 1000;
  BOOST_TEST((grows(sizes_for(config)) == std::pair(false, false)));
  BOOST_TEST((grows(resolve_cache_sizes({}, layout, 100 * kGiB)) == std::pair(false, false)));
}

BOOST_AUTO_TEST_CASE(a_page_holds_an_adapter_of_the_optimal_size) {
  const LoraLayout layout = small_layout(DType::kBFloat16);
  PeftCacheConfig config;
  config.optimal_adapter_size = 4;
  LoraCache cache = make_host_cache(layout, resolve_cache_sizes(config, layout, kGiB));
  BOOST_TEST(cache.pages_needed(*cache.admit(whole_adapter(layout, 4).send(1))) == 1);
  BOOST_TEST(cache.pages_needed(*cache.admit(whole_adapter(layout, 8).send(2))) == 2);
}

BOOST_AUTO_TEST_CASE(explicit_sizes_are_taken_or_refused_with_both_figures) {
  const LoraLayout layout = small_layout();
  PeftCacheConfig config;
  config.host_cache_size = 100;
  BOOST_TEST(contains(refusal(config, layout),
                      "host_cache_size gives the host level 100 bytes, but one adapter of "
                      "rank 8 on every enabled module needs"));
  config.host_cache_size = 123456;
  BOOST_TEST(resolve_cache_sizes(config, layout, kGiB).host_bytes == 123456U);
  config = {};
  config.num_host_module_layer = 2;
  BOOST_TEST(contains(refusal(config, layout), "num_host_module_layer gives the host level 1184 bytes"));
  config.num_host_module_layer = 1000;
  BOOST_TEST(resolve_cache_sizes(config, layout, kGiB).host_bytes == 1000U * (8 + 140) * 4);
  config = {};
  config.device_cache_percent = 1e-9;
  BOOST_TEST(contains(refusal(config, layout), "device_cache_percent gives the device level 0 pages of"));
  config.device_cache_percent = 0.5;
  const LoraCacheSizes half = resolve_cache_sizes(config, layout, kGiB);
  BOOST_TEST(half.device_pages == static_cast<std::int64_t>(kGiB / 2 / half.page_bytes));
  config = {};
  config.num_device_module_layer = 1000;
  const LoraCacheSizes layers = resolve_cache_sizes(config, layout, kGiB);
  BOOST_TEST(layers.device_pages * layers.page_bytes >= 1000U * (8 + 140) * 4);
  config.num_device_module_layer = std::numeric_limits<std::int64_t>::max();
  BOOST_TEST(contains(refusal(config, layout), "of memory are free"));
}

BOOST_AUTO_TEST_CASE(the_host_level_has_room_for_experts_of_other_ranks) {
  LoraLayout whole = small_layout();
  whole.sites.resize(6);
  whole.sites[0].adds_shifts = false;  // as on ranks, which keep adapters as sent
  for (std::int32_t expert = 0; expert < 3; ++expert) {
    whole.sites.push_back({1, 8, {{LoraModule::kMoeGate, 5}}, expert});
  }
  whole.target_modules.push_back(LoraModule::kMoeGate);
  LoraLayout own = whole;
  own.sites.resize(7);
  PeftCacheConfig config;
  config.host_cache_size = 100;
  BOOST_TEST(refusal(config, own) != refusal(config, whole));
  own.sites[6].experts_for_each = 3;
  BOOST_TEST(refusal(config, own) == refusal(config, whole));
}

BOOST_AUTO_TEST_CASE(a_lower_max_adapter_size_asks_for_less) {
  const LoraLayout layout = small_layout();
  PeftCacheConfig config;
  config.host_cache_size = 10000;
  BOOST_TEST(refusal(config, layout) != "");
  config.max_adapter_size = 1;
  BOOST_TEST(refusal(config, layout) == "");
}

BOOST_AUTO_TEST_CASE(fields_that_only_tune_change_no_size) {
  PeftCacheConfig config;
  config.num_put_workers = 4;
  config.num_ensure_workers = 4;
  config.num_copy_streams = 4;
  config.max_pages_per_block_host = 8;
  config.max_pages_per_block_device = 24;
  const LoraCacheSizes sizes = resolve_cache_sizes(config, small_layout(), kGiB);
  const LoraCacheSizes defaults = resolve_cache_sizes({}, small_layout(), kGiB);
  BOOST_TEST(sizes.page_bytes == defaults.page_bytes);
  BOOST_TEST(sizes.host_bytes == defaults.host_bytes);
  BOOST_TEST(sizes.device_pages == defaults.device_pages);
  BOOST_TEST(resolve_cache_sizes(config, LoraLayout{}, kGiB).device_pages == 0);
}

BOOST_AUTO_TEST_CASE(rows_need_no_padding_of_panels) {
  LoraLayout layout = small_layout(DType::kBFloat16);
  PeftCacheConfig config;
  config.optimal_adapter_size = 7;
  const LoraCacheSizes panels = resolve_cache_sizes(config, layout, kGiB);
  layout.matrix_layout = MatrixLayout::kRows;
  const LoraCacheSizes rows = resolve_cache_sizes(config, layout, kGiB);
  BOOST_TEST(rows.page_bytes < panels.page_bytes);
  LoraCache cache = make_host_cache(layout, rows);
  BOOST_TEST(cache.pages_needed(*cache.admit(whole_adapter(layout, 7).send(1))) == 1);
}

BOOST_AUTO_TEST_CASE(only_whole_panels_of_bfloat16_are_compressed) {
  PeftCacheConfig config;
  config.lora_storage = "compressed";
  LoraLayout layout = small_layout(DType::kBFloat16);
  BOOST_TEST(refusal(config, layout) == "");
  const std::string expected = "lora_storage is 'compressed'; expected 'exact': ";
  BOOST_TEST(contains(refusal(config, small_layout(DType::kFloat32)),
                      expected + "the engine computes in float32, and only bfloat16 is compressed"));
  layout.matrix_layout = MatrixLayout::kRows;
  BOOST_TEST(contains(refusal(config, layout), expected + "CUDA kernels do not decode adapters"));
  layout = small_layout(DType::kBFloat16);
  layout.sites[0].parts[0].num_remote_outputs = 6;
  BOOST_TEST(refusal(config, layout) == "");
}

BOOST_AUTO_TEST_CASE(whole_panels_of_every_type_are_rounded_to_int8) {
  PeftCacheConfig config;
  config.lora_storage = "int8";
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    BOOST_TEST(refusal(config, small_layout(dtype)) == "");
  }
  LoraLayout layout = small_layout();
  layout.matrix_layout = MatrixLayout::kRows;
  BOOST_TEST(contains(refusal(config, layout),
                      "lora_storage is 'int8'; expected 'exact': CUDA kernels do not decode adapters"));
}

BOOST_AUTO_TEST_CASE(engines_without_lora_have_no_cache_to_configure) {
  BOOST_TEST(resolve_cache_sizes({}, LoraLayout{}, kGiB).device_pages == 0);
  PeftCacheConfig config;
  config.host_cache_size = kGiB;
  BOOST_TEST(contains(refusal(config, LoraLayout{}), "built without LoRA"));
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::peft_cache_config_test
