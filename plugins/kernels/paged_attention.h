#pragma once

#include <cstddef>
#include <cstdint>

#include "adaptrt/core/dtype.h"

namespace adaptrt::cuda {

/// What a PagedAttention node fixes; plugins/paged_attention.py says what it calculates.
struct PagedAttentionConfig {
  DType dtype = DType::kFloat16;  ///< of q, k, v, the KV pool and the result: float16 or bfloat16
  std::int32_t num_heads = 0;
  std::int32_t num_kv_heads = 0;  ///< divides num_heads
  std::int32_t head_dim = 0;      ///< even; 64, 80, 96, 128 and 256 have kernels for tensor cores
  float scale = 1.0F;             ///< of the scores; above 0
  std::int32_t sliding_window = 0;
  float softcap = 0.0F;  ///< scores s become softcap * tanh(s / softcap); 0: they stay as they are
};

/// The sizes of a step, which alone decide what is launched.
struct PagedAttentionSizes {
  std::int32_t tokens = 0;
  std::int32_t sequences = 0;         ///< each has at least one token
  std::int32_t max_blocks = 0;        ///< columns of the block tables
  std::int32_t tokens_per_block = 0;  ///< multiples of 16 have kernels for tensor cores
  std::int32_t rotary_half = 0;       ///< columns of cosine and sine
};

/// Addresses on the device, of the arrays of the plugin's definition with T for the config's dtype. Those of
/// T are aligned to 16 bytes.
struct PagedAttentionArrays {
  const void* q = nullptr;                     ///< T [tokens, num_heads * head_dim]
  const void* k = nullptr;                     ///< T [tokens, num_kv_heads * head_dim]
  const void* v = nullptr;                     ///< T [tokens, num_kv_heads * head_dim]
  void* kv_pool = nullptr;                     ///< T [blocks, 2, num_kv_heads, tokens_per_block, head_dim]
  const std::int32_t* block_tables = nullptr;  ///< [sequences, max_blocks]
  const std::int32_t* sequence_offsets =
      nullptr;                              ///< [sequences + 1]; tokens behind the last have no sequence
  const std::int32_t* positions = nullptr;  ///< [tokens], ascending by one within a sequence
  const float* cosine = nullptr;            ///< [tokens, rotary_half]
  const float* sine = nullptr;              ///< [tokens, rotary_half]
  void* attended = nullptr;                 ///< T [tokens, num_heads * head_dim]; none of the inputs
};

/// The PagedAttention plugin on an NVIDIA GPU: RoPE, the write of k and v to the pool, and causal attention.
///
/// A token of no sequence, or whose position lies in a block that its table gives as -1, writes nothing to
/// the pool and its result is zero. What is launched depends on the sizes alone, so that a captured graph may
/// be launched again with other tables, offsets and positions. Scores and sums are float32; RoPE's result and
/// the weights of the values are rounded to T before they are multiplied. A sequence's results do not depend
/// on the other sequences, but for their number, by which a decode's keys are split.
class PagedAttentionKernel {
 public:
  /// Throws ConfigError naming every field with a value that cannot be used.
  explicit PagedAttentionKernel(const PagedAttentionConfig& config);

  /// Bytes that enqueue needs for a step of at most so many tokens and sequences, whatever its other sizes.
  [[nodiscard]] std::size_t workspace_bytes(std::int32_t max_tokens, std::int32_t max_sequences) const;

  /// Puts the work into `stream` (a cudaStream_t). `workspace` is aligned to 16 bytes. Throws ConfigError
  /// when a size or an address cannot be used and StepError when a launch fails.
  void enqueue(const PagedAttentionSizes& sizes, const PagedAttentionArrays& arrays, void* workspace,
               void* stream) const;

 private:
  PagedAttentionConfig config_;
};

}  // namespace adaptrt::cuda
