#pragma once

#include <cstdint>

#include "cuda/kernels/platform.h"
#include "cuda/kernels/types.h"
#ifndef __CUDACC__
#include "emulation/wgmma_emulated.h"
#endif

namespace adaptrt::cuda {

/// Operand of wgmma in shared memory, in the copy engine's 128-byte swizzle. The fields follow PTX's "matrix
/// descriptor format" and "strides" for asynchronous warpgroup products (9.7.15.5.1.2):
///  - bits 0-13: the address of the first element, in units of 16 bytes. The swizzle exchanges bits of the
///    computed address, so columns within a row are skipped by adding their bytes.
///  - bits 16-29: the leading dimension's offset. With a swizzle, operands whose rows are outputs (K-major)
///    do not use it. In transposed ones (MN-major) it is the distance to the next 64 columns, and no
///    instruction here has more than 64.
///  - bits 32-45: the stride dimension's offset, from 8 rows of 128 bytes to the next 8. Rows of K-major
///    operands are outputs. Rows of MN-major ones are terms of the sums, of which an instruction adds 16.
///  - bits 49-51: 0, because the swizzle's pattern begins at a multiple of 1024 bytes.
///  - bits 62-63: 1, the 128-byte swizzle.
/// `address` is the first row's, a multiple of 1024, plus 2 bytes for each skipped column.
__device__ inline std::uint64_t matrix_descriptor(std::uint32_t address) {
  constexpr std::uint64_t kSwizzle128 = 1ULL << 62;
  constexpr std::uint64_t kEightRows = 1024;
  return (address & 0x3ffffU) >> 4 | 1ULL << 16 | (kEightRows >> 4) << 32 | kSwizzle128;
}

/// The descriptor of an operand that is `bytes` further in shared memory.
__device__ inline std::uint64_t advanced(std::uint64_t descriptor, std::uint32_t bytes) {
  // An address has no carry into the next field, and 32 bits are added faster than 64.
  const std::uint32_t low = static_cast<std::uint32_t>(descriptor) + (bytes >> 4);
  return descriptor >> 32 << 32 | low;
}

#ifdef __CUDACC__

/// Orders register accesses before the warpgroup's next wgmma.
__device__ inline void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" : : : "memory");
}

__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory");
}

/// Waits until at most the `kPending` latest groups of wgmma are still running.
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(kPending) : "memory");
}

/// Between a wait for a product and the use of its registers: prevents that the compiler moves the use up.
template <int kCount>
__device__ inline void keep_behind_wait(float (&d)[kCount]) {
  ADAPTRT_UNROLL
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i]) : : "memory");
}

/// Warpgroup: d[64, kTokens] = weights[64, 16] x[kTokens, 16]^T, plus d if `accumulate`, summed in float32.
/// For each 8 columns, thread t of warp w holds row 16 w + t / 4 at columns 2 (t % 4) and the next, then row
/// 16 w + t / 4 + 8.
template <typename T, int kTokens>
struct Wgmma;

/// Warpgroup: d[64, kColumns] = a[64, 16] b[16, kColumns], plus d if `accumulate`, summed in float32. A
/// thread holds of a and d what it holds in mma_16x8x16, for rows 16 w to 16 w + 15 in warp w. b has a row in
/// shared memory for each of its 16 rows (it is MN-major), and at most 64 columns.
template <typename T, int kColumns>
struct WgmmaOfRegisters;

// The instruction names each register. These macros list the registers and their operands:
// clang-format off
#define ADAPTRT_REGISTERS_4 \
  "%0, %1, %2, %3"
#define ADAPTRT_OPERANDS_4 \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define ADAPTRT_REGISTERS_8 ADAPTRT_REGISTERS_4 ", " \
  "%4, %5, %6, %7"
#define ADAPTRT_OPERANDS_8 ADAPTRT_OPERANDS_4, \
  "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define ADAPTRT_REGISTERS_16 ADAPTRT_REGISTERS_8 ", " \
  "%8, %9, %10, %11, %12, %13, %14, %15"
#define ADAPTRT_OPERANDS_16 ADAPTRT_OPERANDS_8, \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),  \
  "+f"(d[15])
#define ADAPTRT_REGISTERS_32 ADAPTRT_REGISTERS_16 ", " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define ADAPTRT_OPERANDS_32 ADAPTRT_OPERANDS_16, \
  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]),  \
  "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),  \
  "+f"(d[30]), "+f"(d[31])
#define ADAPTRT_REGISTERS_24 ADAPTRT_REGISTERS_16 ", " \
  "%16, %17, %18, %19, %20, %21, %22, %23"
#define ADAPTRT_OPERANDS_24 ADAPTRT_OPERANDS_16, \
  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]),  \
  "+f"(d[23])
#define ADAPTRT_REGISTERS_64 ADAPTRT_REGISTERS_32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, " \
  "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define ADAPTRT_OPERANDS_64 ADAPTRT_OPERANDS_32, \
  "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]),  \
  "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]),  \
  "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]),  \
  "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]),  \
  "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define ADAPTRT_REGISTERS_128 ADAPTRT_REGISTERS_64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, " \
  "%83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, " \
  "%101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, " \
  "%117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define ADAPTRT_OPERANDS_128 ADAPTRT_OPERANDS_64, \
  "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]),  \
  "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]),  \
  "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]),  \
  "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]),  \
  "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), "+f"(d[96]), "+f"(d[97]), "+f"(d[98]),  \
  "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), "+f"(d[104]),  \
  "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]),  \
  "+f"(d[111]), "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]),  \
  "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), "+f"(d[120]), "+f"(d[121]), "+f"(d[122]),  \
  "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
// clang-format on

#define ADAPTRT_WGMMA(Type, name, tokens, count, weights_operand, x_operand, accumulate_operand)             \
  template <>                                                                                                \
  struct Wgmma<Type, tokens> {                                                                               \
    static __device__ void run(float (&d)[count], std::uint64_t weights, std::uint64_t x, bool accumulate) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " accumulate_operand                                    \
                   ", 0;\nwgmma.mma_async.sync.aligned.m64n" #tokens "k16.f32." name "." name                \
                   " {" ADAPTRT_REGISTERS_##count "}, " weights_operand ", " x_operand ", p, 1, 1, 0, 0;\n}" \
                   : ADAPTRT_OPERANDS_##count                                                                \
                   : "l"(weights), "l"(x), "r"(static_cast<std::int32_t>(accumulate)));                      \
    }                                                                                                        \
  };

ADAPTRT_WGMMA(Half, "f16", 8, 4, "%4", "%5", "%6")
ADAPTRT_WGMMA(Half, "f16", 16, 8, "%8", "%9", "%10")
ADAPTRT_WGMMA(Half, "f16", 32, 16, "%16", "%17", "%18")
ADAPTRT_WGMMA(Half, "f16", 48, 24, "%24", "%25", "%26")
ADAPTRT_WGMMA(Half, "f16", 64, 32, "%32", "%33", "%34")
ADAPTRT_WGMMA(Half, "f16", 128, 64, "%64", "%65", "%66")
ADAPTRT_WGMMA(Half, "f16", 256, 128, "%128", "%129", "%130")
ADAPTRT_WGMMA(BFloat16, "bf16", 8, 4, "%4", "%5", "%6")
ADAPTRT_WGMMA(BFloat16, "bf16", 16, 8, "%8", "%9", "%10")
ADAPTRT_WGMMA(BFloat16, "bf16", 32, 16, "%16", "%17", "%18")
ADAPTRT_WGMMA(BFloat16, "bf16", 48, 24, "%24", "%25", "%26")
ADAPTRT_WGMMA(BFloat16, "bf16", 64, 32, "%32", "%33", "%34")
ADAPTRT_WGMMA(BFloat16, "bf16", 128, 64, "%64", "%65", "%66")
ADAPTRT_WGMMA(BFloat16, "bf16", 256, 128, "%128", "%129", "%130")

#define ADAPTRT_WGMMA_OF_REGISTERS(Type, name, columns, count, a_operands, b_operand, accumulate_operand) \
  template <>                                                                                             \
  struct WgmmaOfRegisters<Type, columns> {                                                                \
    static __device__ void run(float (&d)[count], const std::uint32_t (&a)[4], std::uint64_t b,           \
                               bool accumulate) {                                                         \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " accumulate_operand                                 \
                   ", 0;\nwgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." name "." name            \
                   " {" ADAPTRT_REGISTERS_##count "}, {" a_operands "}, " b_operand ", p, 1, 1, 1;\n}"    \
                   : ADAPTRT_OPERANDS_##count                                                             \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                                  \
                     "r"(static_cast<std::int32_t>(accumulate)));                                         \
    }                                                                                                     \
  };

ADAPTRT_WGMMA_OF_REGISTERS(Half, "f16", 32, 16, "%16, %17, %18, %19", "%20", "%21")
ADAPTRT_WGMMA_OF_REGISTERS(Half, "f16", 64, 32, "%32, %33, %34, %35", "%36", "%37")
ADAPTRT_WGMMA_OF_REGISTERS(BFloat16, "bf16", 32, 16, "%16, %17, %18, %19", "%20", "%21")
ADAPTRT_WGMMA_OF_REGISTERS(BFloat16, "bf16", 64, 32, "%32, %33, %34, %35", "%36", "%37")

#undef ADAPTRT_WGMMA_OF_REGISTERS
#undef ADAPTRT_WGMMA
#undef ADAPTRT_REGISTERS_4
#undef ADAPTRT_OPERANDS_4
#undef ADAPTRT_REGISTERS_8
#undef ADAPTRT_OPERANDS_8
#undef ADAPTRT_REGISTERS_16
#undef ADAPTRT_OPERANDS_16
#undef ADAPTRT_REGISTERS_32
#undef ADAPTRT_OPERANDS_32
#undef ADAPTRT_REGISTERS_24
#undef ADAPTRT_OPERANDS_24
#undef ADAPTRT_REGISTERS_64
#undef ADAPTRT_OPERANDS_64
#undef ADAPTRT_REGISTERS_128
#undef ADAPTRT_OPERANDS_128

#endif

}  // namespace adaptrt::cuda
