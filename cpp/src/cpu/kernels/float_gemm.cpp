#include ADAPTRT_SIMD
// The order matters: the headers below use the Simd of the header above.
#include "codebook_gemm.h"
#include "column_gemm.h"
#include "families.h"
#include "gemm.h"
#include "sparse_gemm.h"

namespace adaptrt {

namespace {

template <class Weights, class Codebook>
void register_type(KernelTable* table) {
  constexpr auto kType = static_cast<std::size_t>(Codebook::kType);
  table->gemm[kType] = &gemm_panel<Weights>;
  table->codebook_gemm[kType] = codebook_gemm_of<Codebook>();
  table->codebook_rows[kType] = codebook_rows_of<Codebook>();
  table->expand_codebook[kType] = &expand_codebook<Codebook>;
  table->sparse_gemm[kType] = &sparse_gemm<Weights>;
  table->column_gemm[kType] = &column_gemm<Weights>;
  table->sparse_rows[kType] = kSparseRows;
}

}  // namespace

/// Products of float32 activations with panels of float32 and of float16.
void ADAPTRT_KERNEL_SET::register_float_gemm(KernelTable* table) {
  register_type<Float32Weights, CodebookFloat32>(table);
  register_type<Float16Weights, CodebookFloat16>(table);
  table->gather_outputs = &gather_outputs;
  table->gathered_gemm[static_cast<std::size_t>(DType::kFloat32)] = gathered_gemm_of<Float32Weights>();
}

}  // namespace adaptrt
