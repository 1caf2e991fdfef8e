#include <algorithm>
#include <array>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/cpu/kernel_choice.h"
#include "adaptrt/cpu/kernel_table.h"
#include "tables.h"

namespace adaptrt {
namespace {

struct NamedTable {
  std::string_view name;
  /// Must be called only if the CPU can run the table.
  const KernelTable& (*table)();
};

constexpr auto kTables = std::to_array<NamedTable>({
#ifdef ADAPTRT_TABLE_avx512_amx
    {"avx512_amx", &avx512_amx_kernels},
#endif
#ifdef ADAPTRT_TABLE_avx512_bf16
    {"avx512_bf16", &avx512_bf16_kernels},
#endif
#ifdef ADAPTRT_TABLE_avx512_vnni
    {"avx512_vnni", &avx512_vnni_kernels},
#endif
#ifdef ADAPTRT_TABLE_avx512
    {"avx512", &avx512_kernels},
#endif
#ifdef ADAPTRT_TABLE_avx2
    {"avx2", &avx2_kernels},
#endif
#ifdef ADAPTRT_TABLE_neon_bf16
    {"neon_bf16", &neon_bf16_kernels},
#endif
#ifdef ADAPTRT_TABLE_neon_i8mm
    {"neon_i8mm", &neon_i8mm_kernels},
#endif
#ifdef ADAPTRT_TABLE_neon_dotprod
    {"neon_dotprod", &neon_dotprod_kernels},
#endif
#ifdef ADAPTRT_TABLE_neon
    {"neon", &neon_kernels},
#endif
#ifdef ADAPTRT_TABLE_portable
    {"portable", &portable_kernels},
#endif
});

const NamedTable* find_table(std::string_view name) {
  const auto* found = std::ranges::find(kTables, name, &NamedTable::name);
  return found == kTables.end() ? nullptr : found;
}

/// Returns fit_kernels() of this CPU without the tables that were not compiled.
std::vector<KernelFit> fit_tables() {
  auto fits = fit_kernels(read_cpu());
  std::erase_if(fits,
                [](const KernelFit& fit) { return fit.obstacle.empty() && find_table(fit.name) == nullptr; });
  return fits;
}

const std::vector<KernelFit>& fits() {
  static const std::vector<KernelFit> all = fit_tables();
  return all;
}

std::vector<const KernelTable*> find_available() {
  std::vector<const KernelTable*> tables;
  for (const KernelFit& fit : fits()) {
    if (fit.obstacle.empty()) tables.push_back(&find_table(fit.name)->table());
  }
  return tables;
}

}  // namespace

std::span<const KernelTable* const> available_kernels() {
  static const std::vector<const KernelTable*> tables = find_available();
  return tables;
}

std::span<const KernelFit> impossible_kernels() {
  return std::span(fits()).subspan(available_kernels().size());
}

std::string kernels_problem(std::string_view name) {
  return kernels_problem(name, fits());
}

const KernelTable& find_kernels(std::string_view name) {
  if (auto problem = kernels_problem(name); !problem.empty()) throw ConfigError(std::move(problem));
  return name.empty() ? *available_kernels().front() : find_table(name)->table();
}

}  // namespace adaptrt
