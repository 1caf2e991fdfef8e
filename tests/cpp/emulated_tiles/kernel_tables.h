#pragma once

#include <boost/test/data/monomorphic.hpp>
#include <string>
#include <utility>
#include <vector>

#include "adaptrt/cpu/kernel_table.h"
#include "emulated_tiles/kernels.h"

namespace adaptrt::testing {

/// Returns every table that this CPU can run, and the emulated one.
inline std::vector<const KernelTable*> all_kernel_tables() {
  const auto available = available_kernels();
  std::vector<const KernelTable*> tables(available.begin(), available.end());
  tables.push_back(&emulated_amx_kernels());
  return tables;
}

/// Returns their names, as a dataset.
inline auto kernel_tables() {
  std::vector<std::string> names;
  for (const auto* table : all_kernel_tables()) names.emplace_back(table->name);
  return boost::unit_test::data::make(std::move(names));
}

inline const KernelTable& kernel_table(const std::string& name) {
  return name == emulated_amx_kernels().name ? emulated_amx_kernels() : find_kernels(name);
}

}  // namespace adaptrt::testing
