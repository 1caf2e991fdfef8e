#include <cstddef>

#include "adaptrt/cpu/amx.h"
#include "adaptrt/cpu/kernel_choice.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace adaptrt {
namespace {

#ifdef __x86_64__

CpuVendor read_vendor() {
  if (__builtin_cpu_is("intel")) return CpuVendor::kIntel;
  return __builtin_cpu_is("amd") ? CpuVendor::kAmd : CpuVendor::kOther;
}

int read_family() {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return 0;
  constexpr unsigned kExtended = 0xf;
  const unsigned family = (eax >> 8) & 0xf;
  return static_cast<int>(family == kExtended ? family + ((eax >> 20) & 0xff) : family);
}

#elif defined(__aarch64__) && defined(__APPLE__)

bool has_feature(const char* name) {
  int value = 0;
  std::size_t size = sizeof(value);
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}

#endif

}  // namespace

Cpu read_cpu() {
  Cpu cpu;
#if defined(__x86_64__)
  __builtin_cpu_init();
  cpu.vendor = read_vendor();
  cpu.family = read_family();
  cpu.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  cpu.avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  cpu.avx512_vnni = __builtin_cpu_supports("avx512vnni");
  cpu.avx512_bf16 = __builtin_cpu_supports("avx512bf16");
  cpu.avx512_vbmi = __builtin_cpu_supports("avx512vbmi");
  cpu.amx = cpu_has_amx();
  cpu.amx_permitted = amx_is_permitted();
#elif defined(__aarch64__)
  cpu.architecture = CpuArchitecture::kArm;
#if defined(__linux__)
  cpu.neon_dotprod = (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
  cpu.neon_i8mm = (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0;
  cpu.neon_bf16 = (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0;
#elif defined(__APPLE__)
  cpu.neon_dotprod = has_feature("hw.optional.arm.FEAT_DotProd");
  cpu.neon_i8mm = has_feature("hw.optional.arm.FEAT_I8MM");
  cpu.neon_bf16 = has_feature("hw.optional.arm.FEAT_BF16");
#endif
#else
  cpu.architecture = CpuArchitecture::kOther;
#endif
  return cpu;
}

}  // namespace adaptrt
