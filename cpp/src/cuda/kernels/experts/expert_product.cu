#include <algorithm>
#include <cstdint>

#include "adaptrt/cuda/expert_kernels.h"
#include "cuda/kernels/divisor.h"
#include "cuda/kernels/element_type.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/product/launch_checks.h"
#include "cuda/kernels/product/portable_kernel.h"
#include "cuda/kernels/product/tiles.h"
#include "cuda/kernels/rows/checks.h"

namespace adaptrt::cuda {
namespace {

/// A block multiplies some outputs of an expert with a tile of its slots. The grid's y has more tiles than
/// there can be; blocks without slots return at once.
template <typename T>
class ExpertTiles {
 public:
  using Product = product::Portable<T>;
  struct Parameters {
    ExpertProduct work;
    Divisor entries_per_row;
    bool has_tile_per_slot;  ///< tile i begins at slot i, or there is no tile
  };
  static constexpr int kThreads = Product::kThreads;
  static constexpr int kBlocksPerMultiprocessor = Product::kBlocksPerMultiprocessor;
  static constexpr std::size_t kSharedBytes = Product::kSharedBytes;

  __device__ static void run(const Parameters& parameters) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const ExpertProduct& work = parameters.work;
    const std::int32_t expert = find_expert(parameters);
    if (expert < 0) return;
    const auto tile = static_cast<std::int32_t>(blockIdx.y);
    const std::int32_t begin = work.offsets[expert];
    const std::int32_t end = work.offsets[expert + 1];
    const std::int32_t first =
        parameters.has_tile_per_slot ? tile : begin + (tile - first_tile_of(work, expert)) * Product::kTokens;
    if (first >= end || (first - begin) % Product::kTokens != 0) return;
    __syncthreads();  // before the product overwrites the search result
    const auto size = static_cast<std::int64_t>(work.in_size) * work.out_size;
    const typename Product::Parameters product{.x = work.x,
                                               .weights = static_cast<const T*>(work.weights) + expert * size,
                                               .y = work.y,
                                               .in = work.in_size,
                                               .out = work.out_size,
                                               .tokens = end};
    Product::multiply_tile(
        product, first,
        [&](int slot) {
          return work.entries == nullptr ? slot : parameters.entries_per_row.quotient(work.entries[slot]);
        },
        [](float sum, int /*output*/) { return sum; });
  }

  /// Number of tiles of the grid.
  static std::int64_t count_tiles(const ExpertProduct& work) {
    return std::min(work.slots, work.slots / Product::kTokens + work.experts);
  }

 private:
  /// Number of an expert's first tile. Let a and b be the first slots of the expert and of the next one. The
  /// expert has ceil((b - a) / kTokens) <= floor(b / kTokens) - floor(a / kTokens) + 1 tiles, so every expert
  /// has its own numbers.
  __device__ static std::int32_t first_tile_of(const ExpertProduct& work, std::int32_t expert) {
    return work.offsets[expert] / Product::kTokens + expert;
  }

  /// The expert of the block's tile; -1 if there is none.
  __device__ static std::int32_t find_expert(const Parameters& parameters) {
    const ExpertProduct& work = parameters.work;
    auto* found = reinterpret_cast<std::int32_t*>(shared_memory());
    if (threadIdx.x == 0) *found = -1;
    __syncthreads();
    const auto tile = static_cast<std::int32_t>(blockIdx.y);
    const auto begin_of = [&](std::int32_t expert) {
      return parameters.has_tile_per_slot ? work.offsets[expert] : first_tile_of(work, expert);
    };
    for (auto expert = static_cast<std::int32_t>(threadIdx.x); expert < work.experts; expert += kThreads) {
      if (begin_of(expert) <= tile && tile < begin_of(expert + 1)) *found = expert;
    }
    __syncthreads();
    return *found;
  }
};

}  // namespace

void enqueue(const ExpertProduct& work, void* stream) {
  rows::Checks()
      .type(work.dtype)
      .count("slots", work.slots,
             (product::kMaxTokenTiles - kMaxExperts) * product::Portable<BFloat16>::kTokens)
      .positive("experts", work.experts, kMaxExperts)
      .vectors("in_size", work.in_size, 8)
      .vectors("out_size", work.out_size, 8)
      .positive("entries_per_row", work.entries_per_row)
      .done("ExpertProduct");
  with_element_type(work.dtype, [&]<typename T>(TypeTag<T>) {
    using Kernel = ExpertTiles<T>;
    const std::int64_t tiles = Kernel::count_tiles(work);
    launch<Kernel>(
        {.x = static_cast<std::uint32_t>(product::divide_up(work.out_size, Kernel::Product::kOutputs)),
         .y = static_cast<std::uint32_t>(tiles),
         .shared_bytes = Kernel::kSharedBytes,
         .overlaps_previous = true},
        {.work = work,
         .entries_per_row = Divisor(work.entries_per_row),
         .has_tile_per_slot = tiles == work.slots},
        stream);
  });
}

}  // namespace adaptrt::cuda
