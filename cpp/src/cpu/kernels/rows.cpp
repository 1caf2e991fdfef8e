#include ADAPTRT_SIMD
// The order matters: the headers below use the Simd of the header above.
#include "activations.h"
#include "elementwise.h"
#include "families.h"
#include "recurrences.h"

namespace adaptrt {

/// Kernels for the elements of rows.
void ADAPTRT_KERNEL_SET::register_rows(KernelTable* table) {
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
