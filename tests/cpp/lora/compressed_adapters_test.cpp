// Adapters whose matrices are compressed on both levels.

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "adapters.h"
#include "adaptrt/core/compressed_matrix.h"
#include "adaptrt/core/error.h"
#include "adaptrt/core/panels.h"
#include "adaptrt/lora/pack_adapter.h"
#include "adaptrt/lora/stored_matrix.h"

namespace adaptrt::compressed_adapters_test {
namespace {

using namespace testing;
using enum LoraModule;

constexpr std::int64_t kInputs = 512;
constexpr std::int32_t kRank = 16;
constexpr std::size_t kPageBytes = 1 << 17;
/// Bytes of A[16, 512] and B[512, 16] in bfloat16, and compressed if all values fit.
constexpr std::size_t kBytes = 16384;
constexpr std::size_t kCompressedBytes = 64 + kBytes / 4 * 3;

LoraLayout make_layout() {
  LoraLayout layout;
  layout.dtype = DType::kBFloat16;
  layout.num_layers = 2;
  layout.max_rank = kRank;
  layout.dora_enabled = true;
  layout.target_modules = {kAttnQ, kAttnDense};
  for (std::int32_t layer = 0; layer < 2; ++layer) {
    layout.sites.push_back({layer, kInputs, {{kAttnQ, 512}}});
    layout.sites.push_back({layer, kInputs, {{kAttnDense, 512}}});
  }
  return layout;
}

const std::vector<SentRow> kRows{{kAttnQ, 0, kRank, true, true}, {kAttnDense, 1, kRank}};

LoraCache make_cache(LoraStorage storage, std::size_t host_bytes = 1 << 20, std::int64_t pages = 64,
                     std::size_t page_bytes = kPageBytes) {
  return {make_layout(),
          std::make_unique<HostPages>(page_bytes, pages),
          {.host_bytes = host_bytes, .storage = storage}};
}

void check(const LoraCache& cache) {
  for (const std::string& broken : cache.check_invariants()) BOOST_ERROR(broken);
}

/// Returns all values of an adapter on the device level.
std::vector<float> values_of(const DeviceAdapter& adapter) {
  std::vector<float> values;
  for (const UnpackedModule& module : unpack_adapter(adapter, make_layout())) {
    for (const auto* part : {&module.a, &module.b, &module.magnitude, &module.shift}) {
      values.insert(values.end(), part->begin(), part->end());
    }
  }
  return values;
}

BOOST_AUTO_TEST_SUITE(compressed_adapters)

BOOST_AUTO_TEST_CASE(values_are_those_that_were_sent) {
  LoraCache exact = make_cache(LoraStorage::kExact);
  LoraCache compressed = make_cache(LoraStorage::kCompressed);
  const SentAdapter sent = make_adapter(kRows, make_layout());
  const auto expected = exact.admit(sent.send(1));
  const auto held = compressed.admit(sent.send(1));
  const DeviceLease lease = *compressed.acquire(held);
  BOOST_TEST((values_of(lease.adapter()) == values_of(exact.acquire(expected)->adapter())));
  const DeviceSite& site = lease.adapter().sites[0];
  BOOST_TEST((site.a_storage == LoraStorage::kCompressed));
  BOOST_TEST((site.parts[0].b_storage == LoraStorage::kCompressed));
  BOOST_TEST(held->bytes() == 4 * kCompressedBytes + 2 * 512 * sizeof(float));
  BOOST_TEST(held->unshared_bytes() == expected->bytes());
  BOOST_TEST(compressed.stats().saved_bytes == 4 * (kBytes - kCompressedBytes));
  BOOST_TEST(held->plan().bytes() == held->bytes());
  check(compressed);
}

BOOST_AUTO_TEST_CASE(matrices_whose_values_do_not_fit_stay_exact) {
  LoraCache cache = make_cache(LoraStorage::kCompressed);
  SentAdapter sent = make_adapter(kRows, make_layout());
  std::mt19937 random(1);
  // A of the first row gets exponents from the whole range; B keeps its own.
  for (std::size_t i = 0; i < kRank * kInputs; ++i) {
    sent.set(0, i, std::ldexp(1.0F, static_cast<int>(random() % 200) - 100));
  }
  const auto held = cache.admit(sent.send(1));
  const DeviceLease lease = *cache.acquire(held);
  BOOST_TEST((lease.adapter().sites[0].a_storage == LoraStorage::kExact));
  BOOST_TEST((lease.adapter().sites[0].parts[0].b_storage == LoraStorage::kCompressed));
  BOOST_TEST(cache.stats().saved_bytes == 3 * (kBytes - kCompressedBytes));
  const auto modules = unpack_adapter(lease.adapter(), make_layout());
  for (std::size_t i = 0; i < kRank * kInputs; ++i) BOOST_TEST_REQUIRE(modules[0].a[i] == sent.get(0, i));
  check(cache);
}

BOOST_AUTO_TEST_CASE(equal_matrices_are_shared_and_go_with_their_last_adapter) {
  LoraCache cache = make_cache(LoraStorage::kCompressed);
  const std::vector<SentRow> rows{{kAttnQ, 0, kRank}};
  const SentAdapter base = make_adapter(rows, make_layout());
  SentAdapter fork = base;
  fork.set(0, kRank * kInputs, 5.0F);
  const auto first = cache.admit(base.send(1));
  const auto second = cache.admit(fork.send(2));
  BOOST_TEST(cache.stats().host_bytes_used == 3 * kCompressedBytes);
  const DeviceLease of_first = *cache.acquire(first);
  const DeviceLease of_second = *cache.acquire(second);
  BOOST_TEST((of_first.adapter().sites[0].a == of_second.adapter().sites[0].a));
  BOOST_TEST((of_first.adapter().sites[0].parts[0].b != of_second.adapter().sites[0].parts[0].b));
  BOOST_TEST(!first->same_weights(*second));
  BOOST_TEST((first->content_digest() != second->content_digest()));
  BOOST_TEST((cache.admit(base.send(1))->generation() == first->generation()));
  check(cache);
  cache.unload(1);
  check(cache);
}

BOOST_AUTO_TEST_CASE(a_third_more_adapters_fit_the_host_level) {
  const std::vector<SentRow> rows{{kAttnQ, 0, kRank}, {kAttnDense, 0, kRank}};
  const auto resident = [&](LoraStorage storage) {
    LoraCache cache = make_cache(storage, 10 * 4 * kBytes);
    for (std::uint32_t seed = 1; seed <= 15; ++seed) {
      (void)cache.admit(make_adapter(rows, make_layout(), seed).send(seed));
    }
    check(cache);
    return cache.stats().host_adapters;
  };
  BOOST_TEST(resident(LoraStorage::kExact) == 10);
  BOOST_TEST(resident(LoraStorage::kCompressed) == 13);
}

BOOST_AUTO_TEST_CASE(pages_hold_compressed_images) {
  const std::vector<SentRow> rows{
      {kAttnQ, 0, kRank}, {kAttnDense, 0, kRank}, {kAttnQ, 1, kRank}, {kAttnDense, 1, kRank}};
  const auto pages = [&](LoraStorage storage) {
    LoraCache cache = make_cache(storage, 1 << 20, 16, 2 * 2 * kCompressedBytes);
    return cache.pages_needed(*cache.admit(make_adapter(rows, make_layout()).send(1)));
  };
  BOOST_TEST(pages(LoraStorage::kExact) == 4);
  BOOST_TEST(pages(LoraStorage::kCompressed) == 2);
}

BOOST_AUTO_TEST_CASE(a_device_level_with_its_own_memory_is_refused) {
  LoraLayout layout = make_layout();
  layout.matrix_layout = MatrixLayout::kRows;
  BOOST_CHECK_EXCEPTION(
      LoraCache(layout, std::make_unique<HostPages>(kPageBytes, 4),
                {.host_bytes = 1 << 20, .storage = LoraStorage::kCompressed}),
      ConfigError, [](const ConfigError& error) {
        return std::string(error.what()).find("lora_storage is 'compressed'; expected 'exact'") !=
               std::string::npos;
      });
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::compressed_adapters_test
