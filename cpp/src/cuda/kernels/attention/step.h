#pragma once

#include <cstdint>

#include "cuda/kernels/divisor.h"
#include "cuda/kernels/platform.h"

namespace adaptrt::cuda {

/// Input of a step's attention kernels: device addresses, and sizes that the host knows. T is the element
/// type that a kernel is compiled for.
struct AttentionStep {
  const void* query;  // T [tokens, num_heads, head_dim] with query_stride, before RoPE
  const void* key;    // T [tokens, num_kv_heads, head_dim] with kv_stride, before RoPE; nullptr: in the pool
  const void* value;  // T [tokens, num_kv_heads, head_dim] with kv_stride
  void* kv_pool;      // T [blocks, 2, num_kv_heads, tokens_per_block, head_dim], or see Int8Row
  const std::int32_t* block_tables;      // [sequences, max_blocks]
  const std::int32_t* sequence_offsets;  // [sequences + 1]
  const std::int32_t* positions;         // [tokens]
  const float* cosine;                   // [tokens, rotary_half]
  const float* sine;                     // [tokens, rotary_half]
  const float* sinks;                    // [num_heads]; nullptr: none
  void* rotated_query;                   // T [tokens, num_heads, head_dim], after RoPE; undefined for padding
  void* attended;                        // T [tokens, num_heads, head_dim]
  std::int32_t tokens;
  std::int32_t sequences;
  std::int32_t max_blocks;
  std::int32_t rotary_half;
  std::int32_t query_stride;  // elements between rows
  std::int32_t kv_stride;
  std::int32_t num_heads;
  std::int32_t num_kv_heads;
  std::int32_t head_dim;
  std::int32_t sliding_window;
  float scale;       // scale of the scores, times log2(e), because weights are powers of two
  float softcap;     // softcap of the unscaled scores; 0: none
  float exponent;    // 2 log2(e) / softcap
  bool interleaved;  // elements 2 i and 2 i + 1 of a head rotate together
  bool int8_pool;
  Divisor tokens_per_block;
  Divisor group;  // query heads per KV head
  // See PagedAttentionConfig:
  bool has_chunks = false;
  Divisor chunk = {};
  float query_scaling_beta = 0.0F;
  std::int32_t query_scaling_offset = 0;
  Divisor query_scaling_length = {};
};

/// The block that holds a position of a sequence; negative if there is none.
__device__ inline std::int32_t block_of(const AttentionStep& step, std::int32_t sequence,
                                        std::int32_t position) {
  return step.block_tables[static_cast<std::int64_t>(sequence) * step.max_blocks +
                           step.tokens_per_block.quotient(position)];
}

/// Element offset of a key in the pool; its value is value_offset elements further.
__device__ inline std::int64_t key_offset(const AttentionStep& step, std::int32_t block, std::int32_t kv_head,
                                          std::int32_t slot) {
  const std::int64_t row =
      (static_cast<std::int64_t>(block) * 2 * step.num_kv_heads + kv_head) * step.tokens_per_block.value() +
      slot;
  return row * step.head_dim;
}

__device__ inline std::int64_t value_offset(const AttentionStep& step) {
  return static_cast<std::int64_t>(step.num_kv_heads) * step.tokens_per_block.value() * step.head_dim;
}

/// The factor of a query.
__device__ inline float query_factor(const AttentionStep& step, std::int32_t position) {
  if (step.query_scaling_beta == 0.0F) return 1.0F;
  const auto steps =
      static_cast<float>(step.query_scaling_length.quotient(position + step.query_scaling_offset));
  return fmaf(step.query_scaling_beta, logf(1.0F + steps), 1.0F);
}

/// The first position that a token at `position` sees; the last one is its own.
__device__ inline std::int32_t first_visible(const AttentionStep& step, std::int32_t position) {
  if (step.has_chunks) return position - step.chunk.remainder(position);
  const std::int32_t first = position + 1 - step.sliding_window;
  return step.sliding_window == 0 || first < 0 ? 0 : first;
}

/// The sequence s with begin_of(s) <= index < begin_of(s + 1), for consecutive ranges; -1: none. The threads
/// of a block search together. `found` is in shared memory and must be unused.
template <typename BeginOf>
__device__ std::int32_t find_sequence(const AttentionStep& step, std::int32_t index, std::int32_t* found,
                                      const BeginOf& begin_of) {
  if (threadIdx.x == 0) *found = -1;
  __syncthreads();
  for (auto s = static_cast<std::int32_t>(threadIdx.x); s < step.sequences;
       s += static_cast<std::int32_t>(blockDim.x)) {
    if (begin_of(s) <= index && index < begin_of(s + 1)) *found = s;
  }
  __syncthreads();
  return *found;
}

/// Place of a token's key in the pool.
struct TokenPlace {
  std::int32_t sequence;  // -1: none
  std::int32_t position;
  std::int32_t block;  // negative: the token has no sequence, or its position has no block
};

/// Looks a token up, with the block's threads together: see find_sequence.
__device__ inline TokenPlace place_of_token(const AttentionStep& step, std::int32_t token,
                                            std::int32_t* found) {
  const std::int32_t sequence =
      find_sequence(step, token, found, [&](std::int32_t s) { return step.sequence_offsets[s]; });
  const std::int32_t position = step.positions[token];
  return {sequence, position, sequence < 0 ? -1 : block_of(step, sequence, position)};
}

}  // namespace adaptrt::cuda
