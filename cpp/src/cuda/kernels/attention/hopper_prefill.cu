#include <limits>

#include "cuda/kernels/attention/hopper_prefill.h"
#include "cuda/kernels/attention/hopper_prefill_kernel.h"
#include "cuda/kernels/attention/instantiate.h"
#include "cuda/kernels/hopper/tensor_map.h"

namespace adaptrt::cuda {
namespace {

/// Calls function(IntegerTag<head_dim>) if the kernel is compiled for this head_dim. Returns true if it is.
template <typename Function>
bool with_hopper_head_dim(std::int32_t head_dim, const Function& function) {
  if (head_dim == 128) {
    function(IntegerTag<128>{});
    return true;
  }
  if constexpr (!kHasFewKernels) {
    if (head_dim == 64) {
      function(IntegerTag<64>{});
      return true;
    }
    if (head_dim == 96) {
      function(IntegerTag<96>{});
      return true;
    }
  }
  return false;
}

}  // namespace

bool has_hopper_prefill(std::int32_t head_dim) {
  return with_hopper_head_dim(head_dim, [](auto) {});
}

void launch_hopper_prefill(const AttentionStep& step, DType dtype, void* stream) {
  // The number of the pool's blocks is not known here. The copy engine reads no row that is not asked for.
  constexpr std::int64_t kMostRows = std::numeric_limits<std::int32_t>::max();
  with_element_type(dtype, [&]<typename T>(TypeTag<T>) {
    with_hopper_head_dim(step.head_dim, [&]<int kHeadDim>(IntegerTag<kHeadDim>) {
      using Kernel = HopperPrefill<T, kHeadDim>;
      const std::int32_t tiles = count_tiles<Kernel::kRows>(step);
      launch<Kernel>(
          {.x = static_cast<std::uint32_t>(tiles) * static_cast<std::uint32_t>(step.num_kv_heads),
           .shared_bytes = Kernel::shared_bytes(),
           .overlaps_previous = true},
          {.pool = map_of(dtype, step.kv_pool, kMostRows, step.head_dim, Kernel::kBoxKeys), .step = step},
          stream);
    });
  });
}

}  // namespace adaptrt::cuda
