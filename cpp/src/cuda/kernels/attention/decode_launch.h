#pragma once

#include <cstdint>

#include "cuda/kernels/attention/decode_kernel.h"
#include "cuda/kernels/attention/instantiate.h"

namespace adaptrt::cuda {

/// Launches Decode. row_tiles: blocks that share a KV head.
template <KvFormat kFormat>
void launch_decode_of(const AttentionStep& step, const Splits& splits, std::int32_t row_tiles, bool rotates,
                      DType dtype, void* stream) {
  with_element_type(dtype, [&]<typename T>(TypeTag<T>) {
    with_head_dim(step.head_dim, [&]<int kHeadDim>(IntegerTag<kHeadDim>) {
      using Kernel = Decode<T, kHeadDim, kFormat>;
      launch<Kernel>({.x = static_cast<std::uint32_t>(splits.lanes),
                      .y = static_cast<std::uint32_t>(step.num_kv_heads * row_tiles),
                      .z = static_cast<std::uint32_t>(step.sequences),
                      .shared_bytes = Kernel::shared_bytes(),
                      .overlaps_previous = true},
                     {step, splits, row_tiles, rotates}, stream);
    });
  });
}

/// The same of int8 pools, in a source of its own because these kernels take long to compile.
void launch_int8_decode(const AttentionStep& step, const Splits& splits, std::int32_t row_tiles, bool rotates,
                        DType dtype, void* stream);

}  // namespace adaptrt::cuda
