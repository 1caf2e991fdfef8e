#include <algorithm>

#include "cuda/kernels/attention/combine_kernel.h"
#include "cuda/kernels/attention/decode.h"
#include "cuda/kernels/attention/decode_kernel.h"
#include "cuda/kernels/attention/instantiate.h"

namespace adaptrt::cuda {
namespace {

/// Number of decode blocks above which more blocks do not use a GPU better, with a margin for sequences of
/// different lengths.
constexpr std::int32_t kEnoughBlocks = 4096;
/// Maximum splits per sequence: combining them must stay cheap.
constexpr std::int32_t kMostSplits = 128;
/// Minimum keys per split: fewer are not worth a block and its partial sums.
constexpr std::int32_t kFewestKeys = 256;

constexpr std::int32_t divide_up(std::int32_t n, std::int32_t by) {
  return (n + by - 1) / by;
}

/// Maximum number of splits of a sequence.
std::int32_t most_splits(std::int32_t num_heads, std::int32_t num_kv_heads, std::int32_t sequences) {
  const std::int64_t blocks =
      static_cast<std::int64_t>(sequences) * num_kv_heads * divide_up(num_heads / num_kv_heads, kDecodeRows);
  return static_cast<std::int32_t>(std::clamp<std::int64_t>(kEnoughBlocks / blocks, 1, kMostSplits));
}

}  // namespace

Splits plan_splits(const AttentionStep& step) {
  const std::int64_t capacity = static_cast<std::int64_t>(step.max_blocks) * step.tokens_per_block.value();
  const std::int64_t most_keys =
      step.sliding_window == 0
          ? capacity
          : std::min<std::int64_t>(capacity, std::int64_t{step.sliding_window} + kSplitAlignment - 1);
  const std::int32_t splits = most_splits(step.num_heads, step.num_kv_heads, step.sequences);
  const auto fair = static_cast<std::int32_t>((most_keys + splits - 1) / splits);
  const std::int32_t num_keys = divide_up(std::max(fair, kFewestKeys), kKeysOfSplitStep) * kKeysOfSplitStep;
  return {.count = static_cast<std::int32_t>((most_keys + num_keys - 1) / num_keys),
          .num_keys = num_keys,
          .sums = nullptr,
          .totals = nullptr};
}

std::size_t split_bytes(std::int32_t num_heads, std::int32_t num_kv_heads, std::int32_t head_dim,
                        std::int32_t max_sequences) {
  std::int64_t most = 0;
  for (std::int32_t sequences = 1; sequences <= max_sequences; ++sequences) {
    const std::int32_t splits = most_splits(num_heads, num_kv_heads, sequences);
    if (splits == 1) break;
    most = std::max<std::int64_t>(most, std::int64_t{sequences} * splits);
  }
  return static_cast<std::size_t>(most * num_heads * (head_dim + 2)) * sizeof(float);
}

void launch_decode(const AttentionStep& step, const Splits& splits, DType dtype, void* stream) {
  const std::int32_t row_tiles = divide_up(step.group.value(), kDecodeRows);
  with_element_type(dtype, [&]<typename T>(TypeTag<T>) {
    with_head_dim(step.head_dim, [&]<int kHeadDim>(IntegerTag<kHeadDim>) {
      using Kernel = Decode<T, kHeadDim>;
      launch<Kernel>({.x = static_cast<std::uint32_t>(splits.count),
                      .y = static_cast<std::uint32_t>(step.num_kv_heads * row_tiles),
                      .z = static_cast<std::uint32_t>(step.sequences),
                      .shared_bytes = Kernel::shared_bytes()},
                     {step, splits, row_tiles}, stream);
    });
    if (splits.count == 1) return;
    launch<Combine<T>>({.x = static_cast<std::uint32_t>(divide_up(step.num_heads, Combine<T>::kWarps)),
                        .y = static_cast<std::uint32_t>(step.sequences)},
                       {step, splits}, stream);
  });
}

}  // namespace adaptrt::cuda
