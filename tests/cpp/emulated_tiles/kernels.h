#pragma once

#include "adaptrt/kernels/kernel_table.h"

namespace adaptrt::testing {

/// The kernels for tile registers, compiled for any CPU over emulated ones.
const KernelTable& emulated_amx_kernels();

}  // namespace adaptrt::testing
