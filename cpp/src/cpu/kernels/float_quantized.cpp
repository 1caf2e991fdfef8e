#include ADAPTRT_SIMD
// The order matters: the headers below use the Simd of the header above.
#include "families.h"
#include "quantized_gemm.h"

namespace adaptrt {

/// Products of float32 activations with integers, and settings for activations of all types.
void ADAPTRT_KERNEL_SET::register_float_quantized(KernelTable* table) {
  constexpr auto kType = static_cast<std::size_t>(DType::kFloat32);
  table->quantized_gemm[kType] = &quantized_gemm<Float32Weights>;
  table->expand_panel[kType] = &expand_panel<Float32Weights>;
  table->stretch_inputs[kType] = kStreamedInputs<Float32Weights>;
  table->sum_groups = &sum_groups;
  table->int8_decoded_rows = kInt8DecodedRows;
  table->int4_decoded_rows = kInt4DecodedRows;
}

}  // namespace adaptrt
