#pragma once

// Included by the source of each instruction set, behind its simd_*.h.

#include "activations.h"
#include "adaptrt/kernels/kernel_table.h"
#include "attention.h"
#include "coded_gemm.h"
#include "compressed_gemm.h"
#include "elementwise.h"
#include "gemm.h"
#include "int8_gemm.h"
#include "quantized_gemm.h"
#include "sparse_gemm.h"

namespace adaptrt {
namespace {

/// The table of the instruction set that this is compiled for.
constexpr KernelTable make_table(const char* name) {
  return {name,
          kVectorBlockRows,
          0,
          0,
          nullptr,
          nullptr,
          nullptr,
          {&gemm_panel<Float32Weights>, &gemm_panel<Float16Weights>, &gemm_panel<BFloat16Weights>},
          compressed_gemm_of<BFloat16Weights>(),
          kCanStream<BFloat16Weights> ? kStreamRows : 0,
          &expand_compressed,
          {coded_gemm_of<CodedFloat32>(), coded_gemm_of<CodedFloat16>(), coded_gemm_of<CodedBFloat16>()},
          {coded_rows_of<CodedFloat32>(), coded_rows_of<CodedFloat16>(), coded_rows_of<CodedBFloat16>()},
          {&expand_coded<CodedFloat32>, &expand_coded<CodedFloat16>, &expand_coded<CodedBFloat16>},
          &gather_outputs,
          {gathered_gemm_of<Float32Weights>(), nullptr, gathered_gemm_of<BFloat16Weights>()},
          {&sparse_gemm<Float32Weights>, &sparse_gemm<Float16Weights>, &sparse_gemm<BFloat16Weights>},
          {kSparseRows, kSparseRows, kSparseRows},
          {&quantized_gemm<Float32Weights>, nullptr, &quantized_gemm<BFloat16Weights>},
          {&expand_panel<Float32Weights>, nullptr, &expand_panel<BFloat16Weights>},
          &sum_groups,
          kInt8DecodedRows,
          kInt4DecodedRows,
          &int8_gemm,
          &quantize_row,
          &rms_norm,
          &activate<Silu>,
          &add,
          &multiply,
          &add_up_rows,
          &scale_and_store,
          &rotate_heads,
          &store_bfloat16_pairs,
          &are_finite,
          {&attend<Float32Weights>, &attend<Float16Weights>, &attend<BFloat16Weights>},
          &finish_attention,
          &exp_array,
          &layer_norm,
          &activate<Gelu>,
          &activate<GeluTanh>,
          &softcap,
          &activate<Relu>,
          &relu_mul<false>,
          &relu_mul<true>,
          &clamped_silu_mul};
}

}  // namespace
}  // namespace adaptrt
