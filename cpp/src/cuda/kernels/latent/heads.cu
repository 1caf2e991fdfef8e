#include <algorithm>
#include <cstdint>

#include "adaptrt/cuda/expert_kernels.h"
#include "adaptrt/cuda/latent_kernels.h"
#include "cuda/kernels/block_rank.h"
#include "cuda/kernels/divisor.h"
#include "cuda/kernels/element_type.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/rows/block_sum.h"
#include "cuda/kernels/rows/checks.h"
#include "cuda/kernels/rows/elements.h"
#include "cuda/kernels/rows/row_vectors.h"

namespace adaptrt::cuda {
namespace {

/// A block numbers the tiles of one head. All heads have the same tiles of tokens.
class HeadTiles {
 public:
  using Parameters = NumberHeads;
  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerMultiprocessor = 4;
  static constexpr std::size_t kSharedBytes = rank_bytes(kThreads);

  __device__ static void run(const NumberHeads& work) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const auto head = static_cast<std::int32_t>(blockIdx.x);
    const auto tokens = static_cast<std::int32_t>(work.tokens);
    const bool is_last = head == work.heads - 1;
    const std::int32_t begin = head * tokens;
    if (threadIdx.x == 0) {
      work.offsets[head] = begin;
      if (is_last) work.offsets[work.heads] = begin + tokens;
    }
    if (work.tiles == nullptr) return;
    const auto most = static_cast<std::int32_t>(work.tiles_of_head);
    // Tiles without slots complete the head's; after the last head, one more is the end of all tiles.
    number_tiles<kThreads>(
        work.tiles + static_cast<std::int64_t>(head) * most, is_last ? most + 1 : most, tokens,
        {begin + tokens, -1, head}, [&](std::int32_t token) { return begins_tile(work, token); },
        [&](std::int32_t token) { return SlotTile{begin + token, work.token_slots[token], head}; });
  }

 private:
  __device__ static bool begins_tile(const NumberHeads& work, std::int32_t token) {
    return token % work.tile_tokens == 0 || work.token_slots[token] != work.token_slots[token - 1];
  }
};

struct CopyStep {
  CopyHeads work;            ///< its sizes are in vectors
  rows::RowVectors vectors;  ///< of y
  Divisor heads;
};

/// One vector of y per thread.
class CopyVectors {
 public:
  using Parameters = CopyStep;
  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerMultiprocessor = 4;

  __device__ static void run(const CopyStep& step) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const std::int32_t i = step.vectors.own<kThreads>();
    if (i < 0) return;
    const std::int32_t row = step.vectors.row(i);
    const std::int32_t column = step.vectors.column(i);
    const std::int64_t token = step.heads.quotient(row);
    const std::int64_t head = step.heads.remainder(row);
    const CopyHeads& work = step.work;
    static_cast<Vector16*>(work.y)[token * work.y_of_token + head * work.y_of_head + column] =
        static_cast<const Vector16*>(work.x)[token * work.x_of_token + head * work.x_of_head + column];
  }
};

/// A block makes the queries and the key of one token.
template <typename T>
class Join {
 public:
  using Parameters = JoinQueries;
  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerMultiprocessor = 4;
  static constexpr std::size_t kSharedBytes = kThreads / kWarpSize * sizeof(float);

  __device__ static void run(const JoinQueries& work) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const auto token = static_cast<std::int64_t>(blockIdx.x);
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    const auto rotated = static_cast<std::int32_t>(work.rotary_dim / rows::kVector);
    const auto latent = static_cast<std::int32_t>(work.latent_dim / rows::kVector);
    const auto plain = static_cast<std::int32_t>(work.plain_dim / rows::kVector);
    const std::int32_t width = rotated + latent;
    Vector16* qk = static_cast<Vector16*>(work.qk) + token * (work.heads + 1) * width;
    const auto* products = static_cast<const Vector16*>(work.products);
    for (std::int32_t i = thread; i < work.heads * width; i += kThreads) {
      const std::int64_t head = i / width;
      const std::int32_t column = i % width;
      qk[i] = column < rotated
                  ? static_cast<const Vector16*>(
                        work.queries)[(token * work.heads + head) * (plain + rotated) + plain + column]
                  : products[(head * work.tokens + token) * latent + column - rotated];
    }
    Vector16* key = qk + work.heads * width;
    const std::int64_t row = token * width;
    for (std::int32_t i = thread; i < rotated; i += kThreads) {
      key[i] = static_cast<const Vector16*>(work.rows)[row + latent + i];
    }
    float squares = 0.0F;
    for (std::int32_t i = thread; i < latent; i += kThreads) {
      const rows::Elements elements = rows::load<T>(work.rows, row + i);
      ADAPTRT_UNROLL
      for (const float value : elements.values) squares += value * value;
    }
    const float sum = rows::block_sum<kThreads>(squares, reinterpret_cast<float*>(shared_memory()));
    const float factor = rsqrtf(sum / static_cast<float>(work.latent_dim) + work.epsilon);
    for (std::int32_t i = thread; i < latent; i += kThreads) {
      rows::Elements elements = rows::load<T>(work.rows, row + i);
      const rows::Elements weight = rows::load_constant<float>(work.norm, i);
      elements.for_each([&](float value, int at) { return value * factor * weight.values[at]; });
      rows::store<T>(key + rotated, i, elements);
    }
  }
};

}  // namespace

void enqueue(const NumberHeads& work, void* stream) {
  rows::Checks()
      .positive("heads", work.heads, kMaxExperts)
      .count("tokens", work.tokens)
      .positive("tile_tokens", work.tile_tokens)
      .count("tiles_of_head", work.tiles_of_head)
      .done("NumberHeads");
  rows::Checks()
      .count("heads * tokens", work.heads * work.tokens)
      .count("heads * tiles_of_head", work.heads * work.tiles_of_head)
      .condition((work.tiles == nullptr) == (work.token_slots == nullptr),
                 "one of tiles and token_slots is given; expected both or none")
      .done("NumberHeads");
  if (work.tokens == 0) return;
  launch<HeadTiles>({.x = static_cast<std::uint32_t>(work.heads),
                     .shared_bytes = HeadTiles::kSharedBytes,
                     .overlaps_previous = true},
                    work, stream);
}

std::int64_t most_head_tiles(std::int64_t tokens, std::int64_t ranges, std::int32_t tile_tokens) {
  return std::min(tokens, (tokens + tile_tokens - 1) / tile_tokens + ranges);
}

void enqueue(const CopyHeads& work, void* stream) {
  rows::Checks()
      .count("tokens", work.tokens)
      .positive("heads", work.heads)
      .vectors("width", work.width, 8)
      .vectors("x_of_token", work.x_of_token, 0)
      .vectors("x_of_head", work.x_of_head, 0)
      .vectors("y_of_token", work.y_of_token, 0)
      .vectors("y_of_head", work.y_of_head, 0)
      .done("CopyHeads");
  const rows::RowVectors vectors("tokens * heads", work.tokens * work.heads, work.width, "CopyHeads");
  CopyHeads in_vectors = work;
  for (std::int64_t* size :
       {&in_vectors.x_of_token, &in_vectors.x_of_head, &in_vectors.y_of_token, &in_vectors.y_of_head}) {
    *size /= rows::kVector;
  }
  launch<CopyVectors>(vectors.shape<CopyVectors>(),
                      {.work = in_vectors, .vectors = vectors, .heads = Divisor(work.heads)}, stream);
}

void enqueue(const JoinQueries& work, void* stream) {
  rows::Checks()
      .type(work.dtype)
      .count("tokens", work.tokens)
      .positive("heads", work.heads, kMaxExperts)
      .vectors("latent_dim", work.latent_dim, 8, kMaxKeyDim)
      .vectors("rotary_dim", work.rotary_dim, 8, kMaxKeyDim)
      .vectors("plain_dim", work.plain_dim, 8, 1 << 16)
      .done("JoinQueries");
  with_element_type(work.dtype, [&]<typename T>(TypeTag<T>) {
    launch<Join<T>>({.x = static_cast<std::uint32_t>(work.tokens),
                     .shared_bytes = Join<T>::kSharedBytes,
                     .overlaps_previous = true},
                    work, stream);
  });
}

}  // namespace adaptrt::cuda
