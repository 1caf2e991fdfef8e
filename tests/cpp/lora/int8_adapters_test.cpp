// Adapters whose matrices are rounded to int8 on both levels.

#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "adapters.h"
#include "adaptrt/core/error.h"
#include "adaptrt/core/int8_matrix.h"
#include "adaptrt/lora/pack_adapter.h"

namespace adaptrt::int8_adapters_test {
namespace {

using namespace testing;
using enum LoraModule;

constexpr std::int64_t kSize = 512;
constexpr std::int32_t kRank = 16;
constexpr std::size_t kPageBytes = 1 << 18;
/// Bytes of A[16, 512] or B[512, 16], and of the scales of a site.
constexpr std::size_t kInt8Bytes = 8192;
constexpr std::size_t kScaleBytes = 64;
constexpr DType kTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

LoraLayout make_layout(DType dtype = DType::kBFloat16) {
  LoraLayout layout;
  layout.dtype = dtype;
  layout.num_layers = 2;
  layout.max_rank = kRank;
  layout.dora_enabled = true;
  layout.target_modules = {kAttnQ, kAttnK, kAttnV, kAttnDense, kLmHead};
  for (std::int32_t layer = 0; layer < 2; ++layer) {
    layout.sites.push_back({layer, kSize, {{kAttnQ, kSize}, {kAttnK, 96}, {kAttnV, 96}}});
    layout.sites.push_back({layer, kSize, {{kAttnDense, kSize}}});
  }
  layout.sites.push_back({0, kSize, {{kLmHead, kSize}}});
  return layout;
}

const std::vector<SentRow> kRows{{kAttnQ, 0, kRank, true, true}, {kAttnDense, 1, kRank}};

LoraCache make_cache(LoraStorage storage, DType dtype = DType::kBFloat16, std::size_t host_bytes = 1 << 20) {
  return {make_layout(dtype),
          std::make_unique<HostPages>(kPageBytes, 64),
          {.host_bytes = host_bytes, .storage = storage}};
}

void check(const LoraCache& cache) {
  for (const std::string& broken : cache.check_invariants()) BOOST_ERROR(broken);
}

/// Largest |value| of a row or column of a matrix.
float maximum(const SentAdapter& sent, std::size_t row, std::size_t first, std::size_t count,
              std::size_t step) {
  float most = 0.0F;
  for (std::size_t i = 0; i < count; ++i) most = std::max(most, std::abs(sent.get(row, first + i * step)));
  return most;
}

/// Checks a module with the A[kRank, kSize] and B[outputs, kRank] of a row, whose scales for B are given.
void check_values(const UnpackedModule& found, const SentAdapter& sent, std::size_t row,
                  const std::vector<float>& b_scales) {
  // Quotients, and the product of both scales, are rounded to float32.
  constexpr double kBound = 0.5 + 127 * 0x1p-22;
  const std::size_t first_of_b = kRank * kSize;
  for (std::size_t r = 0; r < kRank; ++r) {
    const float a_scale = int8_scale(maximum(sent, row, r * kSize, kSize, 1));
    const double b_scale = b_scales[r];
    for (std::size_t i = 0; i < kSize; ++i) {
      const double error = found.a[r * kSize + i] - b_scale * sent.get(row, r * kSize + i);
      BOOST_TEST_REQUIRE(std::abs(error) <= kBound * a_scale * b_scale);
    }
    for (std::size_t output = 0; output < found.b.size() / kRank; ++output) {
      const float integer = found.b[output * kRank + r];
      BOOST_TEST_REQUIRE(integer == std::round(integer));
      const double error = b_scale * integer - sent.get(row, first_of_b + output * kRank + r);
      BOOST_TEST_REQUIRE(std::abs(error) <= kBound * b_scale);
    }
  }
}

/// Scales of the columns of one row's B[outputs, kRank].
std::vector<float> b_scales(const SentAdapter& sent, std::size_t row, std::size_t outputs) {
  std::vector<float> scales(kRank);
  for (std::size_t r = 0; r < kRank; ++r) {
    scales[r] = int8_scale(maximum(sent, row, kRank * kSize + r, outputs, kRank));
  }
  return scales;
}

BOOST_AUTO_TEST_SUITE(int8_adapters)

BOOST_DATA_TEST_CASE(values_are_rounded_with_one_scale_a_rank, boost::unit_test::data::xrange(3), type) {
  const DType dtype = kTypes[type];
  LoraCache exact = make_cache(LoraStorage::kExact, dtype);
  LoraCache cache = make_cache(LoraStorage::kInt8, dtype);
  SentAdapter sent = make_adapter(kRows, make_layout());
  for (std::size_t i = 0; i < kSize; ++i) {
    sent.set(0, 3 * kSize + i, 0.0F);
    sent.set(0, 4 * kSize + i, sent.get(0, 4 * kSize + i) / 1024);
    sent.set(0, kRank * kSize + i * kRank + 5, 0.0F);
  }
  const auto held = cache.admit(sent.send(1));
  const DeviceLease lease = *cache.acquire(held);
  const DeviceSite& site = lease.adapter().sites[0];
  BOOST_TEST((site.a_storage == LoraStorage::kInt8));
  BOOST_TEST((site.parts[0].b_storage == LoraStorage::kInt8));
  const auto found = unpack_adapter(lease.adapter(), make_layout(dtype));
  BOOST_TEST_REQUIRE(found.size() == 2U);
  for (std::size_t row = 0; row < 2; ++row) {
    const std::vector<float> scales = b_scales(sent, row, kSize);
    check_values(found[row], sent, row, scales);
    const float* of_site = lease.adapter().sites[row == 0 ? 0 : 3].rank_scales;
    for (std::size_t r = 0; r < kRank; ++r) {
      BOOST_TEST(of_site[r] == int8_scale(maximum(sent, row, r * kSize, kSize, 1)) * scales[r]);
    }
  }
  BOOST_TEST(
      (found[0].magnitude ==
       unpack_adapter(exact.acquire(exact.admit(sent.send(1)))->adapter(), make_layout(dtype))[0].magnitude));
  BOOST_TEST(held->bytes() == 4 * kInt8Bytes + 2 * kScaleBytes + 2 * kSize * sizeof(float));
  BOOST_TEST(held->unshared_bytes() == exact.stats().host_bytes_used);
  BOOST_TEST(cache.stats().host_bytes_used == held->bytes());
  BOOST_TEST(cache.stats().saved_bytes == held->unshared_bytes() - held->bytes());
  BOOST_TEST(held->plan().bytes() == held->bytes());
  check(cache);
}

BOOST_AUTO_TEST_CASE(modules_that_share_a_have_one_scale_for_their_columns) {
  LoraCache cache = make_cache(LoraStorage::kInt8);
  SentAdapter sent = make_adapter({{kAttnQ, 0, kRank}, {kAttnK, 0, kRank}}, make_layout());
  for (std::size_t i = 0; i < kRank * kSize; ++i) sent.set(1, i, sent.get(0, i));
  for (std::size_t i = 0; i < 96 * kRank; ++i)
    sent.set(1, kRank * kSize + i, 3 * sent.get(1, kRank * kSize + i));
  const DeviceLease lease = *cache.acquire(cache.admit(sent.send(1)));
  BOOST_TEST(lease.adapter().sites[0].total_rank == kRank);
  BOOST_TEST(cache.stats().saved_products == 1);
  const auto found = unpack_adapter(lease.adapter(), make_layout());
  std::vector<float> scales = b_scales(sent, 0, kSize);
  std::ranges::transform(scales, b_scales(sent, 1, 96), scales.begin(),
                         [](float q, float k) { return std::max(q, k); });
  for (std::size_t row = 0; row < 2; ++row) check_values(found[row], sent, row, scales);
  check(cache);
}

BOOST_AUTO_TEST_CASE(modules_with_their_own_a_have_their_own_scales) {
  LoraCache cache = make_cache(LoraStorage::kInt8);
  SentAdapter sent = make_adapter({{kAttnQ, 0, kRank}, {kAttnV, 0, kRank}}, make_layout());
  for (std::size_t i = 0; i < 96 * kRank; ++i)
    sent.set(1, kRank * kSize + i, 3 * sent.get(1, kRank * kSize + i));
  const DeviceLease lease = *cache.acquire(cache.admit(sent.send(1)));
  BOOST_TEST(lease.adapter().sites[0].total_rank == 2 * kRank);
  const auto found = unpack_adapter(lease.adapter(), make_layout());
  check_values(found[0], sent, 0, b_scales(sent, 0, kSize));
  check_values(found[1], sent, 1, b_scales(sent, 1, 96));
}

BOOST_AUTO_TEST_CASE(equal_matrices_are_shared_by_adapters_with_other_scales) {
  LoraCache cache = make_cache(LoraStorage::kInt8);
  const std::vector<SentRow> rows{{kAttnDense, 0, kRank}};
  const SentAdapter base = make_adapter(rows, make_layout());
  SentAdapter fork = base;
  for (std::size_t r = 0; r < kRank; ++r) fork.set(0, kRank * kSize + r, 5.0F);
  const auto first = cache.admit(base.send(1));
  const auto second = cache.admit(fork.send(2));
  BOOST_TEST(cache.stats().host_bytes_used == 3 * kInt8Bytes + 2 * kScaleBytes);
  const DeviceLease of_first = *cache.acquire(first);
  const DeviceLease of_second = *cache.acquire(second);
  BOOST_TEST((of_first.adapter().sites[1].a == of_second.adapter().sites[1].a));
  BOOST_TEST(of_first.adapter().sites[1].rank_scales[0] < of_second.adapter().sites[1].rank_scales[0]);
  BOOST_TEST(!first->same_weights(*second));
  BOOST_TEST((first->content_digest() != second->content_digest()));
  BOOST_TEST((cache.admit(base.send(1))->generation() == first->generation()));
  check(cache);
  cache.unload(1);
  check(cache);
}

BOOST_AUTO_TEST_CASE(the_digest_tells_the_storage_and_the_scales) {
  const SentAdapter sent = make_adapter(kRows, make_layout());
  SentAdapter doubled = sent;
  for (std::size_t i = 0; i < 2 * kRank * kSize; ++i) doubled.set(1, i, 2 * sent.get(1, i));
  LoraCache exact = make_cache(LoraStorage::kExact);
  LoraCache cache = make_cache(LoraStorage::kInt8);
  const auto held = cache.admit(sent.send(1));
  BOOST_TEST((held->content_digest() != exact.admit(sent.send(1))->content_digest()));
  // The integers are the same.
  BOOST_TEST((held->content_digest() != cache.admit(doubled.send(2))->content_digest()));
  BOOST_TEST((held->content_digest() == cache.admit(sent.send(3))->content_digest()));
}

BOOST_AUTO_TEST_CASE(matrices_that_would_not_shrink_and_lm_head_stay_exact) {
  LoraCache exact = make_cache(LoraStorage::kExact);
  LoraCache cache = make_cache(LoraStorage::kInt8);
  const SentAdapter sent =
      make_adapter({{kAttnQ, 0, 1}, {kAttnDense, 0, 2}, {kLmHead, 0, kRank}}, make_layout());
  const auto expected = exact.admit(sent.send(1));
  const auto held = cache.admit(sent.send(1));
  BOOST_TEST(held->bytes() == expected->bytes());
  const auto found = unpack_adapter(cache.acquire(held)->adapter(), make_layout());
  const auto wanted = unpack_adapter(exact.acquire(expected)->adapter(), make_layout());
  for (std::size_t i = 0; i < 3; ++i) BOOST_TEST((found[i].a == wanted[i].a && found[i].b == wanted[i].b));
  check(cache);
}

BOOST_AUTO_TEST_CASE(scales_whose_product_is_not_finite_are_not_used) {
  LoraCache cache = make_cache(LoraStorage::kInt8);
  SentAdapter sent = make_adapter({{kAttnDense, 0, kRank}}, make_layout());
  sent.set(0, 0, 0x1p100F);
  sent.set(0, kRank * kSize, 0x1p100F);
  const DeviceLease lease = *cache.acquire(cache.admit(sent.send(1)));
  BOOST_TEST((lease.adapter().sites[1].a_storage == LoraStorage::kExact));
  BOOST_TEST((lease.adapter().sites[1].rank_scales == nullptr));
}

BOOST_AUTO_TEST_CASE(twice_as_many_adapters_fit_the_host_level) {
  const auto resident = [&](LoraStorage storage) {
    LoraCache cache = make_cache(storage, DType::kBFloat16, 6 * 4 * 2 * kInt8Bytes);
    for (std::uint32_t seed = 1; seed <= 14; ++seed) {
      (void)cache.admit(
          make_adapter({{kAttnDense, 0, kRank}, {kAttnDense, 1, kRank}}, make_layout(), seed).send(seed));
    }
    check(cache);
    return cache.stats().host_adapters;
  };
  BOOST_TEST(resident(LoraStorage::kExact) == 6);
  BOOST_TEST(resident(LoraStorage::kInt8) == 11);
}

BOOST_AUTO_TEST_CASE(numbers_that_are_not_finite_are_refused) {
  for (const float value :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    for (const std::size_t place : {std::size_t{7}, static_cast<std::size_t>(kRank * kSize + 7)}) {
      SentAdapter sent = make_adapter(kRows, make_layout());
      sent.set(0, place, value);
      const auto problem_of = [&](LoraStorage storage) {
        LoraCache cache = make_cache(storage);
        std::string text;
        try {
          (void)cache.admit(sent.send(1));
        } catch (const AdapterError& error) {
          text = error.what();
        }
        BOOST_TEST(cache.stats().host_bytes_used == 0U);
        check(cache);
        return text;
      };
      BOOST_TEST(!problem_of(LoraStorage::kInt8).empty());
      BOOST_TEST(problem_of(LoraStorage::kInt8) == problem_of(LoraStorage::kExact));
    }
  }
}

BOOST_AUTO_TEST_CASE(rows_for_cuda_are_refused) {
  LoraLayout layout = make_layout();
  layout.matrix_layout = MatrixLayout::kRows;
  BOOST_CHECK_EXCEPTION(LoraCache(layout, std::make_unique<HostPages>(kPageBytes, 4),
                                  {.host_bytes = 1 << 20, .storage = LoraStorage::kInt8}),
                        ConfigError, [](const ConfigError& error) {
                          return contains(error.what(), "lora_storage is 'int8'; expected 'exact'");
                        });
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::int8_adapters_test
