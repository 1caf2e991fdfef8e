#include "adaptrt/cpu/kernel_choice.h"

#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <iterator>
#include <ostream>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/cpu/kernel_table.h"

namespace adaptrt::kernel_choice_test {
namespace {

using Names = std::vector<std::string>;

constexpr Cpu kZen3{.vendor = CpuVendor::kAmd, .family = 0x19, .avx2 = true};
constexpr Cpu kZen4{.vendor = CpuVendor::kAmd,
                    .family = 0x19,
                    .avx2 = true,
                    .avx512 = true,
                    .avx512_vnni = true,
                    .avx512_bf16 = true};
constexpr Cpu kSkylake{.vendor = CpuVendor::kIntel, .family = 6, .avx2 = true, .avx512 = true};
constexpr Cpu kIceLake{
    .vendor = CpuVendor::kIntel, .family = 6, .avx2 = true, .avx512 = true, .avx512_vnni = true};
constexpr Cpu kCooperLake{.vendor = CpuVendor::kIntel,
                          .family = 6,
                          .avx2 = true,
                          .avx512 = true,
                          .avx512_vnni = true,
                          .avx512_bf16 = true};
constexpr Cpu kSapphireRapids{.vendor = CpuVendor::kIntel,
                              .family = 6,
                              .avx2 = true,
                              .avx512 = true,
                              .avx512_vnni = true,
                              .avx512_bf16 = true,
                              .avx512_vbmi = true,
                              .amx = true,
                              .amx_permitted = true};

constexpr Cpu kGraviton1{.architecture = CpuArchitecture::kArm};
constexpr Cpu kGraviton2{.architecture = CpuArchitecture::kArm, .neon_dotprod = true};
constexpr Cpu kGraviton3{
    .architecture = CpuArchitecture::kArm, .neon_dotprod = true, .neon_i8mm = true, .neon_bf16 = true};

/// Returns a copy of `cpu` with some features changed.
template <class Change>
Cpu changed(Cpu cpu, Change change) {
  change(cpu);
  return cpu;
}

/// A CPU whose hypervisor masks AVX-512; the bits of AMX may remain.
Cpu without_avx512(Cpu cpu) {
  cpu.avx512 = cpu.avx512_vnni = cpu.avx512_bf16 = cpu.avx512_vbmi = false;
  return cpu;
}

struct Case {
  std::string cpu_name;
  Cpu cpu;
  Names runnable;  ///< the chosen one first
};

std::ostream& operator<<(std::ostream& out, const Case& some) {
  return out << some.cpu_name;
}

const std::vector<Case> kCases{
    {"Zen 3", kZen3, {"avx2", "portable"}},
    {"Zen 4", kZen4, {"avx512_bf16", "avx512_vnni", "avx512", "avx2", "portable"}},
    {"Zen 5",
     changed(kZen4, [](Cpu& cpu) { cpu.family = 0x1a; }),
     {"avx512_bf16", "avx512_vnni", "avx512", "avx2", "portable"}},
    {"Zen 4 without AVX-512", without_avx512(kZen4), {"avx2", "portable"}},
    {"Zen 4 without BF16",
     changed(kZen4, [](Cpu& cpu) { cpu.avx512_bf16 = false; }),
     {"avx512_vnni", "avx512", "avx2", "portable"}},
    {"Skylake", kSkylake, {"avx512", "avx2", "portable"}},
    {"Ice Lake", kIceLake, {"avx512_vnni", "avx512", "avx2", "portable"}},
    {"Cooper Lake", kCooperLake, {"avx512_vnni", "avx512_bf16", "avx512", "avx2", "portable"}},
    {"Sapphire Rapids",
     kSapphireRapids,
     {"avx512_amx", "avx512_vnni", "avx512_bf16", "avx512", "avx2", "portable"}},
    {"Sapphire Rapids without permission",
     changed(kSapphireRapids, [](Cpu& cpu) { cpu.amx_permitted = false; }),
     {"avx512_vnni", "avx512_bf16", "avx512", "avx2", "portable"}},
    {"Sapphire Rapids without AVX-512", without_avx512(kSapphireRapids), {"avx2", "portable"}},
    {"Sapphire Rapids without BF16",
     changed(kSapphireRapids, [](Cpu& cpu) { cpu.avx512_bf16 = false; }),
     {"avx512_vnni", "avx512", "avx2", "portable"}},
    {"Sapphire Rapids without VNNI",
     changed(kSapphireRapids, [](Cpu& cpu) { cpu.avx512_vnni = false; }),
     {"avx512", "avx2", "portable"}},
    {"AVX-512 without AVX2", changed(kIceLake, [](Cpu& cpu) { cpu.avx2 = false; }), {"portable"}},
    {"unknown vendor with BF16",
     changed(kZen4, [](Cpu& cpu) { cpu.vendor = CpuVendor::kOther; }),
     {"avx512_vnni", "avx512_bf16", "avx512", "avx2", "portable"}},
    {"unknown vendor with AMX",
     changed(kSapphireRapids, [](Cpu& cpu) { cpu.vendor = CpuVendor::kOther; }),
     {"avx512_amx", "avx512_vnni", "avx512_bf16", "avx512", "avx2", "portable"}},
    {"nothing known", Cpu{}, {"portable"}},
    {"Graviton 1", kGraviton1, {"neon", "portable"}},
    {"Graviton 2", kGraviton2, {"neon_dotprod", "neon", "portable"}},
    {"Graviton 3", kGraviton3, {"neon_bf16", "neon_i8mm", "neon_dotprod", "neon", "portable"}},
    {"Arm with BF16 alone",
     changed(kGraviton2, [](Cpu& cpu) { cpu.neon_bf16 = true; }),
     {"neon_dotprod", "neon", "portable"}},
    {"RISC-V", Cpu{.architecture = CpuArchitecture::kOther}, {"portable"}},
};

std::string obstacle(const Cpu& cpu, const std::string& name) {
  for (const KernelFit& fit : fit_kernels(cpu)) {
    if (fit.name == name) return std::string(fit.obstacle);
  }
  return "there is no such table";
}

BOOST_AUTO_TEST_SUITE(kernel_choice)

BOOST_AUTO_TEST_CASE(a_table_falls_back_to_a_table_that_runs_on_the_same_cpus) {
  BOOST_TEST(base_of_kernels("neon_i8mm") == "neon");
  BOOST_TEST(base_of_kernels("avx512_amx") == "avx512_bf16");
  BOOST_TEST(base_of_kernels("avx2") == "");
  BOOST_TEST(base_of_kernels("none") == "");
  for (const Case& some : kCases) {
    for (const std::string& name : some.runnable) {
      const std::string_view base = base_of_kernels(name);
      BOOST_TEST((base.empty() || std::ranges::count(some.runnable, base) == 1), name);
    }
  }
  constexpr auto kFloat32 = static_cast<std::size_t>(DType::kFloat32);
  const std::span<const KernelTable* const> tables = available_kernels();
  for (const KernelTable* table : tables) {
    const std::string_view base = base_of_kernels(table->name);
    const auto found = std::ranges::find(tables, base, [](const KernelTable* other) { return other->name; });
    if (found != tables.end())
      BOOST_TEST((table->attend[kFloat32] == (*found)->attend[kFloat32]), table->name);
  }
}

BOOST_DATA_TEST_CASE(a_cpu_runs_these_tables_and_the_first_is_chosen, boost::unit_test::data::make(kCases),
                     some) {
  Names runnable;
  Names others;
  for (const KernelFit& fit : fit_kernels(some.cpu)) {
    BOOST_TEST((others.empty() || !fit.obstacle.empty()), fit.name << " comes after one that cannot run");
    (fit.obstacle.empty() ? runnable : others).emplace_back(fit.name);
  }
  BOOST_TEST(runnable == some.runnable, boost::test_tools::per_element());
  const std::size_t num_tables = some.cpu.architecture == CpuArchitecture::kX86   ? 6
                                 : some.cpu.architecture == CpuArchitecture::kArm ? 5
                                                                                  : 1;
  BOOST_TEST(runnable.size() + others.size() == num_tables);
}

BOOST_AUTO_TEST_CASE(missing_cpu_features_are_named) {
  BOOST_TEST(obstacle(kZen3, "avx512") == "this CPU has no AVX-512 (F, BW, VL and DQ)");
  BOOST_TEST(obstacle(kSkylake, "avx512_vnni") == "this CPU has no AVX-512 VNNI");
  BOOST_TEST(obstacle(kIceLake, "avx512_bf16") == "this CPU has no AVX-512 BF16");
  BOOST_TEST(obstacle(kZen4, "avx512_amx") == "this CPU has no AMX for bfloat16 and int8");
  BOOST_TEST(obstacle(kGraviton1, "neon_dotprod") == "this CPU has no 8-bit dot products (FEAT_DotProd)");
  BOOST_TEST(obstacle(kGraviton2, "neon_bf16") == "this CPU has no BF16 instructions (FEAT_BF16)");
  BOOST_TEST(obstacle(changed(kGraviton3, [](Cpu& cpu) { cpu.neon_i8mm = false; }), "neon_bf16") ==
             "this CPU has no products of 8-bit matrices (FEAT_I8MM)");
  BOOST_TEST(obstacle(Cpu{}, "avx2") == "this CPU has no AVX2 with FMA");
  BOOST_TEST(obstacle(changed(kSapphireRapids, [](Cpu& cpu) { cpu.amx_permitted = false; }), "avx512_amx") ==
             "Linux refused the tile registers of AMX");
  BOOST_TEST(obstacle(without_avx512(kSapphireRapids), "avx512_amx") == "this CPU has no AVX-512 VBMI");
  BOOST_TEST(obstacle(changed(kSapphireRapids, [](Cpu& cpu) { cpu.avx512_bf16 = false; }), "avx512_amx") ==
             "this CPU has no AVX-512 BF16");
}

BOOST_AUTO_TEST_CASE(tables_have_the_names_that_the_choice_knows) {
  const auto fits = fit_kernels(read_cpu());
  const auto place_of = [&](std::string_view name) {
    return std::ranges::find(fits, name, &KernelFit::name) - fits.begin();
  };
  std::ptrdiff_t before = -1;
  for (const auto* table : available_kernels()) {
    BOOST_TEST(&find_kernels(table->name) == table);
    BOOST_TEST(place_of(table->name) > before, table->name << " is out of order");
    before = place_of(table->name);
  }
  BOOST_TEST(before < std::ssize(fits));
#ifdef ADAPTRT_EVERY_TABLE
  const auto can_run = std::ranges::count_if(fits, [](const KernelFit& fit) { return fit.obstacle.empty(); });
  BOOST_TEST(std::ssize(available_kernels()) == can_run);
  BOOST_TEST(available_kernels().front()->name == fits.front().name);
#endif
}

BOOST_AUTO_TEST_CASE(a_build_for_another_cpu_says_so) {
  const std::vector<KernelFit> fits{{"avx2", "this CPU has no AVX2 with FMA"}};
  for (const char* name : {"", "avx2", "portable"}) {
    BOOST_TEST(kernels_problem(name, fits) ==
               "this build has no kernels that this CPU can run; build with -D ADAPTRT_KERNEL_TABLES=all");
  }
}

BOOST_AUTO_TEST_CASE(a_name_is_refused_with_the_reason_and_what_can_run) {
  const auto fits =
      fit_kernels(changed(kSapphireRapids, [](Cpu& cpu) { cpu.avx512_bf16 = cpu.amx_permitted = false; }));
  const std::string end = "; this CPU can run: avx512_vnni, avx512, avx2, portable";
  for (const char* name : {"", "avx512_vnni", "avx512", "avx2", "portable"}) {
    BOOST_TEST(kernels_problem(name, fits).empty(), name);
  }
  BOOST_TEST(kernels_problem("abacus", fits) == "kernels is 'abacus'" + end);
  BOOST_TEST(kernels_problem("avx512_amx", fits) ==
             "kernels is 'avx512_amx', but Linux refused the tile registers of AMX" + end);
  BOOST_TEST(kernels_problem("avx512_bf16", fits) ==
             "kernels is 'avx512_bf16', but this CPU has no AVX-512 BF16" + end);
}

BOOST_AUTO_TEST_CASE(kernels_that_cannot_be_had_here_are_refused) {
  BOOST_CHECK_EXCEPTION((void)find_kernels("abacus"), ConfigError,
                        [](const ConfigError& error) { return error.what() == kernels_problem("abacus"); });
  for (const KernelFit& fit : impossible_kernels()) {
    BOOST_TEST(!fit.obstacle.empty());
    BOOST_CHECK_EXCEPTION((void)find_kernels(fit.name), ConfigError, [&](const ConfigError& error) {
      return error.what() == kernels_problem(fit.name);
    });
  }
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::kernel_choice_test
