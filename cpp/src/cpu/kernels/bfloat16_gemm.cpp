#include ADAPTRT_SIMD
// The order matters: the headers below use the Simd of the header above.
#include "added_products.h"
#include "codebook_gemm.h"
#include "column_gemm.h"
#include "compressed_gemm.h"
#include "compressed_matrix_gemm.h"
#include "families.h"
#include "gemm.h"
#include "sparse_gemm.h"

namespace adaptrt {

/// Products of bfloat16.
void ADAPTRT_KERNEL_SET::register_bfloat16_gemm(KernelTable* table) {
  constexpr auto kType = static_cast<std::size_t>(DType::kBFloat16);
  table->gemm[kType] = &gemm_panel<BFloat16Weights>;
  table->compressed_gemm = compressed_gemm_of<BFloat16Weights>();
  table->compressed_rows = kCanStream<BFloat16Weights> ? kStreamRows : 0;
  table->matrix_panel_gemm = matrix_panel_gemm_of<BFloat16Weights>();
  table->add_products = add_products_of<BFloat16Weights>();
  table->added_rows = table->add_products == nullptr ? 0 : kTileRows;
  table->codebook_gemm[kType] = codebook_gemm_of<CodebookBFloat16>();
  table->codebook_rows[kType] = codebook_rows_of<CodebookBFloat16>();
  table->gathered_gemm[kType] = gathered_gemm_of<BFloat16Weights>();
  table->sparse_gemm[kType] = &sparse_gemm<BFloat16Weights>;
  table->column_gemm[kType] = &column_gemm<BFloat16Weights>;
  table->sparse_rows[kType] = kSparseRows;
}

}  // namespace adaptrt
