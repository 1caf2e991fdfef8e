#include <algorithm>

#include "cuda/kernels/attention/decode.h"
#include "cuda/kernels/attention/decode_launch.h"
#include "cuda/kernels/attention/instantiate.h"

namespace adaptrt::cuda {
namespace {

/// Number of decode blocks that use a GPU well, even if sequences have different lengths.
constexpr std::int32_t kEnoughBlocks = 2048;

/// Number of decode blocks that even small GPUs run at the same time.
constexpr std::int32_t kBlocksAtOnce = 256;

constexpr std::int32_t divide_up(std::int32_t n, std::int32_t by) {
  return (n + by - 1) / by;
}

std::int32_t row_tiles_of(std::int32_t num_heads, std::int32_t num_kv_heads) {
  return divide_up(num_heads / num_kv_heads, kDecodeRows);
}

}  // namespace

Splits plan_splits(const AttentionStep& step) {
  const std::int64_t capacity = static_cast<std::int64_t>(step.max_blocks) * step.tokens_per_block.value();
  const std::int32_t limit = step.has_chunks ? step.chunk.value() : step.sliding_window;
  const bool is_limited = limit != 0 && limit < capacity;
  const std::int64_t most_keys = is_limited ? limit : capacity;
  const std::int64_t blocks = static_cast<std::int64_t>(step.sequences) * step.num_kv_heads *
                              row_tiles_of(step.num_heads, step.num_kv_heads);
  Splits splits{.count = 1,
                .lanes = 1,
                .separates_tiles = false,
                .sums = nullptr,
                .totals = nullptr,
                .counters = nullptr};
  with_head_dim(step.head_dim, [&]<int kHeadDim>(IntegerTag<kHeadDim>) {
    constexpr int kFewest = kTileKeys<kHeadDim> * kSplitTiles;
    constexpr int kRound = kTileKeys<kHeadDim> * kDecodeWarps<kHeadDim>;
    splits.separates_tiles = kRound < kFewest && most_keys > kRound && blocks * kMostParts <= kBlocksAtOnce;
    // A window or a chunk may begin within a split.
    splits.count = static_cast<std::int32_t>(
        std::min<std::int64_t>((most_keys + kFewest - 1) / kFewest, kMostSplits) + (is_limited ? 1 : 0));
  });
  if (splits.separates_tiles) splits.count = kMostParts;
  splits.lanes = static_cast<std::int32_t>(std::clamp<std::int64_t>(kEnoughBlocks / blocks, 1, splits.count));
  return splits;
}

std::size_t split_bytes(std::int32_t num_heads, std::int32_t head_dim, std::int32_t max_sequences) {
  return static_cast<std::size_t>(max_sequences) * static_cast<std::size_t>(num_heads) * kMostParts *
         static_cast<std::size_t>(head_dim + 2) * sizeof(float);
}

std::int64_t split_counters(std::int32_t num_heads, std::int32_t num_kv_heads, std::int32_t sequences) {
  return std::int64_t{sequences} * num_kv_heads * row_tiles_of(num_heads, num_kv_heads);
}

bool decode_can_rotate(const AttentionStep& step) {
  constexpr std::int32_t kElements = 8;  // that a thread rotates at a time
  return step.key != nullptr && step.tokens == step.sequences && step.rotary_half % kElements == 0;
}

void launch_decode(const AttentionStep& step, const Splits& splits, bool rotates, DType dtype, void* stream) {
  const std::int32_t row_tiles = row_tiles_of(step.num_heads, step.num_kv_heads);
  const auto launch_format = step.int8_pool ? launch_int8_decode : launch_decode_of<KvFormat::kPlain>;
  launch_format(step, splits, row_tiles, rotates, dtype, stream);
}

}  // namespace adaptrt::cuda
