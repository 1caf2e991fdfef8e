#include <string>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/kernels/amx.h"
#include "adaptrt/kernels/kernel_table.h"
#include "tables.h"

namespace adaptrt {
namespace {

std::vector<const KernelTable*> find_available() {
  std::vector<const KernelTable*> tables;
#ifdef ADAPTRT_X86_KERNELS
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  const bool bf16 = vnni && __builtin_cpu_supports("avx512bf16");
  if (bf16 && amx_is_permitted()) tables.push_back(&avx512_amx_kernels());
  if (vnni && __builtin_cpu_supports("avx512bf16")) tables.push_back(&avx512_bf16_kernels());
  if (vnni) tables.push_back(&avx512_vnni_kernels());
  if (avx512) tables.push_back(&avx512_kernels());
  // Every CPU with AVX2 has the half-float conversions (F16C).
  if (avx2) tables.push_back(&avx2_kernels());
#endif
  tables.push_back(&portable_kernels());
  return tables;
}

}  // namespace

std::span<const KernelTable* const> available_kernels() {
  static const std::vector<const KernelTable*> tables = find_available();
  return tables;
}

const KernelTable& find_kernels(std::string_view name) {
  const auto tables = available_kernels();
  if (name.empty()) return *tables.front();
  std::string names;
  for (const auto* table : tables) {
    if (table->name == name) return *table;
    names.append(names.empty() ? "" : ", ").append(table->name);
  }
  throw ConfigError("kernels '" + std::string(name) + "' cannot run on this CPU; it can run: " + names);
}

}  // namespace adaptrt
