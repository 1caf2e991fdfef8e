#include <cudaTypedefs.h>

#include <string>

#include "adaptrt/core/error.h"
#include "cuda/kernels/hopper/tensor_map.h"
#include "cuda/kernels/launch.h"

namespace adaptrt::cuda {
namespace {

/// The driver's function. The CUDA runtime finds it without linking to the driver.
PFN_cuTensorMapEncodeTiled_v12000 find_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
  throw_on_cuda_error(
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
      "cuTensorMapEncodeTiled");
#else
  throw_on_cuda_error(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found),
                      "cuTensorMapEncodeTiled");
#endif
  if (found != cudaDriverEntryPointSuccess) {
    throw StepError("the driver has no cuTensorMapEncodeTiled; expected a driver of CUDA 12.0 or newer");
  }
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
}

}  // namespace

CUtensorMap map_of(DType dtype, const void* matrix, std::int64_t rows, std::int64_t columns, int box_rows) {
  static const auto encode = find_encoder();
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t row_bytes[] = {static_cast<cuuint64_t>(columns) * 2};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t element_strides[] = {1, 1};
  CUtensorMap map;
  const auto type =
      dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const auto result = encode(&map, type, 2, const_cast<void*>(matrix), sizes, row_bytes, box, element_strides,
                             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw StepError("cuTensorMapEncodeTiled of a matrix of " + std::to_string(rows) + " x " +
                    std::to_string(columns) + " failed with error " + std::to_string(result));
  }
  return map;
}

}  // namespace adaptrt::cuda
