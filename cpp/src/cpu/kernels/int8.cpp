#include ADAPTRT_SIMD
// The order matters: the headers below use the Simd of the header above.
#include "families.h"
#include "int16_gemm.h"
#include "int8_gemm.h"
#include "w4a8_gemm.h"

namespace adaptrt {

/// Products of integers.
void ADAPTRT_KERNEL_SET::register_int8(KernelTable* table) {
  table->int8_gemm = &int8_gemm;
  table->w4a8_gemm = &w4a8_gemm;
#if !defined(__AVX512BF16__) && !defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  // Instructions for products of bfloat16 are faster than those for 16-bit integers.
  table->int16_gemm = &int16_gemm;
  table->round_to_int16 = &round_to_int16;
#endif
}

}  // namespace adaptrt
