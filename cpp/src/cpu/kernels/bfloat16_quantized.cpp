#include ADAPTRT_SIMD
// The order matters: the headers below use the Simd of the header above.
#include "families.h"
#include "quantized_gemm.h"

namespace adaptrt {

/// Products of bfloat16 activations with integers.
void ADAPTRT_KERNEL_SET::register_bfloat16_quantized(KernelTable* table) {
  constexpr auto kType = static_cast<std::size_t>(DType::kBFloat16);
  table->quantized_gemm[kType] = &quantized_gemm<BFloat16Weights>;
  table->stretch_inputs[kType] = kStreamedInputs<BFloat16Weights>;
}

}  // namespace adaptrt
