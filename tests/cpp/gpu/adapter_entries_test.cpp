#include "adaptrt/gpu/adapter_entries.h"

#include <boost/test/unit_test.hpp>
#include <set>
#include <vector>

namespace adaptrt::testing {

BOOST_AUTO_TEST_SUITE(adapter_entries)

BOOST_AUTO_TEST_CASE(every_part_has_an_entry_of_its_own) {
  using enum LoraModule;
  LoraLayout layout;
  layout.num_layers = 2;
  const auto add = [&layout](std::int32_t layer, std::int32_t expert,
                             const std::vector<LoraModule>& modules) {
    LoraSite& site = layout.sites.emplace_back();
    site.layer = layer;
    site.expert = expert;
    for (const LoraModule module : modules) site.parts.push_back({module, 8});
  };
  for (std::int32_t layer = 0; layer < 2; ++layer) {
    add(layer, 0, {kAttnQ, kAttnV});
    add(layer, 0, {kLinearAttnQkv, kLinearAttnZ});  // their ids are beyond the rows
    for (std::int32_t expert = 0; expert < 40; ++expert) add(layer, expert, {kMoeHTo4H, kMoeGate});
    for (std::int32_t expert = 0; expert < 40; ++expert) add(layer, expert, {kMoe4HToH});
  }
  for (std::int32_t slice = 0; slice < 5; ++slice) add(slice, 0, {kLmHead});
  // Modules without a place in a layer's row. A norm has its number in place of a layer.
  for (std::int32_t norm = 0; norm < 30; ++norm) add(norm, 0, {kNorm});
  add(0, 0, {kNewTokens});
  // 5 slices, then 240 parts of experts, 4 of linear attention, 30 norms and new tokens.
  const AdapterEntries entries(layout);
  BOOST_TEST(entries.rows() == 5 + (275 + kNumLoraModules - 1) / kNumLoraModules);
  BOOST_TEST(entries.count() == std::int64_t{entries.rows()} * kNumLoraModules);
  std::set<std::int64_t> all;
  std::size_t parts = 0;
  for (std::size_t site = 0; site < layout.sites.size(); ++site) {
    for (std::size_t part = 0; part < layout.sites[site].parts.size(); ++part) {
      const std::int64_t entry = entries.entry(site, part);
      BOOST_TEST(entry >= 0);
      BOOST_TEST(entry < entries.count());
      all.insert(entry);
      ++parts;
    }
  }
  BOOST_TEST(all.size() == parts);
  // LoRA's kernels expect these of linear layers, and rows of experts without gaps.
  BOOST_TEST(entries.entry(82, 1) == kNumLoraModules + static_cast<std::int64_t>(kAttnV));
  BOOST_TEST(entries.entry(4, 0) == entries.entry(2, 0) + 4);
  BOOST_TEST(entries.entry(43, 0) == entries.entry(42, 0) + 1);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace adaptrt::testing
