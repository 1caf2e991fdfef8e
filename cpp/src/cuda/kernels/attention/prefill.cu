#include "cuda/kernels/attention/prefill.h"
#include "cuda/kernels/attention/prefill_launch.h"

namespace adaptrt::cuda {

void launch_prefill(const AttentionStep& step, DType dtype, void* stream) {
  if (step.int8_pool) return launch_int8_prefill(step, dtype, stream);
  launch_prefill_of<KvFormat::kPlain>(step, dtype, stream);
}

}  // namespace adaptrt::cuda
