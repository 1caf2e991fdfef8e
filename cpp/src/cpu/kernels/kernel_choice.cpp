#include "adaptrt/cpu/kernel_choice.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>

namespace adaptrt {
namespace {

struct Need {
  bool Cpu::* feature;
  std::string_view obstacle;
};

// A table needs one of these features and all features after it in its list. The first one that is missing is
// reported.
constexpr auto kNeeds = std::to_array<Need>({
    {&Cpu::amx, "this CPU has no AMX for bfloat16 and int8"},
    {&Cpu::amx_permitted, "Linux refused the tile registers of AMX"},
    {&Cpu::avx512_vbmi, "this CPU has no AVX-512 VBMI"},
    {&Cpu::avx512_bf16, "this CPU has no AVX-512 BF16"},
    {&Cpu::avx512_vnni, "this CPU has no AVX-512 VNNI"},
    {&Cpu::avx512, "this CPU has no AVX-512 (F, BW, VL and DQ)"},
    {&Cpu::avx2, "this CPU has no AVX2 with FMA"},
});
constexpr auto kArmNeeds = std::to_array<Need>({
    {&Cpu::neon_bf16, "this CPU has no BF16 instructions (FEAT_BF16)"},
    {&Cpu::neon_i8mm, "this CPU has no products of 8-bit matrices (FEAT_I8MM)"},
    {&Cpu::neon_dotprod, "this CPU has no 8-bit dot products (FEAT_DotProd)"},
});

/// The needs of `list` from `feature` on.
constexpr std::span<const Need> needs_from(std::span<const Need> list, bool Cpu::* feature) {
  return list.subspan(
      static_cast<std::size_t>(std::ranges::find(list, feature, &Need::feature) - list.begin()));
}
constexpr std::span<const Need> needs_from(bool Cpu::* feature) {
  return needs_from(kNeeds, feature);
}

bool always(const Cpu& /*cpu*/) {
  return true;
}

/// vdpbf16ps has twice the rate of float32 FMA on Zen 4 and later, and half of it on Intel's CPUs. For other
/// vendors the rate is unknown, while FMA has full rate on all CPUs.
bool multiplies_bfloat16_faster(const Cpu& cpu) {
  constexpr int kZen4 = 0x19;
  return cpu.vendor == CpuVendor::kAmd && cpu.family >= kZen4;
}

struct Row {
  std::string_view name;
  std::span<const Need> needs;
  /// True if it comes before the next row that can run. True for the last row.
  bool (*is_faster)(const Cpu& cpu);
  /// The table whose kernels it has where its own instructions bring nothing; empty if all are its own.
  std::string_view base;
};

constexpr Row kPortable{"portable", {}, always, {}};

constexpr auto kRows = std::to_array<Row>({
    // Measured at 15 to 30 times the rate of vdpbf16ps.
    {"avx512_amx", needs_from(&Cpu::amx), always, "avx512_bf16"},
    {"avx512_bf16", needs_from(&Cpu::avx512_bf16), multiplies_bfloat16_faster, "avx512"},
    // Float32 FMA for bfloat16 weights too; one instruction instead of three for 8-bit products.
    {"avx512_vnni", needs_from(&Cpu::avx512_vnni), always, "avx512"},
    // Twice the width of AVX2 at the same instructions a cycle, or the same rate with fewer instructions.
    {"avx512", needs_from(&Cpu::avx512), always, {}},
    {"avx2", needs_from(&Cpu::avx2), always, {}},
    kPortable,
});

// A table with more instructions needs fewer of them for the same products.
constexpr auto kArmRows = std::to_array<Row>({
    {"neon_bf16", needs_from(kArmNeeds, &Cpu::neon_bf16), always, "neon"},
    {"neon_i8mm", needs_from(kArmNeeds, &Cpu::neon_i8mm), always, "neon"},
    {"neon_dotprod", needs_from(kArmNeeds, &Cpu::neon_dotprod), always, "neon"},
    {"neon", {}, always, {}},
    kPortable,
});

std::span<const Row> rows_of(CpuArchitecture architecture) {
  switch (architecture) {
    case CpuArchitecture::kX86:
      return kRows;
    case CpuArchitecture::kArm:
      return kArmRows;
    case CpuArchitecture::kOther:
      break;
  }
  return {&kPortable, 1};
}

std::string_view obstacle_of(const Row& row, const Cpu& cpu) {
  for (const Need& need : row.needs) {
    if (!(cpu.*need.feature)) return need.obstacle;
  }
  return {};
}

}  // namespace

std::vector<KernelFit> fit_kernels(const Cpu& cpu) {
  std::vector<KernelFit> fits;
  std::vector<KernelFit> slower;  // than the next row that can run
  std::vector<KernelFit> impossible;
  for (const Row& row : rows_of(cpu.architecture)) {
    const KernelFit fit{row.name, obstacle_of(row, cpu)};
    if (!fit.obstacle.empty()) {
      impossible.push_back(fit);
    } else if (!row.is_faster(cpu)) {
      slower.push_back(fit);
    } else {
      fits.push_back(fit);
      fits.insert(fits.end(), slower.begin(), slower.end());
      slower.clear();
    }
  }
  fits.insert(fits.end(), impossible.begin(), impossible.end());
  return fits;
}

std::string_view base_of_kernels(std::string_view name) {
  for (const std::span<const Row> rows : {std::span<const Row>(kRows), std::span<const Row>(kArmRows)}) {
    const auto found = std::ranges::find(rows, name, &Row::name);
    if (found != rows.end()) return found->base;
  }
  return {};
}

std::string kernels_problem(std::string_view name, std::span<const KernelFit> fits) {
  if (std::ranges::none_of(fits, [](const KernelFit& fit) { return fit.obstacle.empty(); })) {
    return "this build has no kernels that this CPU can run; build with -D ADAPTRT_KERNEL_TABLES=all";
  }
  const auto found = std::ranges::find(fits, name, &KernelFit::name);
  if (name.empty() || (found != fits.end() && found->obstacle.empty())) return {};
  std::string problem = "kernels is '" + std::string(name) + "'";
  if (found != fits.end()) problem.append(", but ").append(found->obstacle);
  std::string_view separator = "; this CPU can run: ";
  for (const KernelFit& fit : fits) {
    if (!fit.obstacle.empty()) continue;
    problem.append(separator).append(fit.name);
    separator = ", ";
  }
  return problem;
}

}  // namespace adaptrt
