#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace adaptrt {

enum class CpuVendor : std::uint8_t { kIntel, kAmd, kOther };

enum class CpuArchitecture : std::uint8_t { kX86, kArm, kOther };

/// The facts that determine the choice of kernels. AVX features count only if CPU, hypervisor and operating
/// system all allow them; AMX also needs a permission. The CPU model is not used: no table needs it, and
/// hypervisors fake it.
struct Cpu {
  CpuArchitecture architecture = CpuArchitecture::kX86;
  CpuVendor vendor = CpuVendor::kOther;
  int family = 0;       ///< includes the extended family; AMD's Zen 3 and Zen 4 are 0x19
  bool avx2 = false;    ///< includes FMA; every CPU with both also has half-float conversions (F16C)
  bool avx512 = false;  ///< F, BW, VL and DQ
  bool avx512_vnni = false;
  bool avx512_bf16 = false;
  bool avx512_vbmi = false;
  bool amx = false;            ///< TILE, BF16 and INT8
  bool amx_permitted = false;  ///< Linux permits it for this process
  // 64-bit Arm, where every CPU has NEON.
  bool neon_dotprod = false;  ///< FEAT_DotProd
  bool neon_i8mm = false;     ///< FEAT_I8MM
  bool neon_bf16 = false;     ///< FEAT_BF16
};

/// Reads this machine's CPU; requests the AMX permission from Linux if the CPU has AMX.
[[nodiscard]] Cpu read_cpu();

/// One table of kernels on one CPU.
struct KernelFit {
  std::string_view name;
  /// Reason why the CPU cannot run it; empty if it can.
  std::string_view obstacle;
};

/// Returns every table of kernels for the architecture of `cpu` once. Tables that `cpu` can run come first,
/// fastest first; the first is chosen. The order depends only on the CPU and never on timings, because
/// results depend on the choice.
[[nodiscard]] std::vector<KernelFit> fit_kernels(const Cpu& cpu);

/// Returns the name of the table whose kernels table `name` has where its own instructions bring nothing.
/// Empty if all kernels are its own.
[[nodiscard]] std::string_view base_of_kernels(std::string_view name);

/// Returns an error that says why `name` is unavailable among `fits` and which names are available. Empty if
/// it is available, or if `name` is empty and any table is.
[[nodiscard]] std::string kernels_problem(std::string_view name, std::span<const KernelFit> fits);
/// The same on this machine.
[[nodiscard]] std::string kernels_problem(std::string_view name);

/// Returns the tables that this CPU cannot run, with reasons.
[[nodiscard]] std::span<const KernelFit> impossible_kernels();

}  // namespace adaptrt
