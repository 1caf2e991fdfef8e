#include <algorithm>
#include <cstdint>

#include "adaptrt/cuda/expert_kernels.h"
#include "cuda/kernels/divisor.h"
#include "cuda/kernels/element_type.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/product/launch_checks.h"
#include "cuda/kernels/product/portable_kernel.h"
#include "cuda/kernels/product/quantized_kernel.h"
#include "cuda/kernels/product/tiles.h"
#include "cuda/kernels/rows/checks.h"

namespace adaptrt::cuda {
namespace {

/// Columns of weights that one instruction multiplies.
constexpr std::int32_t kColumnsTogether = 16;

/// The product of one expert, as the kernel of its kind of weights sees it.
template <typename T, int kBits>
struct ExpertMatrix {
  using Product = product::Quantized<T, kBits>;

  __device__ static typename Product::Parameters of(const ExpertProduct& work, std::int32_t expert,
                                                    std::int32_t tokens) {
    const int group_size = work.group_size == 0 ? work.in_size : work.group_size;
    const int groups = (work.in_size + group_size - 1) / group_size;
    const std::int64_t outputs = std::int64_t{expert} * work.out_size;
    return {.x = work.x,
            .weights = static_cast<const unsigned char*>(work.weights) + outputs * work.in_size * kBits / 8,
            .scales = work.scales + outputs * groups,
            .zeros = work.zeros == nullptr ? nullptr : work.zeros + outputs * groups,
            .y = work.y,
            .in = work.in_size,
            .out = work.out_size,
            .tokens = tokens,
            .groups = groups,
            .group_steps = group_size / kColumnsTogether};
  }
};

/// Weights that are not quantised.
template <typename T>
struct ExpertMatrix<T, 0> {
  using Product = product::Portable<T>;

  __device__ static typename Product::Parameters of(const ExpertProduct& work, std::int32_t expert,
                                                    std::int32_t tokens) {
    const auto size = static_cast<std::int64_t>(work.in_size) * work.out_size;
    return {.x = work.x,
            .weights = static_cast<const T*>(work.weights) + expert * size,
            .y = work.y,
            .in = work.in_size,
            .out = work.out_size,
            .tokens = tokens};
  }
};

/// A block multiplies some outputs of an expert with a tile of its slots. The grid's y has more tiles than
/// there can be; blocks without slots return at once.
template <typename T, int kBits>
class ExpertTiles {
 public:
  using Matrix = ExpertMatrix<T, kBits>;
  using Product = typename Matrix::Product;
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
    Product::multiply_tile(Matrix::of(work, expert, end), first, [&](int slot) {
      return work.entries == nullptr ? slot : parameters.entries_per_row.quotient(work.entries[slot]);
    });
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

template <typename Kernel>
void launch_tiles(const ExpertProduct& work, void* stream) {
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
}

}  // namespace

void enqueue(const ExpertProduct& work, void* stream) {
  const bool is_quantized = work.bits != 0;
  const std::int32_t unit = work.bits == 4 ? 2 * kColumnsTogether : kColumnsTogether;
  rows::Checks()
      .type(work.dtype)
      .count("slots", work.slots,
             (product::kMaxTokenTiles - kMaxExperts) * product::Portable<BFloat16>::kTokens)
      .positive("experts", work.experts, kMaxExperts)
      .vectors("in_size", work.in_size, 8)
      .vectors("out_size", work.out_size, 8)
      .positive("entries_per_row", work.entries_per_row)
      .condition(work.bits == 0 || work.bits == 8 || work.bits == 4, "bits is none of 0, 4 and 8")
      .condition(!is_quantized || work.in_size % unit == 0, "in_size does not fit the integers")
      .condition(work.group_size >= 0 && work.group_size % kColumnsTogether == 0,
                 "group_size is not a multiple of 16")
      .done("ExpertProduct");
  with_element_type(work.dtype, [&]<typename T>(TypeTag<T>) {
    if (work.bits == 8) {
      launch_tiles<ExpertTiles<T, 8>>(work, stream);
    } else if (work.bits == 4) {
      launch_tiles<ExpertTiles<T, 4>>(work, stream);
    } else {
      launch_tiles<ExpertTiles<T, 0>>(work, stream);
    }
  });
}

}  // namespace adaptrt::cuda
