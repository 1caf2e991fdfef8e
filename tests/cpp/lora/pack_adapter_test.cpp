#include "adaptrt/lora/pack_adapter.h"

#include <algorithm>
#include <array>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstring>

#include "adapters.h"
#include "adaptrt/core/error.h"
#include "adaptrt/core/huge_array.h"
#include "adaptrt/core/panels.h"

namespace adaptrt {

/// Prints it in Boost.Test messages.
static std::ostream& operator<<(std::ostream& out, MatrixLayout layout) {
  return out << (layout == MatrixLayout::kPanels ? "panels" : "rows");
}

}  // namespace adaptrt

namespace adaptrt::pack_adapter_test {
namespace {

using namespace testing;
using enum LoraModule;

constexpr std::array kDTypes{DType::kFloat32, DType::kFloat16, DType::kBFloat16};

/// An adapter packed into its own pages, through host memory that is freed afterwards.
struct Packed {
  Packed(const HostAdapter& adapter, const LoraLayout& layout, std::size_t page_bytes)
      : plan(plan_device_images(adapter.rows(), layout, SiteIndex(layout), page_bytes)),
        memory(page_bytes * static_cast<std::size_t>(plan.pages)) {
    const HugeArray staging(memory.bytes());
    std::ranges::fill(staging.data(), staging.data() + staging.bytes(), std::byte{0xff});
    std::vector<std::byte*> addresses;
    for (std::size_t i = 0; i < static_cast<std::size_t>(plan.pages); ++i) {
      addresses.push_back(memory.data() + i * page_bytes);
    }
    AdapterPacker packer(adapter, layout, plan, addresses);
    for (std::size_t i = 0; i < addresses.size(); ++i) {
      const std::size_t used = i < plan.used_bytes.size() ? plan.used_bytes[i] : 0;
      BOOST_TEST(packer.write_page(i, staging.data() + i * page_bytes) == used);
    }
    device = packer.take();
    std::memcpy(memory.data(), staging.data(), memory.bytes());
  }
  DevicePlan plan;
  HugeArray memory;
  DeviceAdapter device;
};

/// Returns elements [first, first + count) of a sent row, rounded to `dtype`.
std::vector<float> sent_values(const SentAdapter& sent, std::size_t row, std::int64_t first,
                               std::int64_t count, DType dtype) {
  std::vector<float> values;
  for (std::int64_t i = first; i < first + count; ++i) {
    std::array<std::byte, 4> element;
    store_from_float(element.data(), dtype, 0, sent.get(row, static_cast<std::size_t>(i)));
    values.push_back(load_as_float(element.data(), dtype, 0));
  }
  return values;
}

const UnpackedModule& module_of(const std::vector<UnpackedModule>& modules, std::int32_t layer,
                                LoraModule module) {
  const auto found = std::ranges::find_if(
      modules, [&](const UnpackedModule& entry) { return entry.layer == layer && entry.module == module; });
  BOOST_REQUIRE(found != modules.end());
  return *found;
}

BOOST_AUTO_TEST_SUITE(packing)

BOOST_DATA_TEST_CASE(the_device_holds_what_was_sent,
                     boost::unit_test::data::make({0, 1, 2}) * boost::unit_test::data::make({0, 1, 2}) *
                         boost::unit_test::data::make({MatrixLayout::kPanels, MatrixLayout::kRows}),
                     engine_type, sent_type, matrix_layout) {
  LoraLayout layout = small_layout(kDTypes[engine_type]);
  layout.matrix_layout = matrix_layout;
  const std::vector<SentRow> rows{{kAttnV, 0, 3, true},     {kAttnQ, 0, 8, false},
                                  {kMlpGateUp, 0, 5, true}, {kAttnQkv, 1, 7, true, true},
                                  {kMlpGate, 1, 1, false},  {kMlp4HToH, 1, 2, false, true},
                                  {kAttnDense, 0, 4, false}};
  SentAdapter sent = make_adapter(rows, layout, 3, kDTypes[sent_type]);
  // A value that is rounded if the types differ.
  for (std::size_t i = 0; i < sent.rows; ++i) sent.set(i, 1, 1.0F / 3.0F);
  const auto adapter = make_host_adapter(sent.send(42), layout);
  const Packed packed(*adapter, layout, 16384);
  BOOST_TEST(packed.device.task_id == 42U);
  const std::vector<UnpackedModule> modules = unpack_adapter(packed.device, layout);
  BOOST_TEST(modules.size() == 5U + 3 + 2);

  for (std::size_t i = 0; i < rows.size(); ++i) {
    const ModuleSizes sizes = sizes_of(rows[i].module, layout);
    std::int64_t b_first = rows[i].rank * sizes.in;
    std::int64_t magnitude_first = rows[i].rank * (sizes.in + sizes.out);
    std::int64_t shift_first = magnitude_first + (rows[i].is_dora ? sizes.out : 0);
    for (const LoraModule part : parts_of(rows[i].module)) {
      const std::int64_t out = sizes_of(part, layout).out;
      const UnpackedModule& module = module_of(modules, rows[i].layer, part);
      BOOST_TEST(module.rank == rows[i].rank);
      BOOST_TEST(module.a == sent_values(sent, i, 0, rows[i].rank * sizes.in, layout.dtype));
      BOOST_TEST(module.b == sent_values(sent, i, b_first, out * rows[i].rank, layout.dtype));
      if (rows[i].is_dora) {
        BOOST_TEST(module.magnitude == sent_values(sent, i, magnitude_first, out, DType::kFloat32));
      } else {
        BOOST_TEST(module.magnitude.empty());
      }
      if (rows[i].has_shift) {
        BOOST_TEST(module.shift == sent_values(sent, i, shift_first, out, DType::kFloat32));
      } else {
        BOOST_TEST(module.shift.empty());
      }
      b_first += out * rows[i].rank;
      magnitude_first += out;
      shift_first += out;
    }
  }
}

BOOST_AUTO_TEST_CASE(rows_lie_as_they_were_sent) {
  LoraLayout layout = small_layout(DType::kFloat16);
  layout.matrix_layout = MatrixLayout::kRows;
  const SentAdapter sent =
      make_adapter({{kAttnQ, 0, 2, false}, {kAttnV, 0, 3, true}}, layout, 5, DType::kFloat16);
  const auto adapter = make_host_adapter(sent.send(1), layout);
  const Packed packed(*adapter, layout, 16384);
  const DeviceSite& site = packed.device.sites[0];
  const auto is_at = [&](const void* device, std::size_t row, std::size_t first, std::size_t elements) {
    return std::memcmp(device, sent.weights.data() + (row * sent.width + first) * 2, elements * 2) == 0;
  };
  BOOST_TEST(is_at(site.a + site.parts[0].rank_offset * 8 * 2, 0, 0, 2 * 8));
  BOOST_TEST(is_at(site.parts[0].b, 0, 2 * 8, 6 * 2));
  BOOST_TEST(is_at(site.a + site.parts[2].rank_offset * 8 * 2, 1, 0, 3 * 8));
  BOOST_TEST(is_at(site.parts[2].b, 1, 3 * 8, 3 * 3));
  for (std::size_t i = 0; i < 3; ++i) {
    BOOST_TEST(site.parts[2].magnitude[i] == sent.get(1, 3 * 8 + 3 * 3 + i));
  }
}

/// Returns all bytes of the images.
std::vector<std::byte> bytes_of(const Packed& packed, std::size_t page_bytes) {
  std::vector<std::byte> bytes;
  for (std::size_t page = 0; page < packed.plan.used_bytes.size(); ++page) {
    const std::byte* first = packed.memory.data() + page * page_bytes;
    bytes.insert(bytes.end(), first, first + packed.plan.used_bytes[page]);
  }
  return bytes;
}

/// Offset in one memory of each address that an adapter has in it.
std::vector<std::ptrdiff_t> offsets_of(const DeviceAdapter& adapter, const std::byte* memory) {
  std::vector<std::ptrdiff_t> offsets;
  const auto add = [&](const void* address) {
    if (address != nullptr) offsets.push_back(static_cast<const std::byte*>(address) - memory);
  };
  for (const DeviceSite& site : adapter.sites) {
    add(site.a);
    for (const DevicePart& part : site.parts) {
      add(part.b);
      add(part.magnitude);
      add(part.shift);
    }
  }
  return offsets;
}

BOOST_DATA_TEST_CASE(an_adapter_that_is_packed_when_it_is_checked_has_the_same_bits,
                     boost::unit_test::data::make({MatrixLayout::kPanels, MatrixLayout::kRows}) *
                         boost::unit_test::data::xrange(9),
                     matrix_layout, types) {
  LoraLayout layout = small_layout(kDTypes[static_cast<std::size_t>(types / 3)]);
  layout.matrix_layout = matrix_layout;
  layout.max_rank = 70;
  std::vector<SentRow> rows;
  for (std::int32_t layer = 1; layer >= 0; --layer) {
    rows.insert(rows.end(), {{kMlp4HToH, layer, 70, true, true},
                             {kAttnQkv, layer, 5, true},
                             {kMlpGate, layer, 3, false, true},
                             {kMlpHTo4H, layer, 6 + layer}});
  }
  const SentAdapter sent = make_adapter(rows, layout, 3, kDTypes[static_cast<std::size_t>(types % 3)], 5);
  constexpr std::size_t kPage = 1 << 16;
  const SiteIndex index(layout);
  const auto packed = HostAdapter::make_packed(sent.send(1), layout, index, kPage);
  const Packed as_sent(*HostAdapter::make(sent.send(1), layout, index), layout, kPage);
  const Packed copied(*packed, layout, kPage);
  BOOST_TEST((packed->is_packed() && packed->bytes() == packed->plan().bytes()));
  // The gaps between pieces are zero in one memory only.
  const DeviceAdapter in_place = device_adapter_in_place(*packed, layout);
  for (const DeviceAdapter* adapter : {&in_place, &copied.device}) {
    const auto modules = unpack_adapter(*adapter, layout);
    const auto expected = unpack_adapter(as_sent.device, layout);
    BOOST_TEST_REQUIRE(modules.size() == expected.size());
    for (std::size_t i = 0; i < modules.size(); ++i) {
      BOOST_TEST((modules[i].module == expected[i].module && modules[i].rank == expected[i].rank));
      BOOST_TEST(modules[i].a == expected[i].a);
      BOOST_TEST(modules[i].b == expected[i].b);
      BOOST_TEST(modules[i].magnitude == expected[i].magnitude);
      BOOST_TEST(modules[i].shift == expected[i].shift);
    }
  }
  BOOST_TEST(offsets_of(copied.device, copied.memory.data()) ==
             offsets_of(as_sent.device, as_sent.memory.data()));
  const std::vector<std::byte> images = bytes_of(copied, kPage);
  BOOST_TEST((images == std::vector<std::byte>(packed->data(), packed->data() + packed->bytes())));
}

BOOST_AUTO_TEST_CASE(pages_of_a_packed_adapter_follow_each_other) {
  const LoraLayout layout = small_layout();
  const SentAdapter sent =
      make_adapter({{kMlpGateUp, 0, 7, true}, {kMlpGateUp, 1, 7, true}, {kAttnQ, 0, 1}}, layout);
  const auto packed = HostAdapter::make_packed(sent.send(1), layout, SiteIndex(layout), 8192);
  BOOST_TEST_REQUIRE(packed->plan().used_bytes.size() == 2U);
  BOOST_TEST((packed->packed_page(0) == packed->data()));
  BOOST_TEST((packed->packed_page(1) == packed->data() + packed->plan().used_bytes[0]));
  BOOST_TEST(packed->bytes() < 2U * 8192);
}

BOOST_AUTO_TEST_CASE(every_load_has_an_id_of_its_own) {
  const LoraLayout layout = small_layout();
  const auto adapter = make_host_adapter(make_adapter({{kAttnQ, 0, 2, false}}, layout).send(1), layout);
  BOOST_TEST(Packed(*adapter, layout, 8192).device.load_id != Packed(*adapter, layout, 8192).device.load_id);
}

BOOST_AUTO_TEST_CASE(parts_of_a_fused_module_share_its_columns_of_a) {
  const LoraLayout layout = small_layout();
  const auto adapter = make_host_adapter(
      make_adapter({{kAttnQkv, 0, 4, false}, {kMlpGateUp, 0, 3, false}}, layout).send(1), layout);
  const Packed packed(*adapter, layout, 16384);
  const DeviceSite& qkv = packed.device.sites[0];
  BOOST_TEST(qkv.total_rank == 4);
  for (std::size_t i = 0; i < 3; ++i) {
    const DevicePart& part = qkv.parts[i];
    BOOST_TEST(part.rank == 4);
    BOOST_TEST(part.rank_offset == 0);
  }
  BOOST_TEST(packed.device.sites[2].total_rank == 3);
  BOOST_TEST(packed.device.sites[1].total_rank == 0);
  BOOST_TEST(packed.device.sites[1].a == nullptr);
}

BOOST_AUTO_TEST_CASE(separate_modules_stack_their_columns_in_the_order_of_the_parts) {
  const LoraLayout layout = small_layout();
  const auto adapter =
      make_host_adapter(make_adapter({{kAttnV, 0, 3, false}, {kAttnQ, 0, 2, false}}, layout).send(1), layout);
  const Packed packed(*adapter, layout, 16384);
  const DeviceSite& site = packed.device.sites[0];
  BOOST_TEST(site.total_rank == 5);
  BOOST_TEST(site.parts[0].rank_offset == 0);
  BOOST_TEST(site.parts[1].rank == 0);
  BOOST_TEST(site.parts[1].b == nullptr);
  BOOST_TEST(site.parts[2].rank_offset == 2);
}

BOOST_AUTO_TEST_CASE(images_fill_pages_first_fit_and_never_straddle_them) {
  const std::vector<std::size_t> sizes{60, 50, 30, 40, 100, 10};
  const ImagePlaces places = place_images(sizes, 100);
  const std::vector<std::int64_t> pages{0, 1, 0, 1, 2, 0};
  const std::vector<std::size_t> offsets{0, 0, 60, 50, 0, 90};
  BOOST_TEST((places.used_bytes == std::vector<std::size_t>{100, 90, 100}));
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    BOOST_TEST(places.places[i].page == pages[i]);
    BOOST_TEST(places.places[i].offset == offsets[i]);
  }
}

BOOST_AUTO_TEST_CASE(every_piece_is_aligned_and_inside_its_image) {
  const LoraLayout layout = small_layout(DType::kBFloat16);
  const auto adapter = make_host_adapter(
      make_adapter({{kAttnQ, 0, 3, true, true}, {kAttnK, 0, 1, false}, {kMlp4HToH, 1, 5, false, true}},
                   layout)
          .send(1),
      layout);
  const Packed packed(*adapter, layout, 2048);
  const std::byte* begin = packed.memory.data();
  const std::byte* end = begin + packed.memory.bytes();
  std::vector<std::pair<const std::byte*, std::size_t>> pieces;
  for (std::size_t i = 0; i < layout.sites.size(); ++i) {
    const DeviceSite& site = packed.device.sites[i];
    if (site.total_rank == 0) continue;
    pieces.emplace_back(site.a, panel_bytes(layout.dtype, site.total_rank, layout.sites[i].in_size));
    for (std::size_t p = 0; p < layout.sites[i].parts.size(); ++p) {
      const DevicePart& part = site.parts[p];
      if (part.rank == 0) continue;
      const std::int64_t out = layout.sites[i].parts[p].out_size;
      pieces.emplace_back(part.b, panel_bytes(layout.dtype, out, part.rank));
      for (const float* vector : {part.magnitude, part.shift}) {
        if (vector == nullptr) continue;
        pieces.emplace_back(reinterpret_cast<const std::byte*>(vector), static_cast<std::size_t>(out) * 4);
      }
    }
  }
  std::ranges::sort(pieces);
  const std::byte* last = begin;
  for (const auto& [piece, bytes] : pieces) {
    BOOST_TEST((piece - begin) % static_cast<std::ptrdiff_t>(kImageAlignment) == 0);
    BOOST_TEST((piece >= last));
    BOOST_TEST((piece + bytes <= end));
    BOOST_TEST((piece - begin) / 2048 == (piece + bytes - 1 - begin) / 2048);
    last = piece + bytes;
  }
}

/// The layout's two layers; the second one has three experts instead of its MLP.
LoraLayout layout_with_experts() {
  LoraLayout layout = small_layout();
  layout.sites.resize(6);
  for (std::int32_t expert = 0; expert < 3; ++expert) {
    layout.sites.push_back({1, 8, {{LoraModule::kMoeHTo4H, 5}, {LoraModule::kMoeGate, 5}}, expert});
  }
  for (std::int32_t expert = 0; expert < 3; ++expert) {
    layout.sites.push_back({1, 5, {{LoraModule::kMoe4HToH, 8}}, expert});
  }
  layout.target_modules.insert(layout.target_modules.end(),
                               {LoraModule::kMoeHTo4H, LoraModule::kMoeGate, LoraModule::kMoe4HToH});
  return layout;
}

BOOST_AUTO_TEST_CASE(a_row_of_experts_is_cut_into_one_image_for_each) {
  const LoraLayout layout = layout_with_experts();
  const std::vector<SentRow> rows{{kMlpHTo4H, 0, 2, false},
                                  {LoraModule::kMoeGate, 1, 3, true, true},
                                  {LoraModule::kMoe4HToH, 1, 2, false}};
  const SentAdapter sent = make_adapter(rows, layout, 3);
  const auto adapter = make_host_adapter(sent.send(42), layout);
  const Packed packed(*adapter, layout, 16384);
  const std::vector<UnpackedModule> modules = unpack_adapter(packed.device, layout);
  BOOST_REQUIRE(modules.size() == 1U + 3 + 3);
  for (const UnpackedModule& module : modules) {
    if (module.layer == 0) continue;
    const std::size_t row = module.module == LoraModule::kMoeGate ? 1 : 2;
    const ModuleSizes sizes = sizes_of(module.module, layout);
    const std::int64_t rank = rows[row].rank;
    BOOST_TEST(sizes.experts == 3);
    const std::int64_t a = module.expert * rank * sizes.in;
    const std::int64_t b = 3 * rank * sizes.in + module.expert * rank * sizes.out;
    const std::int64_t magnitude = 3 * rank * (sizes.in + sizes.out) + module.expert * sizes.out;
    BOOST_TEST(module.a == sent_values(sent, row, a, rank * sizes.in, layout.dtype));
    BOOST_TEST(module.b == sent_values(sent, row, b, rank * sizes.out, layout.dtype));
    if (rows[row].is_dora) {
      BOOST_TEST(module.magnitude == sent_values(sent, row, magnitude, sizes.out, DType::kFloat32));
      BOOST_TEST(module.shift ==
                 sent_values(sent, row, magnitude + 3 * sizes.out, sizes.out, DType::kFloat32));
    }
  }
}

/// Layout of a rank with expert 1 of three.
LoraLayout layout_with_own_experts() {
  LoraLayout layout = layout_with_experts();
  std::erase_if(layout.sites, [](const LoraSite& site) {
    return site.layer == 1 && site.parts[0].module >= LoraModule::kMoeHTo4H && site.expert != 1;
  });
  for (std::size_t i = 6; i < layout.sites.size(); ++i) layout.sites[i].experts_for_each = 3;
  return layout;
}

BOOST_AUTO_TEST_CASE(a_rank_has_images_of_its_own_experts) {
  const LoraLayout whole = layout_with_experts();
  const LoraLayout layout = layout_with_own_experts();
  BOOST_REQUIRE(layout.sites.size() == 8U);
  BOOST_TEST(sizes_of(LoraModule::kMoeGate, layout).experts == 3);
  const std::vector<SentRow> rows{{LoraModule::kMoeGate, 1, 3, true, true},
                                  {LoraModule::kMoe4HToH, 1, 2, false}};
  const SentAdapter sent = make_adapter(rows, whole, 3);
  const auto adapter = make_host_adapter(sent.send(42), layout);
  const std::vector<UnpackedModule> own = unpack_adapter(Packed(*adapter, layout, 16384).device, layout);
  const auto adapter_of_all = make_host_adapter(sent.send(42), whole);
  const std::vector<UnpackedModule> all = unpack_adapter(Packed(*adapter_of_all, whole, 16384).device, whole);
  BOOST_REQUIRE(own.size() == 2U);
  for (const UnpackedModule& module : own) {
    const auto same = std::ranges::find_if(
        all, [&](const UnpackedModule& other) { return other.module == module.module && other.expert == 1; });
    BOOST_TEST(module.expert == 1);
    BOOST_TEST(module.a == same->a);
    BOOST_TEST(module.b == same->b);
    BOOST_TEST(module.magnitude == same->magnitude);
    BOOST_TEST(module.shift == same->shift);
  }
}

/// A rank's layout with fully sharded adapters in layer 0. q, k and v are split by outputs, equally among the
/// ranks; the layer after them is split by inputs.
LoraLayout sharded_layout(std::int32_t num_shares, std::int32_t share) {
  LoraLayout layout = small_layout();
  layout.sites.resize(2);
  layout.num_layers = 1;
  layout.target_modules = {LoraModule::kAttnQ, LoraModule::kAttnK, LoraModule::kAttnV,
                           LoraModule::kAttnDense};
  LoraSite& qkv = layout.sites[0];
  LoraSite& dense = layout.sites[1];
  for (LoraPart& part : qkv.parts) {
    part.first_output = share * part.out_size;
    part.num_remote_outputs = (num_shares - 1) * part.out_size;
  }
  dense.first_input = share * dense.in_size;
  dense.num_remote_inputs = (num_shares - 1) * dense.in_size;
  dense.parts[0].out_size = 2 * kPanelColumns + 8;  // three panels
  for (LoraSite& site : layout.sites) {
    site.num_shares = num_shares;
    site.share = share;
  }
  return layout;
}

/// Together the ranks have each row of A and B once, and none has more than its share.
BOOST_DATA_TEST_CASE(ranks_share_both_matrices, boost::unit_test::data::make({2, 3, 4}), num_shares) {
  const std::vector<SentRow> rows{{LoraModule::kAttnQ, 0, 3, true},
                                  {LoraModule::kAttnV, 0, 2, false, true},
                                  {LoraModule::kAttnDense, 0, 3, true, true}};
  const SentAdapter sent = make_adapter(rows, sharded_layout(num_shares, 0), 3);
  std::vector<std::vector<float>> sums;
  std::vector<std::size_t> counts;
  std::int64_t pages = 0;
  for (std::int32_t share = 0; share < num_shares; ++share) {
    const LoraLayout layout = sharded_layout(num_shares, share);
    const auto adapter = make_host_adapter(sent.send(42), layout);
    const Packed packed(*adapter, layout, 4096);
    const std::vector<UnpackedModule> modules = unpack_adapter(packed.device, layout);
    BOOST_REQUIRE(modules.size() == 3U);
    const std::vector<std::vector<float>> shared{modules[0].a, modules[1].a, modules[2].b};
    sums.resize(shared.size());
    counts.resize(shared.size());
    for (std::size_t i = 0; i < shared.size(); ++i) {
      sums[i].resize(shared[i].size());
      for (std::size_t at = 0; at < shared[i].size(); ++at) {
        sums[i][at] += shared[i][at];
        counts[i] += shared[i][at] != 0.0F ? 1 : 0;
      }
    }
    // The part that the split of the layer leaves to a rank is not divided further.
    const std::int64_t q = 6 * 3;
    BOOST_TEST(modules[0].b == sent_values(sent, 0, 3 * 8 + share * q, q, layout.dtype));
    BOOST_TEST(modules[2].magnitude.size() == 2U * kPanelColumns + 8);
    if (share == 0) pages = packed.plan.pages;
    BOOST_TEST(packed.plan.pages == pages);
    BOOST_TEST(layout.sites[0].rows_of_a(5).count <= (5 + num_shares - 1) / num_shares);
    BOOST_TEST(layout.sites[1].rows_of_b(2 * kPanelColumns + 8).count <=
               (num_shares == 2 ? 2 : 1) * kPanelColumns);
  }
  const std::int64_t inner = 6 * num_shares;
  const std::int64_t outputs = 2 * kPanelColumns + 8;
  BOOST_TEST(sums[0] == sent_values(sent, 0, 0, 3 * 8, DType::kFloat32));
  BOOST_TEST(sums[1] == sent_values(sent, 1, 0, 2 * 8, DType::kFloat32));
  BOOST_TEST(sums[2] == sent_values(sent, 2, 3 * inner, outputs * 3, DType::kFloat32));
  BOOST_TEST(counts[0] <= 3U * 8);
  BOOST_TEST(counts[1] <= 2U * 8);
  BOOST_TEST(counts[2] <= static_cast<std::size_t>(outputs) * 3);
}

/// The part has outputs 1, 3 and 4 of six.
BOOST_DATA_TEST_CASE(a_part_may_be_several_ranges_of_its_module,
                     boost::unit_test::data::make({MatrixLayout::kPanels, MatrixLayout::kRows}),
                     matrix_layout) {
  const LoraLayout whole = small_layout();
  LoraLayout layout = whole;
  layout.matrix_layout = matrix_layout;
  layout.sites[0].parts[0] = {
      .module = kAttnQ, .out_size = 3, .num_remote_outputs = 3, .output_ranges = {1, 1, 3, 2}};
  const std::int64_t rank = 2;
  const SentAdapter sent = make_adapter({{kAttnQ, 0, rank, true, true}}, whole, 3);
  const auto adapter = make_host_adapter(sent.send(42), layout);
  const auto modules = unpack_adapter(Packed(*adapter, layout, 16384).device, layout);
  BOOST_REQUIRE(modules.size() == 1U);
  const auto rows = [&](std::int64_t first, std::int64_t width) {
    std::vector<float> found = sent_values(sent, 0, first + width, width, layout.dtype);
    const std::vector<float> more = sent_values(sent, 0, first + 3 * width, 2 * width, layout.dtype);
    found.insert(found.end(), more.begin(), more.end());
    return found;
  };
  BOOST_TEST(modules[0].a == sent_values(sent, 0, 0, rank * 8, layout.dtype));
  BOOST_TEST(modules[0].b == rows(rank * 8, rank));
  BOOST_TEST(modules[0].magnitude == rows(rank * (8 + 6), 1));
  BOOST_TEST(modules[0].shift == rows(rank * (8 + 6) + 6, 1));
}

/// For a layer as wide as in large models, a rank's images have a share of the size of a single rank's.
BOOST_AUTO_TEST_CASE(images_are_as_large_as_a_share) {
  LoraSite column{0, 1024, {{LoraModule::kAttnQ, 256, 0, 768}}};
  LoraSite row{0, 256, {{LoraModule::kAttnDense, 1024}}};
  row.num_remote_inputs = 768;
  const LoraLayout layout = small_layout(DType::kBFloat16);
  const auto bytes_of = [&](const LoraSite& site, std::int32_t rank) {
    const ModuleRank module{site.parts[0].module, rank, {}};
    return image_bytes(layout, site, {&module, 1});
  };
  constexpr std::size_t kElement = 2;
  BOOST_TEST(bytes_of(column, 16) == (16 * 1024 + 16 * 256) * kElement);
  BOOST_TEST(bytes_of(row, 16) == (16 * 256 + 16 * 1024) * kElement);
  for (LoraSite* site : {&column, &row}) site->num_shares = 4;
  for (std::int32_t share = 0; share < 4; ++share) {
    for (LoraSite* site : {&column, &row}) {
      site->share = share;
      BOOST_TEST(bytes_of(*site, 16) == (4 * 1024 + 16 * 256) * kElement);
    }
    BOOST_TEST(bytes_of(column, 5) == 2 * 1024 * kElement + 256 * padded_k(DType::kBFloat16, 5) * kElement);
  }
}

BOOST_AUTO_TEST_CASE(experts_that_a_layer_does_not_have_are_refused) {
  LoraLayout layout = layout_with_own_experts();
  layout.sites[6].expert = 3;
  BOOST_CHECK_EXCEPTION(SiteIndex{layout}, EngineError, [](const EngineError& error) {
    return contains(error.what(), "LoRA sites of moe_gate of layer 1 are of experts 3 to 3 of 3");
  });
  layout.sites[6].experts_for_each = 0;
  BOOST_CHECK_THROW(SiteIndex{layout}, EngineError);
}

BOOST_AUTO_TEST_CASE(a_module_that_a_layer_does_not_have_is_refused) {
  const LoraLayout layout = layout_with_experts();
  SentAdapter sent = make_adapter({{kMlpHTo4H, 0, 2, false}}, layout);
  sent.field(0, 1) = 1;
  BOOST_CHECK_EXCEPTION(make_host_adapter(sent.send(1), layout), AdapterError, [](const AdapterError& error) {
    return contains(error.what(), "layer 1 of this engine has no mlp_h_to_4h");
  });
}

BOOST_AUTO_TEST_CASE(experts_that_are_not_in_order_are_refused) {
  LoraLayout layout = layout_with_experts();
  std::swap(layout.sites[6].expert, layout.sites[7].expert);
  layout.sites[10].in_size = 4;
  BOOST_CHECK_EXCEPTION(SiteIndex{layout}, EngineError, [](const EngineError& error) {
    return contains(error.what(), "first LoRA site of moe_h_to_4h of layer 1 is not expert 0's") &&
           contains(error.what(), "experts' moe_4h_to_h of layer 1 have different sizes");
  });
}

BOOST_AUTO_TEST_CASE(a_layout_whose_sites_and_modules_disagree_is_refused) {
  LoraLayout layout = small_layout();
  layout.sites[1].parts[0].module = LoraModule::kMlp4HToH;
  layout.sites[4].parts.clear();
  layout.target_modules.push_back(LoraModule::kMoeRouter);
  BOOST_CHECK_EXCEPTION(SiteIndex{layout}, EngineError, [](const EngineError& error) {
    return contains(error.what(), "two LoRA sites have mlp_4h_to_h of layer 0") &&
           contains(error.what(), "LoRA site 4 has 0 parts") &&
           contains(error.what(), "no LoRA site has moe_router");
  });
}

BOOST_AUTO_TEST_CASE(stages_have_runs_of_the_layers_of_both_stacks) {
  LoraLayout layout;
  layout.num_stages = 2;
  layout.num_layers = 10;
  layout.num_encoder_layers = 6;
  std::vector<std::int32_t> stages;
  for (std::int32_t layer = 0; layer < layout.num_layers; ++layer) {
    stages.push_back(layout.stage_of({.layer = layer, .in_size = 1, .parts = {{LoraModule::kAttnQ, 1}}}));
  }
  BOOST_TEST((stages == std::vector<std::int32_t>{0, 0, 1, 1, 0, 0, 0, 1, 1, 1}));
}

BOOST_AUTO_TEST_CASE(layers_that_are_left_over_go_to_the_stages_before_the_last) {
  // The stages of vLLM's get_pp_indices.
  const auto counts = [](std::int32_t num_layers, std::int32_t num_stages) {
    std::vector<std::int32_t> result;
    std::int32_t next = 0;
    for (std::int32_t stage = 0; stage < num_stages; ++stage) {
      const StageLayers layers = stage_layers(num_layers, num_stages, stage);
      BOOST_TEST(layers.first == next);
      next += layers.count;
      result.push_back(layers.count);
    }
    BOOST_TEST(next == num_layers);
    return result;
  };
  using Counts = std::vector<std::int32_t>;
  BOOST_TEST((counts(6, 1) == Counts{6}));
  BOOST_TEST((counts(6, 3) == Counts{2, 2, 2}));
  BOOST_TEST((counts(5, 2) == Counts{3, 2}));
  BOOST_TEST((counts(7, 3) == Counts{2, 3, 2}));
  BOOST_TEST((counts(8, 3) == Counts{3, 3, 2}));
  BOOST_TEST((counts(30, 4) == Counts{7, 8, 8, 7}));
  BOOST_TEST((counts(0, 3) == Counts{0, 0, 0}));
  LoraLayout layout;
  layout.num_stages = 3;
  layout.num_layers = 7;
  std::vector<std::int32_t> stages;
  for (std::int32_t layer = 0; layer < layout.num_layers; ++layer) {
    stages.push_back(layout.stage_of({.layer = layer, .in_size = 1, .parts = {{LoraModule::kAttnQ, 1}}}));
  }
  BOOST_TEST((stages == Counts{0, 0, 1, 1, 1, 2, 2}));
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::pack_adapter_test
