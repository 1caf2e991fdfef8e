#pragma once

#include "adaptrt/cpu/kernel_table.h"

namespace adaptrt::testing {

/// Returns the AMX kernels compiled for any CPU, with emulated tiles.
const KernelTable& emulated_amx_kernels();

}  // namespace adaptrt::testing
