#include ADAPTRT_SIMD
// The order matters: the headers below use the Simd of the header above.
#include "activations.h"
#include "attention.h"
#include "codebook_gemm.h"
#include "compressed_gemm.h"
#include "compressed_matrix_gemm.h"
#include "elementwise.h"
#include "families.h"
#include "int8_gemm.h"
#include "quantized_gemm.h"
#include "recurrences.h"
#include "w4a8_gemm.h"

namespace adaptrt {

/// Kernels for the elements of rows, and those that expand panels to bfloat16. Tables with tile registers
/// have these too.
void ADAPTRT_KERNEL_SET::register_rows(KernelTable* table) {
  constexpr auto kBFloat16 = static_cast<std::size_t>(DType::kBFloat16);
  table->expand_compressed = &expand_compressed;
  table->expand_matrix_panel = &expand_panel_of_matrix;
  table->expand_codebook[kBFloat16] = &expand_codebook<CodebookBFloat16>;
  table->expand_panel[kBFloat16] = &expand_panel<BFloat16Weights>;
  table->finish_attention = &finish_attention;
  table->quantize_row = &quantize_row;
  table->arrange_int8_row = &arrange_int8_row;
  table->rms_norm = &rms_norm;
  table->layer_norm = &layer_norm;
  table->add = &add;
  table->multiply = &multiply;
  table->add_up_rows = &add_up_rows;
  table->scatter_rows = &scatter_rows;
  table->scale_and_store = &scale_and_store;
  table->rotate_heads = &rotate_heads;
  table->store_bfloat16_pairs = &store_bfloat16_pairs;
  table->are_finite = &are_finite;
  table->exp = &exp_array;
  table->softcap = &softcap;
  table->silu = &activate<Silu>;
  table->gelu = &activate<Gelu>;
  table->gelu_tanh = &activate<GeluTanh>;
  table->relu = &activate<Relu>;
  table->relu_squared = &activate<ReluSquared>;
  table->relu_mul = &relu_mul<false>;
  table->relu_mul_relu = &relu_mul<true>;
  table->close_gates = &close_gates;
  table->clamped_silu_mul = &clamped_silu_mul;
  table->multiply_by_sigmoid = &multiply_by_sigmoid;
  table->causal_convolution = &causal_convolution;
  table->gated_delta = &gated_delta;
  table->gated_convolution = &gated_convolution;
  table->selective_scan = &selective_scan;
  table->xielu = &xielu;
}

}  // namespace adaptrt
