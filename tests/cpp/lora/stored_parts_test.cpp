// Compressed and int8 adapters of engines with several ranks, of which each packs its part.

#include <algorithm>
#include <array>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "adapters.h"
#include "adaptrt/lora/pack_adapter.h"

namespace adaptrt::stored_parts_test {
namespace {

using namespace testing;
using enum LoraModule;
namespace data = boost::unit_test::data;

constexpr std::int64_t kSize = 256;
constexpr std::int64_t kInner = 190;  // half of it is odd, and its panels are padded
constexpr std::int32_t kExperts = 4;
constexpr std::int32_t kRank = 8;
constexpr std::int32_t kMaxRank = 20;
constexpr std::size_t kPageBytes = 1 << 17;
constexpr std::array kTypes{DType::kFloat32, DType::kFloat16, DType::kBFloat16};

/// Host pages of an engine whose other ranks get the adapters as well.
class SharedPages final : public AdapterPages {
 public:
  explicit SharedPages(std::int64_t num_pages) : pages_(kPageBytes, num_pages) {}

  [[nodiscard]] std::size_t page_bytes() const override { return pages_.page_bytes(); }
  [[nodiscard]] std::int64_t num_pages() const override { return pages_.num_pages(); }
  [[nodiscard]] std::byte* address(std::int64_t page) const override { return pages_.address(page); }
  [[nodiscard]] bool shares_adapters() const override { return true; }
  void load(std::span<const std::int64_t> pages, const Write& write) override { pages_.load(pages, write); }

 private:
  HostPages pages_;
};

enum class Cut { kWhole, kRanks, kFullySharded, kStages };
constexpr std::array kCuts{Cut::kRanks, Cut::kFullySharded, Cut::kStages};

std::int32_t ranks_of(Cut cut) {
  return cut == Cut::kWhole ? 1 : 2;
}

/// Three layers. Ranks cut q, k and v by outputs and the dense layer by inputs, and have two of four experts.
LoraLayout layout_of(Cut cut, std::int32_t rank, DType dtype) {
  LoraLayout layout;
  layout.dtype = dtype;
  layout.num_layers = 3;
  layout.max_rank = kMaxRank;
  layout.dora_enabled = true;
  layout.target_modules = {kAttnQ, kAttnK, kAttnQkv, kAttnDense, kMoeGate};
  const std::int32_t ranks = cut == Cut::kStages ? 1 : ranks_of(cut);
  const std::int32_t share = cut == Cut::kStages ? 0 : rank;
  if (cut == Cut::kStages) {
    layout.num_stages = 2;
    layout.stage = rank;
  }
  const auto part = [&](LoraModule module, std::int64_t outputs) {
    const std::int64_t here = outputs / ranks;
    return LoraPart{module, here, share * here, outputs - here};
  };
  for (std::int32_t layer = 0; layer < layout.num_layers; ++layer) {
    LoraSite qkv{layer, kSize, {part(kAttnQ, kSize), part(kAttnK, kInner), part(kAttnV, kInner)}};
    LoraSite dense{layer, kInner / ranks, {{kAttnDense, kSize}}};
    dense.first_input = share * dense.in_size;
    dense.num_remote_inputs = kInner - dense.in_size;
    dense.adds_shifts = share == 0;
    for (LoraSite* site : {&qkv, &dense}) {
      if (cut == Cut::kFullySharded) {
        site->num_shares = ranks;
        site->share = share;
      }
      layout.sites.push_back(*site);
    }
    for (std::int32_t expert = 0; expert < kExperts / ranks; ++expert) {
      LoraSite gate{layer, kSize, {{kMoeGate, kInner}}};
      gate.expert = share * (kExperts / ranks) + expert;
      gate.experts_for_each = ranks;
      layout.sites.push_back(gate);
    }
  }
  return layout;
}

LoraCache make_cache(const LoraLayout& layout, LoraStorage storage) {
  return {layout, std::make_unique<SharedPages>(16), {.host_bytes = 1 << 24, .storage = storage}};
}

/// Layer 0 has q and k with one A, layer 1 the fused module, layer 2 experts.
SentAdapter make_sent() {
  const LoraLayout whole = layout_of(Cut::kWhole, 0, DType::kFloat32);
  SentAdapter sent = make_adapter({{kAttnQ, 0, kRank, true},
                                   {kAttnK, 0, kRank},
                                   {kAttnDense, 0, 5, true, true},
                                   {kAttnQkv, 1, 7},
                                   {kMoeGate, 2, kRank},
                                   {kAttnDense, 2, kRank}},
                                  whole, 7, DType::kBFloat16);
  for (std::size_t i = 0; i < kRank * kSize; ++i) sent.set(1, i, sent.get(0, i));
  return sent;
}

/// Key of a module: layer, module, expert.
using Key = std::tuple<std::int32_t, LoraModule, std::int32_t>;

struct Matrices {
  std::vector<float> a, b, magnitude, shift;
  bool operator==(const Matrices&) const = default;
};

/// Puts what ranks have of an adapter together; what several ranks have must be equal.
class Whole {
 public:
  void add(const DeviceAdapter& adapter, const LoraLayout& layout) {
    const SiteIndex index(layout);
    for (const UnpackedModule& module : unpack_adapter(adapter, layout)) {
      const ModulePlace& place = *index.find(module.layer, module.module);
      const LoraSite& site =
          layout.sites[static_cast<std::size_t>(place.first_site + module.expert - place.first_expert)];
      const LoraPart& part = *std::ranges::find(site.parts, module.module, &LoraPart::module);
      Matrices& whole = matrices[{module.layer, module.module, module.expert}];
      const std::int64_t out = part.whole_out_size();
      put(module.a, module.rank, site.in_size, site.whole_in_size(), site.first_input, whole.a);
      put(module.b, 1, part.out_size * module.rank, out * module.rank, part.first_output * module.rank,
          whole.b);
      put(module.magnitude, 1, part.out_size, out, part.first_output, whole.magnitude);
      put(module.shift, 1, part.out_size, out, part.first_output, whole.shift);
    }
  }

  std::map<Key, Matrices> matrices;

 private:
  /// Rows on other ranks are zeros.
  static void put(const std::vector<float>& values, std::int64_t rows, std::int64_t width,
                  std::int64_t of_whole, std::int64_t first, std::vector<float>& whole) {
    if (values.empty()) return;
    whole.resize(static_cast<std::size_t>(rows * of_whole));
    for (std::int64_t i = 0; i < rows * width; ++i) {
      const float value = values[static_cast<std::size_t>(i)];
      float& at = whole[static_cast<std::size_t>(i / width * of_whole + first + i % width)];
      if (value == 0.0F) continue;
      if (at != 0.0F && at != value) BOOST_ERROR("ranks have different values");
      at = value;
    }
  }
};

/// An adapter as the ranks store it, the pages that it takes on each, and the bytes that its images take on
/// all.
struct Stored {
  std::map<Key, Matrices> matrices;
  std::int64_t pages = 0;
  std::size_t bytes = 0;
  std::vector<DeviceAdapter> adapters;
};

Stored store(const SentAdapter& sent, Cut cut, LoraStorage storage, DType dtype) {
  Whole whole;
  Stored stored;
  for (std::int32_t rank = 0; rank < ranks_of(cut); ++rank) {
    const LoraLayout layout = layout_of(cut, rank, dtype);
    LoraCache cache = make_cache(layout, storage);
    const auto held = cache.admit(sent.send(1));
    const DeviceLease lease = *cache.acquire(held);
    whole.add(lease.adapter(), layout);
    if (rank == 0) stored.pages = cache.pages_needed(*held);
    BOOST_TEST(cache.pages_needed(*held) == stored.pages);
    stored.bytes += plan_device_images(held->rows(), layout, SiteIndex(layout), kPageBytes,
                                       held->stored_parts().image_bytes)
                        .bytes();
    stored.adapters.push_back(lease.adapter());
    for (const std::string& broken : cache.check_invariants()) BOOST_ERROR(broken);
  }
  stored.matrices = std::move(whole.matrices);
  return stored;
}

std::size_t count_stored(const Stored& stored, LoraStorage storage) {
  std::size_t count = 0;
  for (const DeviceAdapter& adapter : stored.adapters) {
    for (const DeviceSite& site : adapter.sites) {
      if (site.total_rank > 0 && site.a_storage == storage) ++count;
      for (const DevicePart& part : site.parts) {
        if (part.rank > 0 && part.b_storage == storage) ++count;
      }
    }
  }
  return count;
}

BOOST_AUTO_TEST_SUITE(stored_parts)

BOOST_DATA_TEST_CASE(compressed_parts_have_the_values_that_were_sent, data::xrange(3), number) {
  const Cut cut = kCuts[static_cast<std::size_t>(number)];
  const SentAdapter sent = make_sent();
  const Stored exact = store(sent, cut, LoraStorage::kExact, DType::kBFloat16);
  const Stored compressed = store(sent, cut, LoraStorage::kCompressed, DType::kBFloat16);
  BOOST_TEST((compressed.matrices == exact.matrices));
  BOOST_TEST((exact.matrices == store(sent, Cut::kWhole, LoraStorage::kExact, DType::kBFloat16).matrices));
  BOOST_TEST(count_stored(compressed, LoraStorage::kExact) == 0U);
  BOOST_TEST(10 * compressed.bytes <= 8 * exact.bytes);
  BOOST_TEST(compressed.pages <= exact.pages);
}

/// Values that fit no table are in one rank's part of each matrix; all ranks leave room for them.
BOOST_DATA_TEST_CASE(ranks_leave_room_for_the_outliers_of_others, data::xrange(3), number) {
  const Cut cut = kCuts[static_cast<std::size_t>(number)];
  SentAdapter sent = make_sent();
  const Stored few = store(sent, cut, LoraStorage::kCompressed, DType::kBFloat16);
  struct Range {
    std::size_t row, first, count;
  };
  constexpr std::size_t kOfV = 7 * (kSize + kSize + kInner);
  constexpr std::size_t kOfThirdExpert = 2 * kRank * kSize;
  for (const Range& range : {Range{2, 0, 280}, {3, kOfV, 150}, {4, kOfThirdExpert, 440}, {5, 0, 440}}) {
    for (std::size_t i = 0; i < range.count; ++i) {
      sent.set(range.row, range.first + i, std::ldexp(1.0F, static_cast<int>(i % 60) - 30));
    }
  }
  const Stored exact = store(sent, cut, LoraStorage::kExact, DType::kBFloat16);
  const Stored compressed = store(sent, cut, LoraStorage::kCompressed, DType::kBFloat16);
  BOOST_TEST((compressed.matrices == exact.matrices));
  BOOST_TEST(compressed.bytes > few.bytes);
  BOOST_TEST(compressed.bytes < exact.bytes);
  BOOST_TEST(count_stored(compressed, LoraStorage::kExact) > 0U);
}

/// Sixteen upper bytes are more frequent than the zeros that pad odd ranks, and odd widths of parts.
BOOST_AUTO_TEST_CASE(zeros_that_pad_parts_may_be_outliers) {
  constexpr std::int32_t kOdd = 19;
  SentAdapter sent = make_adapter({{kAttnQ, 0, kOdd, true}, {kAttnDense, 0, kOdd, true}, {kAttnQ, 1, kOdd}},
                                  layout_of(Cut::kWhole, 0, DType::kBFloat16), 7, DType::kBFloat16);
  for (std::size_t row = 0; row < sent.rows; ++row) {
    const auto elements = static_cast<std::size_t>(kOdd * (kSize + (row == 1 ? kInner : kSize)));
    for (std::size_t i = 0; i < elements; ++i) {
      const float size = std::ldexp(1.0F, 2 * static_cast<int>(i % 8) - 8);
      sent.set(row, i, i / 8 % 2 == 0 ? size : -size);
    }
  }
  const Stored exact = store(sent, Cut::kRanks, LoraStorage::kExact, DType::kBFloat16);
  const Stored compressed = store(sent, Cut::kRanks, LoraStorage::kCompressed, DType::kBFloat16);
  BOOST_TEST(count_stored(compressed, LoraStorage::kExact) == 0U);
  BOOST_TEST((compressed.matrices == exact.matrices));
}

BOOST_DATA_TEST_CASE(int8_parts_have_one_process_integers_and_scales, data::xrange(3) * data::xrange(3),
                     number, type) {
  const Cut cut = kCuts[static_cast<std::size_t>(number)];
  const DType dtype = kTypes[static_cast<std::size_t>(type)];
  SentAdapter sent = make_sent();
  // The largest value of each row of A and column of B is in the first rank's part, or an expert's own.
  for (std::size_t row = 0; row < sent.rows; ++row) {
    for (std::size_t i = 0; i < 5; ++i) sent.set(row, i * 40, 3.0F + static_cast<float>(i));
  }
  for (std::size_t i = 0; i < 7; ++i) {
    sent.set(0, kRank * kSize + i, 5.0F);
    sent.set(1, kRank * kSize + i, 9.0F);
    sent.set(3, 7 * kSize + i, 4.0F);
  }
  for (std::size_t i = 0; i < kSize; ++i) sent.set(1, i, sent.get(0, i));
  const LoraLayout layout = layout_of(Cut::kWhole, 0, dtype);
  LoraCache cache(layout, std::make_unique<HostPages>(kPageBytes, 16),
                  {.host_bytes = 1 << 24, .storage = LoraStorage::kInt8});
  const DeviceLease lease = *cache.acquire(cache.admit(sent.send(1)));
  Whole whole;
  whole.add(lease.adapter(), layout);
  const Stored stored = store(sent, cut, LoraStorage::kInt8, dtype);
  BOOST_TEST((stored.matrices == whole.matrices));
  BOOST_TEST(count_stored(stored, LoraStorage::kInt8) > 0U);
  BOOST_TEST(count_stored(stored, LoraStorage::kExact) == 0U);
  BOOST_TEST(10 * stored.bytes <= 6 * store(sent, cut, LoraStorage::kExact, dtype).bytes);
}

/// Matrices of rank 1 would not shrink, and the products of one expert's scales are not finite.
BOOST_AUTO_TEST_CASE(ranks_agree_on_layers_that_stay_exact) {
  const LoraLayout layout = layout_of(Cut::kWhole, 0, DType::kFloat32);
  SentAdapter sent = make_adapter({{kAttnQ, 0, 1}, {kMoeGate, 1, kRank}, {kAttnDense, 2, kRank}}, layout);
  const std::size_t last = kExperts - 1;
  sent.set(1, last * kRank * kSize, 0x1p100F);
  sent.set(1, kExperts * kRank * kSize + last * kRank * kInner, 0x1p100F);
  const Stored stored = store(sent, Cut::kRanks, LoraStorage::kInt8, DType::kFloat32);
  const Stored exact = store(sent, Cut::kRanks, LoraStorage::kExact, DType::kFloat32);
  const Key of_last{1, kMoeGate, last};
  BOOST_TEST((stored.matrices.at(of_last) == exact.matrices.at(of_last)));
  BOOST_TEST((stored.matrices.at({1, kMoeGate, 0}) != exact.matrices.at({1, kMoeGate, 0})));
  BOOST_TEST((stored.matrices.at({2, kAttnDense, 0}) != exact.matrices.at({2, kAttnDense, 0})));
  SentAdapter thin = make_adapter({{kAttnQ, 0, 1}}, layout);
  BOOST_TEST((store(thin, Cut::kRanks, LoraStorage::kInt8, DType::kBFloat16).matrices ==
              store(thin, Cut::kRanks, LoraStorage::kExact, DType::kBFloat16).matrices));
}

BOOST_AUTO_TEST_CASE(the_digest_tells_the_storage) {
  const SentAdapter sent = make_sent();
  const LoraLayout layout = layout_of(Cut::kRanks, 0, DType::kBFloat16);
  const SiteIndex index(layout);
  const auto digest = [&](LoraStorage storage) {
    return HostAdapter::make(sent.send(1), layout, index, storage)->content_digest();
  };
  BOOST_TEST((digest(LoraStorage::kInt8) != digest(LoraStorage::kExact)));
  BOOST_TEST((digest(LoraStorage::kInt8) == digest(LoraStorage::kInt8)));
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::stored_parts_test
