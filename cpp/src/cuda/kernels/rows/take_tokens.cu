#include <cstdint>

#include "adaptrt/cuda/row_kernels.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/rows/checks.h"

namespace adaptrt::cuda {
namespace {

/// One token per thread.
class TakeTokensOfRows {
 public:
  using Parameters = TakeTokens;
  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerMultiprocessor = 4;

  __device__ static void run(const TakeTokens& work) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (i >= work.tokens) return;
    const std::int32_t id = work.token_ids[i];
    if (id >= 0) return;
    const std::int32_t best = work.best_tokens[-1 - id];
    work.token_ids[i] = best < 0 ? 0 : best;
  }
};

}  // namespace

void enqueue(const TakeTokens& work, void* stream) {
  rows::Checks().count("tokens", work.tokens).done("TakeTokens");
  launch<TakeTokensOfRows>(
      {.x = rows::blocks_for(work.tokens, TakeTokensOfRows::kThreads), .overlaps_previous = true}, work,
      stream);
}

}  // namespace adaptrt::cuda
