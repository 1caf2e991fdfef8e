#include "cuda/kernels/attention/prefill_launch.h"

namespace adaptrt::cuda {

void launch_int8_prefill(const AttentionStep& step, DType dtype, void* stream) {
  launch_prefill_of<KvFormat::kInt8>(step, dtype, stream);
}

}  // namespace adaptrt::cuda
