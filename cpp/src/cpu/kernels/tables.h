#pragma once

#include "adaptrt/cpu/kernel_table.h"

namespace adaptrt {

// One table per instruction set. Must be called only if the CPU can run it.
const KernelTable& portable_kernels();
const KernelTable& avx2_kernels();
const KernelTable& avx512_kernels();
const KernelTable& avx512_vnni_kernels();
const KernelTable& avx512_bf16_kernels();
const KernelTable& avx512_amx_kernels();
/// The kernels of avx512_bf16 that avx512_amx does not replace; the others are missing.
const KernelTable& kernels_beside_tiles();
const KernelTable& neon_kernels();
const KernelTable& neon_dotprod_kernels();
const KernelTable& neon_i8mm_kernels();
const KernelTable& neon_bf16_kernels();

}  // namespace adaptrt
