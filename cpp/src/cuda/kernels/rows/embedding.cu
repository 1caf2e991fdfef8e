#include <cstdint>

#include "adaptrt/cuda/row_kernels.h"
#include "cuda/kernels/element_type.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/rows/checks.h"
#include "cuda/kernels/rows/elements.h"

namespace adaptrt::cuda {
namespace {

/// One block per token.
template <typename T>
class EmbeddingRows {
 public:
  using Parameters = Embedding;
  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerMultiprocessor = 4;

  __device__ static void run(const Embedding& work) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const auto token = static_cast<std::int64_t>(blockIdx.x);
    const std::int64_t id = work.token_ids[token];
    if (id >= work.vocabulary) return;
    const std::int64_t vectors = work.width / rows::kVector;
    const std::int64_t from = id * vectors;
    const std::int64_t position = work.positions == nullptr ? 0 : work.position_ids[token] * vectors;
    for (std::int64_t i = threadIdx.x; i < vectors; i += kThreads) {
      rows::Elements row = rows::load_constant<T>(work.table, from + i);
      row.for_each([&](float value, int) { return value * work.scale; });
      if (work.positions != nullptr) {
        const rows::Elements added = rows::load_constant<T>(work.positions, position + i);
        row.for_each([&](float value, int at) { return value + added.values[at]; });
      }
      rows::store<float>(work.output, token * vectors + i, row);
    }
  }
};

}  // namespace

void enqueue(const Embedding& work, void* stream) {
  rows::Checks()
      .type(work.dtype)
      .count("tokens", work.tokens)
      .vectors("width", work.width, 8)
      .positive("vocabulary", work.vocabulary)
      .done("Embedding");
  with_element_type(work.dtype, [&]<typename T>(TypeTag<T>) {
    launch<EmbeddingRows<T>>({.x = static_cast<std::uint32_t>(work.tokens), .overlaps_previous = true}, work,
                             stream);
  });
}

}  // namespace adaptrt::cuda
