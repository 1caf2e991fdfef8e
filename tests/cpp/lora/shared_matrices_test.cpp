#include "adaptrt/lora/shared_matrices.h"

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstring>
#include <limits>
#include <optional>
#include <random>
#include <thread>

#include "adapters.h"
#include "adaptrt/core/checksum.h"
#include "adaptrt/core/error.h"
#include "adaptrt/core/panels.h"
#include "adaptrt/lora/pack_adapter.h"

namespace adaptrt::shared_matrices_test {
namespace {

using namespace testing;
using enum LoraModule;

constexpr std::int64_t kInputs = 512;
constexpr std::int32_t kRank = 8;
// Rank 8 in float32: A[8, 512], B[512, 8] of q and v, and B[64, 8] of k, which is too small to be shared.
constexpr std::size_t kBytesOfA = 16384;
constexpr std::size_t kBytesOfB = 16384;
constexpr std::size_t kBytesOfKeys = 2048;
static_assert(kBytesOfKeys < kMinSharedBytes);
constexpr std::size_t kPageBytes = 1 << 18;

/// Two layers whose matrices are large enough to be shared.
LoraLayout wide_layout(MatrixLayout matrix_layout = MatrixLayout::kPanels) {
  LoraLayout layout;
  layout.num_layers = 2;
  layout.max_rank = kRank;
  layout.dora_enabled = true;
  layout.target_modules = {kAttnQ, kAttnK, kAttnV, kAttnDense};
  layout.matrix_layout = matrix_layout;
  for (std::int32_t layer = 0; layer < 2; ++layer) {
    layout.sites.push_back({layer, kInputs, {{kAttnQ, 512}, {kAttnK, 64}, {kAttnV, 512}}});
    layout.sites.push_back({layer, kInputs, {{kAttnDense, 1024}}});
  }
  return layout;
}

SentAdapter make(const std::vector<SentRow>& rows, std::uint32_t seed = 1) {
  return make_adapter(rows, wide_layout(), seed);
}

void set_a(SentAdapter& sent, std::size_t row, float value) {
  sent.set(row, 0, value);
}
void set_b(SentAdapter& sent, std::size_t row, float value) {
  sent.set(row, static_cast<std::size_t>(kRank * kInputs), value);
}
/// Copies A of one row to another one of the same rank.
void copy_a(SentAdapter& sent, std::size_t from, std::size_t to) {
  for (std::size_t i = 0; i < static_cast<std::size_t>(kRank * kInputs); ++i)
    sent.set(to, i, sent.get(from, i));
}
void zero_b(SentAdapter& sent, std::size_t row, std::int64_t outputs) {
  const auto first = static_cast<std::size_t>(kRank * kInputs);
  for (std::size_t i = 0; i < static_cast<std::size_t>(kRank * outputs); ++i) {
    sent.set(row, first + i, i % 2 == 0 ? 0.0F : -0.0F);
  }
}

/// Checks that a device adapter has exactly the rows that were sent, except for `dropped` ones.
void expect_values(const DeviceAdapter& device, const SentAdapter& sent, const std::vector<SentRow>& rows,
                   std::size_t dropped = 0) {
  const LoraLayout layout = wide_layout();
  const auto modules = unpack_adapter(device, layout);
  BOOST_TEST_REQUIRE(modules.size() == rows.size() - dropped);
  for (const UnpackedModule& module : modules) {
    const auto row = std::ranges::find_if(rows, [&](const SentRow& candidate) {
      return candidate.layer == module.layer && candidate.module == module.module;
    });
    BOOST_TEST_REQUIRE((row != rows.end()));
    const auto index = static_cast<std::size_t>(row - rows.begin());
    std::vector<float> values = module.a;
    values.insert(values.end(), module.b.begin(), module.b.end());
    values.insert(values.end(), module.magnitude.begin(), module.magnitude.end());
    values.insert(values.end(), module.shift.begin(), module.shift.end());
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < values.size(); ++i) wrong += values[i] == sent.get(index, i) ? 0 : 1;
    BOOST_TEST(values.size() == elements_of(*row, layout));
    BOOST_TEST(wrong == 0U);
  }
}

/// A cache whose invariants are checked at every use.
class CheckedCache {
 public:
  explicit CheckedCache(std::size_t host_bytes)
      : cache_(make_host_cache(wide_layout(), {host_bytes, kPageBytes, 64})) {}
  ~CheckedCache() { check(); }
  LoraCache* operator->() {
    check();
    return &cache_;
  }
  std::vector<std::uint64_t> ids() {
    std::vector<std::uint64_t> result;
    for (const LoraCacheEntry& entry : (*this)->list()) result.push_back(entry.task_id);
    return result;
  }

 private:
  void check() {
    for (const std::string& broken : cache_.check_invariants()) BOOST_ERROR(broken);
  }
  LoraCache cache_;
};

using Ids = std::vector<std::uint64_t>;

const std::vector<SentRow> kTwoRows{{kAttnQ, 0, kRank}, {kAttnDense, 1, kRank}};
constexpr std::size_t kBytesOfTwoRows = kBytesOfA + kBytesOfB + kBytesOfA + 2 * kBytesOfB;

BOOST_AUTO_TEST_SUITE(shared_matrices)

BOOST_AUTO_TEST_CASE(adapters_keep_equal_matrices_once_until_the_last_one_goes) {
  CheckedCache cache(1 << 20);
  const SentAdapter base = make(kTwoRows);
  SentAdapter fork = base;
  set_b(fork, 0, 5.0F);
  const auto first = cache->admit(base.send(1));
  BOOST_TEST(cache->stats().host_bytes_used == kBytesOfTwoRows);
  BOOST_TEST(cache->stats().saved_bytes == 0U);
  auto second = cache->admit(fork.send(2));
  BOOST_TEST(cache->stats().host_bytes_used == kBytesOfTwoRows + kBytesOfB);
  BOOST_TEST(cache->stats().saved_bytes == kBytesOfTwoRows - kBytesOfB);
  BOOST_TEST(cache->stats().memory_bytes == cache->stats().host_bytes_used);
  BOOST_TEST(cache->stats().saved_products == 0);
  for (const LoraCacheEntry& entry : cache->list()) BOOST_TEST(entry.host_bytes == kBytesOfTwoRows);
  BOOST_TEST(!first->same_weights(*second));
  const auto lease = cache->acquire(second);
  BOOST_TEST_REQUIRE(lease.has_value());
  expect_values(lease->adapter(), fork, kTwoRows);
  expect_values(cache->acquire(first)->adapter(), base, kTwoRows);
  // A of the fork, which is kept elsewhere, leaves no gap before B.
  BOOST_TEST((lease->adapter().sites[0].parts[0].b == second->data()));
  BOOST_TEST((cache->admit(base.send(3))->data() == nullptr));  // all memory was given back
  cache->unload(3);
  {
    const auto held = cache->admit(base.send(1));
    cache->unload(1);
    BOOST_TEST(cache->stats().host_bytes_used == kBytesOfTwoRows + kBytesOfB);
  }
  BOOST_TEST(cache->stats().host_adapters == 2);  // `first` holds it
}

/// Number of whole system pages of a matrix that are in memory.
std::size_t resident_pages(const void* data, std::size_t bytes) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const auto begin = (reinterpret_cast<std::uintptr_t>(data) + page - 1) / page * page;
  const auto end = (reinterpret_cast<std::uintptr_t>(data) + bytes) / page * page;
  std::vector<unsigned char> resident((end - begin) / page);
  BOOST_TEST_REQUIRE(mincore(reinterpret_cast<void*>(begin), end - begin, resident.data()) == 0);
  return static_cast<std::size_t>(
      std::ranges::count_if(resident, [](unsigned char in) { return (in & 1) != 0; }));
}

BOOST_AUTO_TEST_CASE(memory_of_matrices_that_nobody_shares_goes_with_their_adapter) {
  CheckedCache cache(1 << 20);
  const SentAdapter base = make(kTwoRows);
  SentAdapter fork = base;
  set_b(fork, 0, 5.0F);
  auto first = cache->admit(base.send(1));
  const std::byte* own = cache->acquire(first)->adapter().sites[0].parts[0].b;
  auto second = cache->admit(fork.send(2));
  const std::byte* shared = cache->acquire(second)->adapter().sites[0].a;
  BOOST_TEST(resident_pages(own, kBytesOfB) >= 3U);
  first.reset();
  cache->unload(1);
  BOOST_TEST(cache->stats().host_bytes_used == kBytesOfTwoRows);
  BOOST_TEST(cache->stats().saved_bytes == 0U);
  BOOST_TEST(resident_pages(own, kBytesOfB) == 0U);
  BOOST_TEST(resident_pages(shared, kBytesOfA) >= 3U);
  expect_values(cache->acquire(second)->adapter(), fork, kTwoRows);
  second.reset();
  cache->unload(2);
  BOOST_TEST(cache->stats().host_bytes_used == 0U);
}

BOOST_AUTO_TEST_CASE(equal_matrices_of_one_adapter_are_kept_once) {
  CheckedCache cache(1 << 20);
  const std::vector<SentRow> rows{{kAttnQ, 0, kRank, true}, {kAttnDense, 0, kRank}, {kAttnQ, 1, kRank, true}};
  SentAdapter sent = make(rows);
  copy_a(sent, 0, 1);
  for (std::size_t i = 0; i < elements_of(rows[0], wide_layout()); ++i) sent.set(2, i, sent.get(0, i));
  const auto adapter = cache->admit(sent.send(1));
  // A of all three; B of both q's; B of dense; magnitudes are too small.
  const std::size_t kept = kBytesOfA + kBytesOfB + 2 * kBytesOfB + 2 * 512 * 4;
  BOOST_TEST(adapter->bytes() == kept);
  BOOST_TEST(cache->stats().host_bytes_used == kept);
  BOOST_TEST(cache->stats().saved_bytes == 2 * kBytesOfA + kBytesOfB);
  BOOST_TEST(adapter->matrices().size() == 3U);
  expect_values(cache->acquire(adapter)->adapter(), sent, rows);
}

BOOST_AUTO_TEST_CASE(modules_of_one_input_with_the_same_a_shrink_once) {
  const std::vector<SentRow> rows{{kAttnV, 0, kRank}, {kAttnK, 0, kRank}, {kAttnQ, 0, kRank},
                                  {kAttnQ, 1, kRank}, {kAttnK, 1, 4},     {kAttnV, 1, kRank}};
  SentAdapter sent = make(rows);
  copy_a(sent, 2, 0);
  copy_a(sent, 2, 1);
  CheckedCache cache(1 << 20);
  const auto adapter = cache->admit(sent.send(1));
  const auto lease = cache->acquire(adapter);
  const DeviceSite& site = lease->adapter().sites[0];
  BOOST_TEST(site.total_rank == kRank);
  for (std::size_t i = 0; i < 3; ++i) {
    BOOST_TEST((site.parts[i].rank == kRank && site.parts[i].rank_offset == 0));
  }
  const DeviceSite& other = lease->adapter().sites[2];
  BOOST_TEST(other.total_rank == 2 * kRank + 4);
  BOOST_TEST((other.parts[1].rank_offset == kRank && other.parts[2].rank_offset == kRank + 4));
  expect_values(lease->adapter(), sent, rows);
  BOOST_TEST(cache->stats().saved_products == 2);
  BOOST_TEST(cache->stats().saved_bytes == 2 * kBytesOfA);
}

/// Ranks and stages pack what they receive. They must pack as one process does, or products add in another
/// order.
BOOST_AUTO_TEST_CASE(an_adapter_as_sent_shares_the_same_rows_of_a_as_a_packed_one) {
  const LoraLayout layout = wide_layout();
  const SiteIndex index(layout);
  SentAdapter sent = make({{kAttnQ, 0, kRank}, {kAttnK, 0, kRank}, {kAttnV, 0, kRank}});
  copy_a(sent, 0, 2);
  const auto packed = HostAdapter::make_packed(sent.send(1), layout, index, kPageBytes);
  const auto as_sent = HostAdapter::make(sent.send(1), layout, index);
  for (const auto& adapter : {packed, as_sent}) {
    BOOST_TEST(!adapter->rows()[0].shares_a);
    BOOST_TEST(!adapter->rows()[1].shares_a);
    BOOST_TEST(adapter->rows()[2].shares_a);
    BOOST_TEST(adapter->saved_products() == 1);
  }
  BOOST_TEST(plan_device_images(as_sent->rows(), layout, index, kPageBytes).bytes() == packed->bytes());
}

BOOST_AUTO_TEST_CASE(a_second_module_with_another_a_follows_those_that_share) {
  // The order of modules in a site is q, k, v, however they are sent.
  const std::vector<SentRow> rows{{kAttnV, 0, kRank}, {kAttnK, 0, kRank}, {kAttnQ, 0, kRank}};
  SentAdapter sent = make(rows);
  copy_a(sent, 0, 2);
  CheckedCache cache(1 << 20);
  const auto adapter = cache->admit(sent.send(1));
  const auto lease = cache->acquire(adapter);
  const DeviceSite& site = lease->adapter().sites[0];
  BOOST_TEST(site.total_rank == 2 * kRank);
  BOOST_TEST((site.parts[1].rank_offset == kRank && site.parts[2].rank_offset == 0));
  expect_values(lease->adapter(), sent, rows);
  // An A that differs only in its last element is another one.
  sent.set(2, static_cast<std::size_t>(kRank * kInputs) - 1, 7.0F);
  const auto changed = cache->admit(sent.send(2));
  BOOST_TEST(cache->acquire(changed)->adapter().sites[0].total_rank == 3 * kRank);
  BOOST_TEST(!adapter->same_weights(*changed));
}

BOOST_AUTO_TEST_CASE(another_a_follows_a_shared_one_at_once) {
  const std::vector<SentRow> rows{{kAttnQ, 0, kRank}, {kAttnK, 0, kRank}, {kAttnV, 0, kRank}};
  SentAdapter sent = make(rows);
  copy_a(sent, 0, 1);
  const LoraLayout layout = wide_layout();
  const auto adapter = HostAdapter::make_packed(sent.send(1), layout, SiteIndex(layout), kPageBytes);
  const DeviceAdapter device = device_adapter_in_place(*adapter, layout);
  BOOST_TEST((device.sites[0].parts[1].rank_offset == 0 && device.sites[0].parts[2].rank_offset == kRank));
  expect_values(device, sent, rows);
  BOOST_TEST(adapter->plan().bytes() == adapter->unshared_bytes() - kBytesOfA);
}

BOOST_AUTO_TEST_CASE(an_a_with_more_rows_is_another_one) {
  for (const bool is_first_larger : {false, true}) {
    const std::vector<SentRow> rows{{kAttnQ, 0, is_first_larger ? kRank : 4},
                                    {kAttnK, 0, is_first_larger ? 4 : kRank}};
    SentAdapter sent = make(rows);
    for (std::size_t i = 0; i < static_cast<std::size_t>(4 * kInputs); ++i) sent.set(1, i, sent.get(0, i));
    CheckedCache cache(1 << 20);
    const auto adapter = cache->admit(sent.send(1));
    BOOST_TEST(cache->stats().saved_products == 0);
    expect_values(cache->acquire(adapter)->adapter(), sent, rows);
  }
}

BOOST_AUTO_TEST_CASE(rows_stay_apart_for_devices) {
  const LoraLayout layout = wide_layout(MatrixLayout::kRows);
  SentAdapter sent = make({{kAttnQ, 0, kRank}, {kAttnV, 0, kRank}});
  copy_a(sent, 0, 1);
  const auto adapter = HostAdapter::make_packed(sent.send(1), layout, SiteIndex(layout), kPageBytes);
  BOOST_TEST(device_adapter_in_place(*adapter, layout).sites[0].total_rank == 2 * kRank);
  BOOST_TEST(adapter->saved_products() == 0);
}

BOOST_AUTO_TEST_CASE(values_of_an_a_that_is_kept_elsewhere_are_checked) {
  SentAdapter sent = make({{kAttnQ, 0, kRank}, {kAttnK, 0, kRank}});
  set_a(sent, 0, std::numeric_limits<float>::infinity());
  copy_a(sent, 0, 1);
  CheckedCache cache(1 << 20);
  BOOST_CHECK_EXCEPTION((void)cache->admit(sent.send(1)), AdapterError, [](const AdapterError& error) {
    return contains(error.what(), "row 0 (attn_q, layer 0): element 0, A[0, 0], is inf") &&
           contains(error.what(), "row 1 (attn_k, layer 0): element 0, A[0, 0], is inf");
  });
  BOOST_TEST(cache->stats().host_bytes_used == 0U);
}

BOOST_DATA_TEST_CASE(rows_whose_b_is_zero_are_dropped, boost::unit_test::data::make({false, true}),
                     is_packed) {
  const LoraLayout layout = wide_layout();
  const SiteIndex index(layout);
  const std::vector<SentRow> rows{
      {kAttnQ, 0, kRank}, {kAttnK, 0, kRank}, {kAttnDense, 0, kRank, true}, {kAttnDense, 1, kRank}};
  SentAdapter sent = make(rows);
  zero_b(sent, 1, 64);
  zero_b(sent, 2, 1024);  // has a magnitude
  const auto make_one = [&] {
    return is_packed ? HostAdapter::make_packed(sent.send(1), layout, index, kPageBytes)
                     : HostAdapter::make(sent.send(1), layout, index);
  };
  const auto adapter = make_one();
  BOOST_TEST(adapter->rows().size() == 3U);
  BOOST_TEST(adapter->saved_products() == 2);
  BOOST_TEST(adapter->unshared_bytes() - adapter->bytes() == kBytesOfA + kBytesOfKeys);
  if (is_packed) {
    const DeviceAdapter device = device_adapter_in_place(*adapter, layout);
    BOOST_TEST(device.sites[0].parts[1].rank == 0);
    BOOST_TEST(device.sites[0].total_rank == kRank);
    expect_values(device, sent, rows, 1);
  }
  // One element that is not zero, even the first or the last one, keeps the row.
  for (const auto element : {kRank * kInputs, kRank * (kInputs + 64) - 1}) {
    sent.set(1, static_cast<std::size_t>(element), 1.0F);
    BOOST_TEST(make_one()->rows().size() == 4U);
    sent.set(1, static_cast<std::size_t>(element), 0.0F);
  }
}

BOOST_DATA_TEST_CASE(rows_that_are_dropped_are_checked, boost::unit_test::data::make({false, true}),
                     is_packed) {
  const LoraLayout layout = wide_layout();
  SentAdapter sent = make({{kAttnQ, 0, kRank}, {kAttnK, 0, kRank}});
  zero_b(sent, 1, 64);
  set_a(sent, 1, std::numeric_limits<float>::quiet_NaN());
  sent.set(1, sent.width - 1, 3.0F);
  const auto admit = [&] {
    if (is_packed) {
      (void)HostAdapter::make_packed(sent.send(1), layout, SiteIndex(layout), kPageBytes);
    } else {
      (void)HostAdapter::make(sent.send(1), layout, SiteIndex(layout));
    }
  };
  BOOST_CHECK_EXCEPTION(admit(), AdapterError, [](const AdapterError& error) {
    return contains(error.what(), "row 1 (attn_k, layer 0): element 0, A[0, 0], is nan") &&
           contains(error.what(), "the padding after them must be zero");
  });
}

BOOST_AUTO_TEST_CASE(rows_of_the_vocabulary_stay) {
  LoraLayout layout = wide_layout();
  layout.sites.push_back({0, kInputs, {{kLmHead, 100}}});
  layout.target_modules.push_back(kLmHead);
  const std::vector<SentRow> rows{{kLmHead, 0, kRank}};
  SentAdapter sent = make_adapter(rows, layout);
  zero_b(sent, 0, 100);
  BOOST_TEST(HostAdapter::make_packed(sent.send(1), layout, SiteIndex(layout), kPageBytes)->rows().size() ==
             1U);
}

BOOST_AUTO_TEST_CASE(an_adapter_of_zeros_changes_nothing) {
  CheckedCache cache(1 << 20);
  SentAdapter sent = make({{kAttnQ, 0, kRank}});
  zero_b(sent, 0, 512);
  const auto adapter = cache->admit(sent.send(1));
  BOOST_TEST(adapter->bytes() == 0U);
  BOOST_TEST(adapter->content_digest() == cache->admit(sent.send(2))->content_digest());
  BOOST_TEST(cache->stats().saved_bytes == 2 * (kBytesOfA + kBytesOfB));
  BOOST_TEST(cache->stats().saved_products == 4);
  const auto lease = cache->acquire(adapter);
  BOOST_TEST_REQUIRE(lease.has_value());
  BOOST_TEST(unpack_adapter(lease->adapter(), wide_layout()).empty());
  cache->unload(2);
  BOOST_TEST(cache->stats().saved_products == 2);
}

BOOST_AUTO_TEST_CASE(only_what_becomes_free_counts_for_evictions) {
  // Two forks share everything but one B; a third adapter needs more than one of them gives back.
  CheckedCache cache(kBytesOfTwoRows + 2 * kBytesOfB);
  const SentAdapter base = make(kTwoRows);
  SentAdapter fork = base;
  set_b(fork, 0, 5.0F);
  (void)cache->admit(base.send(1));
  (void)cache->admit(fork.send(2));
  SentAdapter another = base;
  set_b(another, 0, 6.0F);
  (void)cache->admit(another.send(3));
  BOOST_TEST(cache.ids() == (Ids{1, 2, 3}));
  BOOST_TEST(cache->stats().host_bytes_used == kBytesOfTwoRows + 2 * kBytesOfB);
  set_b(another, 0, 7.0F);
  (void)cache->admit(another.send(4));  // shares with those that stay
  BOOST_TEST(cache.ids() == (Ids{2, 3, 4}));
  const SentAdapter stranger = make({{kAttnQ, 0, kRank}}, 9);
  (void)cache->admit(stranger.send(5));  // one fork leaves B only, two leave enough
  BOOST_TEST(cache.ids() == (Ids{4, 5}));
  BOOST_TEST(cache->stats().host_evictions == 3);
  BOOST_TEST(cache->stats().host_bytes_used == kBytesOfTwoRows + kBytesOfA + kBytesOfB);
}

BOOST_AUTO_TEST_CASE(a_victim_leaves_its_matrices_to_the_adapter_that_replaces_it) {
  CheckedCache cache(kBytesOfTwoRows);
  const SentAdapter base = make(kTwoRows);
  (void)cache->admit(base.send(1));
  SentAdapter fork = base;
  set_b(fork, 0, 5.0F);
  auto held = cache->admit(fork.send(2));
  BOOST_TEST(cache.ids() == (Ids{2}));
  BOOST_TEST(cache->stats().host_bytes_used == kBytesOfTwoRows);
  expect_values(cache->acquire(held)->adapter(), fork, kTwoRows);
  held.reset();
  set_b(fork, 0, 6.0F);
  held = cache->admit(fork.send(2, true));
  BOOST_TEST(cache->stats().host_bytes_used == kBytesOfTwoRows);
  expect_values(cache->acquire(held)->adapter(), fork, kTwoRows);
  // The held adapter keeps all its bytes, so a fork has no room.
  set_b(fork, 0, 7.0F);
  BOOST_CHECK_EXCEPTION(
      (void)cache->admit(fork.send(3)), LoraCacheFullError, [](const LoraCacheFullError& error) {
        return contains(error.what(), "needs 16384 bytes, but requests and pinned adapters keep 81920 of");
      });
  BOOST_CHECK_THROW((void)cache->admit(fork.send(2, true)), LoraCacheFullError);
  BOOST_TEST(cache->stats().host_bytes_used == kBytesOfTwoRows);
}

BOOST_AUTO_TEST_CASE(refused_adapters_leave_no_matrices) {
  const LoraLayout layout = wide_layout();
  const auto known = std::make_shared<SharedMatrices>();
  const auto pack = [&](const SentAdapter& sent) {
    return HostAdapter::make_packed(sent.send(1), layout, SiteIndex(layout), kPageBytes, known.get());
  };
  SentAdapter sent = make(kTwoRows);
  auto first = pack(sent);
  BOOST_TEST(known->count() == 4U);
  set_b(sent, 1, std::numeric_limits<float>::infinity());
  BOOST_CHECK_THROW((void)pack(sent), AdapterError);
  BOOST_TEST(known->count() == 4U);
  set_b(sent, 1, 9.0F);
  auto second = pack(sent);
  BOOST_TEST(known->count() == 5U);
  first.reset();
  BOOST_TEST(known->count() == 4U);
  second.reset();
  BOOST_TEST(known->count() == 0U);
}

BOOST_AUTO_TEST_CASE(digests_do_not_depend_on_what_is_shared) {
  const LoraLayout layout = wide_layout();
  const SiteIndex index(layout);
  const SentAdapter sent = make(kTwoRows);
  SentAdapter fork = sent;
  set_b(fork, 0, 5.0F);
  const auto known = std::make_shared<SharedMatrices>();
  const auto first = HostAdapter::make_packed(sent.send(1), layout, index, kPageBytes, known.get());
  const auto shared = HostAdapter::make_packed(fork.send(1), layout, index, kPageBytes, known.get());
  const auto alone = HostAdapter::make_packed(fork.send(1), layout, index, kPageBytes);
  BOOST_TEST((shared->content_digest() == alone->content_digest()));
  BOOST_TEST((shared->content_digest() != first->content_digest()));
  BOOST_TEST(shared->same_weights(*alone));
  BOOST_TEST(alone->same_weights(*shared));
  BOOST_TEST(!first->same_weights(*shared));
}

BOOST_AUTO_TEST_CASE(small_matrices_are_not_shared) {
  CheckedCache cache(1 << 20);
  const std::vector<SentRow> rows{{kAttnQ, 0, 1}};  // A has 2 KiB
  const SentAdapter sent = make(rows);
  (void)cache->admit(sent.send(1));
  (void)cache->admit(sent.send(2));
  BOOST_TEST(cache->stats().saved_bytes == 0U);
  const SentAdapter large_enough = make({{kAttnQ, 0, 2}});  // A and B have 4 KiB
  (void)cache->admit(large_enough.send(3));
  (void)cache->admit(large_enough.send(4));
  BOOST_TEST(cache->stats().saved_bytes == 2 * kMinSharedBytes);
}

/// A step of checksum_of().
std::uint64_t absorb(std::uint64_t lane, std::uint64_t word) {
  const std::uint64_t mixed = (lane ^ word) * 0x9e3779b97f4a7c15ULL;
  return std::rotl((mixed ^ mixed >> 32) * 0xd6e8feb86659fd93ULL, 29);
}

BOOST_AUTO_TEST_CASE(contents_with_one_checksum_are_told_apart) {
  const auto known = std::make_shared<SharedMatrices>();
  const auto memory = std::make_shared<PackedMemory>(HugeArray(4 * kMinSharedBytes));
  const auto place = [&](std::size_t i) {
    return std::span(memory->array.data() + i * kMinSharedBytes, kMinSharedBytes);
  };
  // The second word of the first lane undoes the change of the first one.
  const std::array<std::uint64_t, 2> words{1, absorb(1, 1) ^ absorb(1, 0)};
  for (const std::size_t i : {1, 3}) {
    std::memcpy(place(i).data(), words.data(), 8);
    std::memcpy(place(i).data() + 64, words.data() + 1, 8);
  }
  BOOST_TEST_REQUIRE(checksum_of(place(0)) == checksum_of(place(1)));
  auto zeros = known->find_or_add(memory, place(0));
  const auto others = known->find_or_add(memory, place(1));
  BOOST_TEST(zeros != others);
  BOOST_TEST(known->find_or_add(memory, place(2)) == zeros);
  BOOST_TEST(known->find_or_add(memory, place(3)) == others);
  zeros.reset();
  BOOST_TEST(known->count() == 1U);
  BOOST_TEST(known->find_or_add(memory, place(3)) == others);
}

/// One of 81 adapters that share parts: each A and B of two rows is one of three.
SentAdapter variant(std::uint32_t number) {
  static const SentAdapter base = make(kTwoRows);
  SentAdapter sent = base;
  set_a(sent, 0, static_cast<float>(number % 3));
  set_b(sent, 0, static_cast<float>(number / 3 % 3));
  set_a(sent, 1, static_cast<float>(number / 9 % 3));
  set_b(sent, 1, static_cast<float>(number / 27 % 3));
  return sent;
}

BOOST_AUTO_TEST_CASE(threads_get_what_was_sent_while_others_share_and_evict_it) {
  LoraCache cache = make_host_cache(wide_layout(), {2 * kBytesOfTwoRows, kPageBytes, 6});
  std::atomic<int> wrong{0};
  std::atomic<int> leases{0};
  const auto work = [&](std::uint32_t thread) {
    std::mt19937 random(thread);
    std::vector<std::shared_ptr<const HostAdapter>> held(2);
    for (int round = 0; round < 60; ++round) {
      const auto number = static_cast<std::uint32_t>(random() % 81);
      const SentAdapter sent = variant(number);
      try {
        auto& adapter = held[random() % 2];
        adapter.reset();
        adapter = cache.admit(sent.send(number));
        if (const auto lease = cache.acquire(adapter)) {
          ++leases;
          const auto modules = unpack_adapter(lease->adapter(), wide_layout());
          for (std::size_t row = 0; row < 2; ++row) {
            for (std::size_t i = 0; i < modules[row].a.size(); i += 64) {
              if (modules[row].a[i] != sent.get(row, i)) ++wrong;
            }
            for (std::size_t i = 0; i < modules[row].b.size(); i += 64) {
              if (modules[row].b[i] != sent.get(row, modules[row].a.size() + i)) ++wrong;
            }
          }
        }
        if (random() % 4 == 0) cache.unload(number);
      } catch (const LoraCacheFullError&) {
      } catch (const PeftTaskNotCachedError&) {
      }
      if (!cache.check_invariants().empty()) ++wrong;
    }
  };
  std::vector<std::thread> threads;
  for (std::uint32_t i = 0; i < 4; ++i) threads.emplace_back(work, i);
  for (std::thread& thread : threads) thread.join();
  BOOST_TEST(wrong == 0);
  BOOST_TEST(leases > 50);
  BOOST_TEST(cache.stats().host_evictions > 0);
  for (const LoraCacheEntry& entry : cache.list()) cache.unload(entry.task_id);
  BOOST_TEST(cache.stats().host_bytes_used == 0U);
  BOOST_TEST(cache.stats().saved_bytes == 0U);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::shared_matrices_test
