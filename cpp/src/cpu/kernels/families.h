#pragma once

#include "adaptrt/cpu/kernel_table.h"

// A family of kernels is one source, compiled for each instruction set that has its own of them: with
// ADAPTRT_SIMD, the header of its Simd, into the namespace ADAPTRT_KERNEL_SET. Each puts its kernels into a
// table. CMakeLists.txt has which families of which sets there are.

namespace adaptrt {

namespace portable {
void put_float_gemm(KernelTable* table);
void put_bfloat16_gemm(KernelTable* table);
void put_float_quantized(KernelTable* table);
void put_bfloat16_quantized(KernelTable* table);
void put_int8(KernelTable* table);
void put_float_attention(KernelTable* table);
void put_bfloat16_attention(KernelTable* table);
void put_rows(KernelTable* table);
}  // namespace portable

namespace avx2 {
void put_float_gemm(KernelTable* table);
void put_bfloat16_gemm(KernelTable* table);
void put_float_quantized(KernelTable* table);
void put_bfloat16_quantized(KernelTable* table);
void put_int8(KernelTable* table);
void put_float_attention(KernelTable* table);
void put_bfloat16_attention(KernelTable* table);
void put_rows(KernelTable* table);
}  // namespace avx2

namespace avx512 {
void put_float_gemm(KernelTable* table);
void put_bfloat16_gemm(KernelTable* table);
void put_float_quantized(KernelTable* table);
void put_bfloat16_quantized(KernelTable* table);
void put_int8(KernelTable* table);
void put_float_attention(KernelTable* table);
void put_bfloat16_attention(KernelTable* table);
void put_rows(KernelTable* table);
}  // namespace avx512

/// Nothing but Simd::dot differs from avx512's.
namespace avx512_vnni {
void put_int8(KernelTable* table);
}  // namespace avx512_vnni

/// What multiplies bfloat16 or rounds to it, or fetches otherwise.
namespace avx512_bf16 {
void put_bfloat16_gemm(KernelTable* table);
void put_bfloat16_quantized(KernelTable* table);
void put_int8(KernelTable* table);
void put_bfloat16_attention(KernelTable* table);
void put_rows(KernelTable* table);
}  // namespace avx512_bf16

}  // namespace adaptrt
