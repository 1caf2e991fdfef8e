#include "adaptrt/cpu/amx.h"

#if defined(__x86_64__) && defined(__linux__)
#define ADAPTRT_CAN_HAVE_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace adaptrt {
namespace {

#ifdef ADAPTRT_CAN_HAVE_AMX

/// Linux saves the 8 KB of tiles only for processes that asked. An old kernel or a sandbox refuses.
bool ask_linux() {
  constexpr long kArchReqXcompPerm = 0x1023;
  constexpr long kXfeatureXtiledata = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtiledata) == 0;
}

#endif

bool find_permission() {
#ifdef ADAPTRT_CAN_HAVE_AMX
  return cpu_has_amx() && ask_linux();
#else
  return false;
#endif
}

}  // namespace

bool cpu_has_amx() {
#ifdef ADAPTRT_CAN_HAVE_AMX
  constexpr unsigned kAmxBf16 = 1U << 22;
  constexpr unsigned kAmxTile = 1U << 24;
  constexpr unsigned kAmxInt8 = 1U << 25;
  constexpr unsigned kAll = kAmxBf16 | kAmxTile | kAmxInt8;
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & kAll) == kAll;
#else
  return false;
#endif
}

bool amx_is_permitted() {
  static const bool permitted = find_permission();
  return permitted;
}

}  // namespace adaptrt
