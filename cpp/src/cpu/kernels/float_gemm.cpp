#include ADAPTRT_SIMD
// The order matters: what follows is written in terms of the instruction set above.
#include "coded_gemm.h"
#include "column_gemm.h"
#include "families.h"
#include "gemm.h"
#include "sparse_gemm.h"

namespace adaptrt {

namespace {

template <class Weights, class Coded>
void put_type(KernelTable* table) {
  constexpr auto kType = static_cast<std::size_t>(Coded::kType);
  table->gemm[kType] = &gemm_panel<Weights>;
  table->coded_gemm[kType] = coded_gemm_of<Coded>();
  table->coded_rows[kType] = coded_rows_of<Coded>();
  table->expand_coded[kType] = &expand_coded<Coded>;
  table->sparse_gemm[kType] = &sparse_gemm<Weights>;
  table->column_gemm[kType] = &column_gemm<Weights>;
  table->sparse_rows[kType] = kSparseRows;
}

}  // namespace

/// Products of float32 activations with panels of float32 and of float16.
void ADAPTRT_KERNEL_SET::register_float_gemm(KernelTable* table) {
  put_type<Float32Weights, CodedFloat32>(table);
  put_type<Float16Weights, CodedFloat16>(table);
  table->gather_outputs = &gather_outputs;
  table->gathered_gemm[static_cast<std::size_t>(DType::kFloat32)] = gathered_gemm_of<Float32Weights>();
}

}  // namespace adaptrt
