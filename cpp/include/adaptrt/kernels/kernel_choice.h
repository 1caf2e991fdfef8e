#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace adaptrt {

enum class CpuVendor : std::uint8_t { kIntel, kAmd, kOther };

/// What the choice of kernels depends on. Features of AVX are those that CPU, hypervisor and system let a
/// program use; AMX is a matter of permission. The model is not among them: no table needs it, and
/// hypervisors make it up.
struct Cpu {
  CpuVendor vendor = CpuVendor::kOther;
  int family = 0;       ///< with the extended family; AMD's Zen 3 and Zen 4 are 0x19
  bool avx2 = false;    ///< with FMA; every CPU that has both has the half-float conversions (F16C)
  bool avx512 = false;  ///< F, BW, VL and DQ
  bool avx512_vnni = false;
  bool avx512_bf16 = false;
  bool avx512_vbmi = false;
  bool amx = false;            ///< TILE, BF16 and INT8
  bool amx_permitted = false;  ///< by Linux, for this process
};

/// This machine's; asks Linux for AMX where the CPU has it.
[[nodiscard]] Cpu read_cpu();

/// One table of kernels on one CPU.
struct KernelFit {
  std::string_view name;
  /// Why the CPU cannot run it; empty: it can.
  std::string_view obstacle;
};

/// Every table of kernels once: those that `cpu` can run, of which the first is chosen, the fastest first,
/// then those that it cannot. A function of the CPU and never of a timing, since results depend on it.
[[nodiscard]] std::vector<KernelFit> fit_kernels(const Cpu& cpu);

/// Why no table of that name is available among `fits`, with those that are; empty when it is, or for an
/// empty name.
[[nodiscard]] std::string kernels_problem(std::string_view name, std::span<const KernelFit> fits);
/// The same on this machine.
[[nodiscard]] std::string kernels_problem(std::string_view name);

/// The tables that this CPU cannot run, with the reasons.
[[nodiscard]] std::span<const KernelFit> impossible_kernels();

}  // namespace adaptrt
