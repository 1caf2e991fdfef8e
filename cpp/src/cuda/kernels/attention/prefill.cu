#include "cuda/kernels/attention/instantiate.h"
#include "cuda/kernels/attention/prefill.h"
#include "cuda/kernels/attention/prefill_kernel.h"

namespace adaptrt::cuda {

void launch_prefill(const AttentionStep& step, DType dtype, void* stream) {
  with_element_type(dtype, [&]<typename T>(TypeTag<T>) {
    with_head_dim(step.head_dim, [&]<int kHeadDim>(IntegerTag<kHeadDim>) {
      using Kernel = Prefill<T, kHeadDim>;
      const std::int32_t tiles = count_tiles<Kernel::kRows>(step);
      launch<Kernel>({.x = static_cast<std::uint32_t>(tiles) * static_cast<std::uint32_t>(step.num_kv_heads),
                      .shared_bytes = Kernel::shared_bytes(),
                      .overlaps_previous = true},
                     step, stream);
    });
  });
}

}  // namespace adaptrt::cuda
