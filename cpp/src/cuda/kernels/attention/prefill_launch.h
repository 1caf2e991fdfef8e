#pragma once

#include <cstdint>

#include "cuda/kernels/attention/instantiate.h"
#include "cuda/kernels/attention/prefill_kernel.h"

namespace adaptrt::cuda {

template <KvFormat kFormat>
void launch_prefill_of(const AttentionStep& step, DType dtype, void* stream) {
  with_element_type(dtype, [&]<typename T>(TypeTag<T>) {
    with_head_dim(step.head_dim, [&]<int kHeadDim>(IntegerTag<kHeadDim>) {
      using Kernel = Prefill<T, kHeadDim, kFormat>;
      const std::int32_t tiles = count_tiles<Kernel::kRows>(step);
      launch<Kernel>({.x = static_cast<std::uint32_t>(tiles) * static_cast<std::uint32_t>(step.num_kv_heads),
                      .shared_bytes = Kernel::shared_bytes(),
                      .overlaps_previous = true},
                     step, stream);
    });
  });
}

/// The same of int8 pools, in a source of its own because these kernels take long to compile.
void launch_int8_prefill(const AttentionStep& step, DType dtype, void* stream);

}  // namespace adaptrt::cuda
