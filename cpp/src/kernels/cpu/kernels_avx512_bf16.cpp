#include "simd_avx512.h"
// The order matters: what follows is written in terms of the instruction set above.
#include "activations.h"
#include "attention.h"
#include "coded_gemm.h"
#include "compressed_gemm.h"
#include "elementwise.h"
#include "gemm.h"
#include "int8_gemm.h"
#include "quantized_gemm.h"
#include "sparse_gemm.h"
#include "tables.h"

namespace adaptrt {
namespace {

/// avx512_vnni's kernels, but for those that multiply bfloat16 or round to it, or fetch otherwise.
KernelTable make_bfloat16_table() {
  constexpr auto kBFloat16 = static_cast<std::size_t>(DType::kBFloat16);
  KernelTable table = avx512_vnni_kernels();
  table.name = "avx512_bf16";
  table.gemm[kBFloat16] = &gemm_panel<BFloat16Weights>;
  table.compressed_gemm = compressed_gemm_of<BFloat16Weights>();
  table.coded_gemm[kBFloat16] = coded_gemm_of<CodedBFloat16>();
  table.expand_coded[kBFloat16] = &expand_coded<CodedBFloat16>;
  table.gathered_gemm[kBFloat16] = gathered_gemm_of<BFloat16Weights>();
  table.sparse_gemm[kBFloat16] = &sparse_gemm<BFloat16Weights>;
  table.quantized_gemm[kBFloat16] = &quantized_gemm<BFloat16Weights>;
  table.expand_panel[kBFloat16] = &expand_panel<BFloat16Weights>;
  table.int8_gemm = &int8_gemm;
  table.rms_norm = &rms_norm;
  table.layer_norm = &layer_norm;
  table.silu = &activate<Silu>;
  table.gelu = &activate<Gelu>;
  table.gelu_tanh = &activate<GeluTanh>;
  table.relu = &activate<Relu>;
  table.relu_mul = &relu_mul<false>;
  table.relu_mul_relu = &relu_mul<true>;
  table.clamped_silu_mul = &clamped_silu_mul;
  table.scale_and_store = &scale_and_store;
  table.rotate_heads = &rotate_heads;
  table.store_bfloat16_pairs = &store_bfloat16_pairs;
  table.attend[kBFloat16] = &attend<BFloat16Weights>;
  table.finish_attention = &finish_attention;
  return table;
}

}  // namespace

const KernelTable& avx512_bf16_kernels() {
  static const KernelTable table = make_bfloat16_table();
  return table;
}

}  // namespace adaptrt
