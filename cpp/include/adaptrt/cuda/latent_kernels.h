#pragma once

#include <cstdint>

#include "adaptrt/core/dtype.h"
#include "adaptrt/cuda/slot_tile.h"

namespace adaptrt::cuda {

// Kernels of latent attention on an NVIDIA GPU (LatentQueriesOp, LatentValuesOp, and AttentionOp whose values
// are keys). A slot is a pair of a head and a token: slot head * tokens + token. So ExpertProduct and
// LoraKernel multiply slots with the matrices of their heads, which are their experts. No bit of a token's
// result depends on the other tokens. Each function enqueues its launches on `stream` (a cudaStream_t), and
// does nothing without tokens. It throws ConfigError for invalid sizes and types, and StepError if CUDA
// rejects a launch.

inline constexpr std::int64_t kMaxKeyDim = 576;
/// Rotated elements of a key come in such units.
inline constexpr std::int64_t kRotatedUnit = 16;

/// Numbers the slots of a run, and cuts them into tiles for LoraKernel.
struct NumberHeads {
  std::int64_t tokens = 0;
  std::int32_t heads = 0;                     ///< 1 to kMaxExperts
  std::int32_t* offsets = nullptr;            ///< [heads + 1]: the first slot of each head
  std::int32_t tile_tokens = 1;               ///< LoraKernel::tile_tokens()
  std::int64_t tiles_of_head = 0;             ///< see most_head_tiles()
  const std::int32_t* token_slots = nullptr;  ///< [tokens]: each token's adapter; -1: the base model
  SlotTile* tiles = nullptr;                  ///< [heads * tiles_of_head + 1]; nullptr: no tiles
};
void enqueue(const NumberHeads& work, void* stream);

/// Maximum number of tiles of a head, if `ranges` ranges of tokens have one adapter each.
[[nodiscard]] std::int64_t most_head_tiles(std::int64_t tokens, std::int64_t ranges,
                                           std::int32_t tile_tokens);

/// Copies `width` elements of each head of each token, bit for bit. T has 16 bits. All sizes are multiples of
/// 8.
struct CopyHeads {
  std::int64_t tokens = 0;
  std::int32_t heads = 0;
  std::int64_t width = 0;
  std::int64_t x_of_token = 0;  ///< elements of x from a token to the next
  std::int64_t x_of_head = 0;
  const void* x = nullptr;  ///< T
  std::int64_t y_of_token = 0;
  std::int64_t y_of_head = 0;
  void* y = nullptr;  ///< T
};
void enqueue(const CopyHeads& work, void* stream);

/// Makes [q | k] of LatentQueriesOp.
struct JoinQueries {
  DType dtype = DType::kBFloat16;
  std::int64_t tokens = 0;
  std::int32_t heads = 0;
  std::int64_t latent_dim = 0;  ///< a multiple of 8, as the next two
  std::int64_t rotary_dim = 0;
  std::int64_t plain_dim = 0;
  const void* queries = nullptr;   ///< T [tokens, heads, plain_dim + rotary_dim]
  const void* products = nullptr;  ///< T [heads, tokens, latent_dim]: the plain elements times the keys
  const void* rows = nullptr;      ///< T [tokens, latent_dim + rotary_dim]
  const float* norm = nullptr;     ///< [latent_dim]
  float epsilon = 0.0F;
  void* qk = nullptr;  ///< T [tokens, heads + 1, rotary_dim + latent_dim]
};
void enqueue(const JoinQueries& work, void* stream);

/// RoPE of [q | k], the write of keys to the pool, and causal attention with keys as values. A token without
/// a sequence, or in a block that is -1 in the block table, writes nothing to the pool, and its result is
/// zero. Scores and sums are float32; rotated queries and keys, and the weights of values, are rounded to T.
struct LatentAttention {
  DType dtype = DType::kBFloat16;
  std::int32_t tokens = 0;
  std::int32_t sequences = 0;  ///< each has at least one token
  std::int32_t max_blocks = 0;
  std::int32_t tokens_per_block = 0;
  std::int32_t num_heads = 0;
  std::int32_t key_dim = 0;     ///< a multiple of 8, at most kMaxKeyDim
  std::int32_t rotary_dim = 0;  ///< the first elements of a head; a multiple of kRotatedUnit
  bool interleaved = false;     ///< see PagedAttentionConfig
  std::int32_t sliding_window = 0;
  float scale = 1.0F;
  const void* qk = nullptr;                        ///< T [tokens, num_heads + 1, key_dim]
  void* kv_pool = nullptr;                         ///< T [blocks, tokens_per_block, key_dim]
  const std::int32_t* block_tables = nullptr;      ///< [sequences, max_blocks]
  const std::int32_t* sequence_offsets = nullptr;  ///< [sequences + 1]
  const std::int32_t* positions = nullptr;         ///< [tokens], ascending by one within a sequence
  const float* cosine = nullptr;                   ///< [tokens, rotary_dim / 2]
  const float* sine = nullptr;                     ///< [tokens, rotary_dim / 2]
  void* attended = nullptr;                        ///< T [tokens, num_heads, key_dim]
};
void enqueue(const LatentAttention& work, void* stream);

}  // namespace adaptrt::cuda
