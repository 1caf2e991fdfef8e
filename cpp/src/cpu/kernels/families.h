#pragma once

#include "adaptrt/cpu/kernel_table.h"

// A family of kernels is one source, which is compiled once for each instruction set that needs its own code.
// Each time, ADAPTRT_SIMD is the header that defines Simd, and ADAPTRT_KERNEL_SET is the namespace of the
// result. Each family registers its kernels in a table. families.def lists the families, and CMakeLists.txt
// the sets.

#define ADAPTRT_DECLARE_FAMILY(name) void register_##name(KernelTable* table)

namespace adaptrt {

namespace portable {
#define ADAPTRT_FAMILY(name, operands) ADAPTRT_DECLARE_FAMILY(name);
#include "families.def"
}  // namespace portable

namespace avx2 {
#define ADAPTRT_FAMILY(name, operands) ADAPTRT_DECLARE_FAMILY(name);
#include "families.def"
}  // namespace avx2

namespace avx512 {
#define ADAPTRT_FAMILY(name, operands) ADAPTRT_DECLARE_FAMILY(name);
#include "families.def"
}  // namespace avx512

/// Differs from avx512 only in Simd::dot and Simd::FewBitsDot, which only the int8 family uses.
namespace avx512_vnni {
ADAPTRT_DECLARE_FAMILY(int8);
}  // namespace avx512_vnni

/// Compiled only for the families with bfloat16 operands; the table takes the others from avx512.
namespace avx512_bf16 {
#define ADAPTRT_FAMILY(name, operands) ADAPTRT_DECLARE_FAMILY(name);
#include "families.def"
}  // namespace avx512_bf16

namespace neon {
#define ADAPTRT_FAMILY(name, operands) ADAPTRT_DECLARE_FAMILY(name);
#include "families.def"
}  // namespace neon

/// Differ from neon only in Simd::dot and Simd::FewBitsDot, which only the int8 family uses.
namespace neon_dotprod {
ADAPTRT_DECLARE_FAMILY(int8);
}  // namespace neon_dotprod
namespace neon_i8mm {
ADAPTRT_DECLARE_FAMILY(int8);
}  // namespace neon_i8mm

/// Compiled only for the families with bfloat16 operands; the table takes the others from neon.
namespace neon_bf16 {
#define ADAPTRT_FAMILY(name, operands) ADAPTRT_DECLARE_FAMILY(name);
#include "families.def"
}  // namespace neon_bf16

}  // namespace adaptrt
