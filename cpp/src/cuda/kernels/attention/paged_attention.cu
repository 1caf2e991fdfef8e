#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numbers>
#include <span>
#include <string>

#include "adaptrt/core/error.h"
#include "adaptrt/cuda/paged_attention_kernel.h"
#include "cuda/kernels/attention/any_size.h"
#include "cuda/kernels/attention/decode.h"
#include "cuda/kernels/attention/hopper_prefill.h"
#include "cuda/kernels/attention/instantiate.h"
#include "cuda/kernels/attention/prefill.h"
#include "cuda/kernels/attention/rotate_and_write.h"
#include "cuda/kernels/hopper/device.h"

namespace adaptrt::cuda {
namespace {

/// Alignment of the parts of a workspace.
constexpr std::size_t kAlignment = 256;

constexpr std::int32_t kMostHeadDim = 4096;
/// Maximum blocks of a grid in y and in z.
constexpr std::int32_t kMostBlocks = 65535;
/// Tokens of a KV block that the tensor core kernels process at once.
constexpr std::int32_t kTokensTogether = 16;
/// Elements that a thread loads at once.
constexpr std::int32_t kWideElements = 8;

constexpr std::size_t align(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

std::size_t query_bytes(const PagedAttentionConfig& config, std::int32_t tokens) {
  return align(static_cast<std::size_t>(tokens) * static_cast<std::size_t>(config.num_heads) *
               static_cast<std::size_t>(config.head_dim) * size_of(config.dtype));
}

/// Adds a problem unless least <= value <= most.
void check_range(Problems& problems, const char* name, std::int64_t value, std::int64_t least,
                 std::int64_t most) {
  if (value >= least && value <= most) return;
  problems.add(std::string(name) + " is " + std::to_string(value) + "; it must be " + std::to_string(least) +
               " to " + std::to_string(most));
}

void check_hopper_prefill(Problems& problems, const PagedAttentionConfig& config) {
  if (config.int8_pool) problems.add("hopper_prefill is true for an int8 pool; it needs a pool of dtype");
  if (!has_hopper_prefill(config.head_dim)) {
    problems.add("hopper_prefill is true for head_dim " + std::to_string(config.head_dim) +
                 "; it needs 64, 96 or 128");
  }
  if (!has_hopper_instructions()) {
    problems.add("hopper_prefill is true; it needs a GPU of compute capability 9.0");
  }
}

void check(const PagedAttentionConfig& config) {
  Problems problems;
  if (config.dtype == DType::kFloat32) problems.add("dtype is float32; it must be float16 or bfloat16");
  check_range(problems, "num_heads", config.num_heads, 1, kMostBlocks);
  check_range(problems, "num_kv_heads", config.num_kv_heads, 1, kMostBlocks);
  if (config.num_heads >= 1 && config.num_kv_heads >= 1 && config.num_heads % config.num_kv_heads != 0) {
    problems.add("num_heads " + std::to_string(config.num_heads) + " is not a multiple of num_kv_heads " +
                 std::to_string(config.num_kv_heads));
  }
  check_range(problems, "head_dim", config.head_dim, 2, kMostHeadDim);
  if (config.head_dim % 2 != 0)
    problems.add("head_dim is " + std::to_string(config.head_dim) + "; it must be even");
  if (config.int8_pool && config.head_dim % kWideElements != 0) {
    problems.add("head_dim is " + std::to_string(config.head_dim) +
                 "; with an int8 pool it must be a multiple of " + std::to_string(kWideElements));
  }
  if (!(config.scale > 0.0F) || !std::isfinite(config.scale)) {
    problems.add("scale is " + std::to_string(config.scale) + "; it must be above 0");
  }
  check_range(problems, "sliding_window", config.sliding_window, 0, std::numeric_limits<std::int32_t>::max());
  check_range(problems, "chunk", config.chunk, 0, std::numeric_limits<std::int32_t>::max());
  if (config.chunk > 0 && config.sliding_window > 0) {
    problems.add("chunk is " + std::to_string(config.chunk) + " with a sliding_window; expected one of them");
  }
  if (!std::isfinite(config.query_scaling_beta)) {
    problems.add("query_scaling_beta is " + std::to_string(config.query_scaling_beta) +
                 "; it must be finite");
  }
  check_range(problems, "query_scaling_length", config.query_scaling_length, 1,
              std::numeric_limits<std::int32_t>::max());
  // Its sum with a position must fit in 32 bits.
  check_range(problems, "query_scaling_offset", config.query_scaling_offset, 0,
              std::numeric_limits<std::int32_t>::max() / 2);
  if (!(config.softcap >= 0.0F) || !std::isfinite(config.softcap)) {
    problems.add("softcap is " + std::to_string(config.softcap) + "; it must not be below 0");
  }
  if (config.hopper_prefill) check_hopper_prefill(problems, config);
  problems.throw_if_any<ConfigError>("PagedAttention kernel");
}

void check(const PagedAttentionConfig& config, const PagedAttentionSizes& sizes) {
  constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
  Problems problems;
  check_range(problems, "tokens", sizes.tokens, 1, kMost / config.num_heads);
  check_range(problems, "sequences", sizes.sequences, 1, std::min(sizes.tokens, kMostBlocks));
  check_range(problems, "max_blocks", sizes.max_blocks, 1, kMost);
  check_range(problems, "tokens_per_block", sizes.tokens_per_block, 1, kMost);
  if (config.hopper_prefill && sizes.tokens_per_block % kTokensTogether != 0) {
    problems.add("tokens_per_block is " + std::to_string(sizes.tokens_per_block) +
                 "; with hopper_prefill it must be a multiple of " + std::to_string(kTokensTogether));
  }
  // Positions, and their sums with a tile's number of keys, must fit in 32 bits.
  check_range(problems, "max_blocks * tokens_per_block",
              static_cast<std::int64_t>(sizes.max_blocks) * sizes.tokens_per_block, 1, kMost / 2);
  check_range(problems, "rotary_half", sizes.rotary_half, 0, config.head_dim / 2);
  const auto check_stride = [&](const char* name, std::int32_t stride, std::int32_t heads) {
    check_range(problems, name, stride, std::int64_t{heads} * config.head_dim, kMost);
    if (config.head_dim % kWideElements == 0 && stride % kWideElements != 0) {
      problems.add(std::string(name) + " is " + std::to_string(stride) + "; it must be a multiple of " +
                   std::to_string(kWideElements));
    }
  };
  check_stride("q_stride", sizes.q_stride, config.num_heads);
  check_stride("kv_stride", sizes.kv_stride, config.num_kv_heads);
  problems.throw_if_any<ConfigError>("a PagedAttention kernel's step");
}

void check(const PagedAttentionConfig& config, const PagedAttentionSizes& sizes,
           const PagedAttentionArrays& arrays, const void* workspace) {
  constexpr std::uintptr_t kPiece = 16;  // bytes that a thread loads at once
  const std::uintptr_t of_rows = config.head_dim % kWideElements == 0 ? kPiece : size_of(config.dtype);
  Problems problems;
  const auto check_address = [&](const char* name, const void* address, std::uintptr_t alignment) {
    const auto value = reinterpret_cast<std::uintptr_t>(address);
    if (value != 0 && value % alignment == 0) return;
    problems.add("the address of " + std::string(name) + " is " + std::to_string(value) +
                 "; it must be a multiple of " + std::to_string(alignment) + " and not 0");
  };
  check_address("q", arrays.q, of_rows);
  if (arrays.k != nullptr || arrays.v != nullptr) {
    check_address("k", arrays.k, of_rows);
    check_address("v", arrays.v, of_rows);
  }
  check_address("kv_pool", arrays.kv_pool, kPiece);
  check_address("block_tables", arrays.block_tables, sizeof(std::int32_t));
  check_address("sequence_offsets", arrays.sequence_offsets, sizeof(std::int32_t));
  check_address("positions", arrays.positions, sizeof(std::int32_t));
  if (sizes.rotary_half > 0) {
    check_address("cosine", arrays.cosine, sizeof(float));
    check_address("sine", arrays.sine, sizeof(float));
  }
  if (arrays.sinks != nullptr) check_address("sinks", arrays.sinks, sizeof(float));
  if (arrays.counters != nullptr) check_address("counters", arrays.counters, sizeof(std::uint32_t));
  check_address("attended", arrays.attended, kPiece);
  check_address("the workspace", workspace, kPiece);
  problems.throw_if_any<ConfigError>("a PagedAttention kernel's step");
}

}  // namespace

PagedAttentionKernel::PagedAttentionKernel(const PagedAttentionConfig& config) : config_(config) {
  check(config);
}

std::size_t PagedAttentionKernel::workspace_bytes(std::int32_t max_tokens, std::int32_t max_sequences) const {
  return query_bytes(config_, max_tokens) + split_bytes(config_.num_heads, config_.head_dim, max_sequences) +
         counter_bytes(max_sequences);
}

std::size_t PagedAttentionKernel::counter_bytes(std::int32_t max_sequences) const {
  return static_cast<std::size_t>(split_counters(config_.num_heads, config_.num_kv_heads, max_sequences)) *
         sizeof(std::uint32_t);
}

void PagedAttentionKernel::enqueue(const PagedAttentionSizes& sizes, const PagedAttentionArrays& arrays,
                                   void* workspace, void* stream) const {
  check(config_, sizes);
  check(config_, sizes, arrays, workspace);
  const float softcap = config_.softcap / config_.scale;  // softcap of the unscaled products
  const AttentionStep step{.query = arrays.q,
                           .key = arrays.k,
                           .value = arrays.v,
                           .kv_pool = arrays.kv_pool,
                           .block_tables = arrays.block_tables,
                           .sequence_offsets = arrays.sequence_offsets,
                           .positions = arrays.positions,
                           .cosine = arrays.cosine,
                           .sine = arrays.sine,
                           .sinks = arrays.sinks,
                           .rotated_query = workspace,
                           .attended = arrays.attended,
                           .tokens = sizes.tokens,
                           .sequences = sizes.sequences,
                           .max_blocks = sizes.max_blocks,
                           .rotary_half = sizes.rotary_half,
                           .query_stride = sizes.q_stride,
                           .kv_stride = sizes.kv_stride,
                           .num_heads = config_.num_heads,
                           .num_kv_heads = config_.num_kv_heads,
                           .head_dim = config_.head_dim,
                           .sliding_window = config_.sliding_window,
                           .scale = config_.scale * std::numbers::log2e_v<float>,
                           .softcap = softcap,
                           .exponent = softcap == 0.0F ? 0.0F : 2.0F * std::numbers::log2e_v<float> / softcap,
                           .interleaved = config_.interleaved,
                           .int8_pool = config_.int8_pool,
                           .tokens_per_block = Divisor(sizes.tokens_per_block),
                           .group = Divisor(config_.num_heads / config_.num_kv_heads),
                           .has_chunks = config_.chunk > 0,
                           .chunk = Divisor(std::max(config_.chunk, 1)),
                           .query_scaling_beta = config_.query_scaling_beta,
                           .query_scaling_offset = config_.query_scaling_offset,
                           .query_scaling_length = Divisor(config_.query_scaling_length)};
  const bool has_tensor_core_kernels = with_head_dim(config_.head_dim, [](auto) {});
  const bool any_size = !has_tensor_core_kernels || sizes.tokens_per_block % kTokensTogether != 0;
  if (any_size) {
    launch_rotate_and_write(step, {}, config_.dtype, stream);
    launch_any_size(step, config_.dtype, stream);
    return;
  }
  Splits splits = plan_splits(step);
  if (splits.count > 1) {
    splits.sums =
        reinterpret_cast<float*>(static_cast<std::byte*>(workspace) + query_bytes(config_, sizes.tokens));
    splits.totals = splits.sums + static_cast<std::int64_t>(sizes.sequences) * splits.count *
                                      config_.num_heads * config_.head_dim;
    splits.counters = arrays.counters;
  }
  // Without counters of the caller, which are zero, they are in the workspace and set to zero here.
  std::span<std::uint32_t> own_counters;
  if (splits.lanes > 1 && arrays.counters == nullptr) {
    splits.counters = reinterpret_cast<std::uint32_t*>(
        splits.totals + static_cast<std::int64_t>(sizes.sequences) * splits.count * config_.num_heads * 2);
    own_counters = {splits.counters, static_cast<std::size_t>(split_counters(
                                         config_.num_heads, config_.num_kv_heads, sizes.sequences))};
  }
  const bool decode_rotates = decode_can_rotate(step) && own_counters.empty();
  if (!decode_rotates) launch_rotate_and_write(step, own_counters, config_.dtype, stream);
  // Every sequence has a token. So if there are as many tokens as sequences, all are decodes. A single
  // sequence may be a decode or a prefill.
  if (sizes.tokens > sizes.sequences) {
    const auto launch = config_.hopper_prefill ? launch_hopper_prefill : launch_prefill;
    launch(step, config_.dtype, stream);
  }
  if (sizes.sequences > 1 || sizes.tokens == 1) {
    launch_decode(step, splits, decode_rotates, config_.dtype, stream);
  }
}

}  // namespace adaptrt::cuda
