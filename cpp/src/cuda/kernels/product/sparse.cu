#include <cstdint>

#include "adaptrt/cuda/sparse_kernels.h"
#include "cuda/kernels/element_type.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/product/sparse_kernel.h"
#include "cuda/kernels/product/tiles.h"
#include "cuda/kernels/rows/checks.h"

namespace adaptrt::cuda {
namespace {

using product::divide_up;

/// Checks the sizes that both products have.
rows::Checks checks_of(DType dtype, std::int64_t tokens, std::int64_t neurons) {
  return rows::Checks()
      .type(dtype)
      .count("tokens", tokens, kMaxSparseTokens)
      .vectors("neurons", neurons, 8, kMaxNeurons);
}

}  // namespace

void enqueue(const MarkActive& work, void* stream) {
  checks_of(work.dtype, work.tokens, work.neurons).done("MarkActive");
  if (work.tokens == 0) return;
  with_element_type(work.dtype, [&]<typename T>(TypeTag<T>) {
    using Kernel = product::ActiveMasks<T>;
    launch<Kernel>(
        {.x = rows::blocks_for(neuron_groups(work.neurons), Kernel::kThreads), .overlaps_previous = true},
        {.gate = work.gate,
         .bias = work.bias,
         .masks = work.masks,
         .threshold = work.threshold,
         .tokens = static_cast<int>(work.tokens),
         .vectors = static_cast<int>(work.neurons / rows::kVector)},
        stream);
  });
}

void enqueue(const SparseUp& work, void* stream) {
  checks_of(work.dtype, work.tokens, work.neurons).vectors("in_size", work.in_size, 8).done("SparseUp");
  if (work.tokens == 0) return;
  with_element_type(work.dtype, [&]<typename T>(TypeTag<T>) {
    using Kernel = product::ActiveRows<T>;
    launch<Kernel>({.x = rows::blocks_for(work.neurons, Kernel::Product::kOutputs),
                    .shared_bytes = Kernel::kSharedBytes,
                    .overlaps_previous = true},
                   {.product = {.x = work.x,
                                .weights = nullptr,
                                .y = work.y,
                                .in = static_cast<int>(work.in_size),
                                .out = static_cast<int>(work.neurons),
                                .tokens = static_cast<int>(work.tokens)},
                    .masks = work.masks,
                    .rows = work.rows},
                   stream);
  });
}

void enqueue(const SparseDown& work, void* stream) {
  checks_of(work.dtype, work.tokens, work.neurons).vectors("out_size", work.out_size, 8).done("SparseDown");
  if (work.tokens == 0) return;
  with_element_type(work.dtype, [&]<typename T>(TypeTag<T>) {
    using Kernel = product::ActiveColumns<T>;
    launch<Kernel>({.x = rows::blocks_for(work.out_size, Kernel::kOutputs),
                    .shared_bytes = Kernel::shared_bytes(work.neurons),
                    .overlaps_previous = true},
                   {.x = work.x,
                    .masks = work.masks,
                    .columns = work.columns,
                    .y = work.y,
                    .neurons = static_cast<int>(work.neurons),
                    .out = static_cast<int>(work.out_size),
                    .tokens = static_cast<int>(work.tokens)},
                   stream);
  });
}

}  // namespace adaptrt::cuda
