#pragma once

#include <cstddef>
#include <cstdint>

#include "adaptrt/core/dtype.h"

namespace adaptrt::cuda {

/// Fixed attributes of a PagedAttention node; plugins/paged_attention.py defines the computation.
struct PagedAttentionConfig {
  DType dtype = DType::kFloat16;  ///< type T of q, k, v, the KV pool and the result: float16 or bfloat16
  std::int32_t num_heads = 0;
  std::int32_t num_kv_heads = 0;  ///< divides num_heads
  std::int32_t head_dim = 0;      ///< even; 64, 80, 96, 128 and 256 use tensor cores
  float scale = 1.0F;             ///< scale of the scores; above 0
  std::int32_t sliding_window = 0;
  float softcap = 0.0F;  ///< scores s become softcap * tanh(s / softcap); 0: no softcap
  /// True: elements 2 i and 2 i + 1 of a head rotate together, instead of i and i + rotary_half.
  bool interleaved = false;
  /// True: the pool has int8 keys and values. A head has one scale, which is computed when it is written.
  /// head_dim is a multiple of 8.
  bool int8_pool = false;
  /// Sequences consist of chunks of so many positions, and tokens attend only to their own; 0: no chunks. Not
  /// with a sliding_window.
  std::int32_t chunk = 0;
  /// Queries at position p are multiplied by 1 + query_scaling_beta * ln(1 + floor((p + query_scaling_offset)
  /// / query_scaling_length)), and rounded to T; 0: they are not.
  float query_scaling_beta = 0.0F;
  std::int32_t query_scaling_length = 1;
  std::int32_t query_scaling_offset = 0;
  /// True: prefills use wgmma and the copy engine of compute capability 9.0. The current device must have it,
  /// head_dim must be 64, 96 or 128, and the pool not int8. Results have the same bits. No GPU has run this
  /// yet.
  bool hopper_prefill = false;
};

/// Bytes of a block of an int8 pool: integers [2, num_kv_heads, tokens_per_block, head_dim], and after them
/// the scales, float32 [2, num_kv_heads, tokens_per_block].
[[nodiscard]] constexpr std::int64_t int8_block_bytes(std::int64_t num_kv_heads,
                                                      std::int64_t tokens_per_block, std::int64_t head_dim) {
  return 2 * num_kv_heads * tokens_per_block * (head_dim + static_cast<std::int64_t>(sizeof(float)));
}

/// Sizes of a step. The launches depend only on them.
struct PagedAttentionSizes {
  std::int32_t tokens = 0;
  std::int32_t sequences = 0;         ///< each has at least one token
  std::int32_t max_blocks = 0;        ///< columns of the block tables
  std::int32_t tokens_per_block = 0;  ///< multiples of 16 use tensor cores
  std::int32_t rotary_half = 0;       ///< columns of cosine and sine; 0: heads are not rotated
  /// Elements from a row of q to the next, and from a row of k or v to the next. q, k and v may be columns of
  /// one buffer. Both are multiples of 8 if head_dim is.
  std::int32_t q_stride = 0;
  std::int32_t kv_stride = 0;
};

/// Device addresses of the arrays in the plugin's definition, where T is the config's dtype. Arrays of T are
/// aligned to 16 bytes; q, k and v to their elements if head_dim is not a multiple of 8.
struct PagedAttentionArrays {
  const void* q = nullptr;  ///< T [tokens, num_heads * head_dim], with a stride
  /// T [tokens, num_kv_heads * head_dim], with a stride. Both are nullptr if the pool has the step's keys and
  /// values already: it is another layer's.
  const void* k = nullptr;
  const void* v = nullptr;
  /// T [blocks, 2, num_kv_heads, tokens_per_block, head_dim], or blocks of int8_block_bytes()
  void* kv_pool = nullptr;
  const std::int32_t* block_tables = nullptr;  ///< [sequences, max_blocks]
  const std::int32_t* sequence_offsets =
      nullptr;                              ///< [sequences + 1]; tokens after the last belong to no sequence
  const std::int32_t* positions = nullptr;  ///< [tokens], ascending by one within a sequence
  const float* cosine = nullptr;            ///< [tokens, rotary_half]
  const float* sine = nullptr;              ///< [tokens, rotary_half]
  const float* sinks = nullptr;             ///< [num_heads], see AttentionOp::sinks; nullptr: none
  /// Zeros, of counter_bytes() for the step's sequences: see there. nullptr: counters in the workspace, which
  /// another launch sets to zero.
  std::uint32_t* counters = nullptr;
  void* attended = nullptr;  ///< T [tokens, num_heads * head_dim]; not one of the inputs
};

/// The PagedAttention plugin on an NVIDIA GPU: RoPE, the write of k and v to the pool, and causal attention.
///
/// A token without a sequence, or in a block that is -1 in the block table, writes nothing to the pool, and
/// its result is zero. Launches depend only on the sizes, so a captured graph may run again with other
/// tables, offsets and positions. Scores and sums are float32; RoPE's result and the attention weights are
/// rounded to T before they are multiplied. A token's result has the same bits in every
/// step: alone, with any other sequences, as a decode, and in any chunk of a prompt.
class PagedAttentionKernel {
 public:
  /// Throws ConfigError that names every field with an invalid value, and for hopper_prefill if the current
  /// device is none of compute capability 9.0.
  explicit PagedAttentionKernel(const PagedAttentionConfig& config);

  [[nodiscard]] const PagedAttentionConfig& config() const { return config_; }

  /// Size of the workspace for at most this many tokens and sequences, with any other sizes.
  [[nodiscard]] std::size_t workspace_bytes(std::int32_t max_tokens, std::int32_t max_sequences) const;

  /// Size of the counters of a step with at most this many sequences. They are zero before a step and zero
  /// after it, so the caller sets them to zero once. Steps that run one after another can share them,
  /// whatever their sizes; steps on different streams cannot. Blocks count themselves when they have stored
  /// their part of a sequence, and the last one sets its counter back. A launch either runs all of its blocks
  /// or makes the device unusable, so an error leaves no counter behind that a later step could see.
  [[nodiscard]] std::size_t counter_bytes(std::int32_t max_sequences) const;

  /// Enqueues the work on `stream` (a cudaStream_t). `workspace` is aligned to 16 bytes. Throws ConfigError
  /// for an invalid size or address, and StepError if a launch fails.
  void enqueue(const PagedAttentionSizes& sizes, const PagedAttentionArrays& arrays, void* workspace,
               void* stream) const;

 private:
  PagedAttentionConfig config_;
};

}  // namespace adaptrt::cuda
