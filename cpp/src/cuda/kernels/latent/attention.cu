#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>

#include "adaptrt/cuda/latent_kernels.h"
#include "cuda/kernels/attention/rotation.h"
#include "cuda/kernels/attention/softmax.h"
#include "cuda/kernels/attention/step.h"
#include "cuda/kernels/attention/tile_sums.h"
#include "cuda/kernels/element_type.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/ptx.h"
#include "cuda/kernels/rows/checks.h"
#include "cuda/kernels/types.h"
#include "cuda/kernels/warp_sums.h"

namespace adaptrt::cuda {
namespace {

/// A key in the pool, which is its value too. step.num_kv_heads is 1.
template <typename T>
__device__ inline T* key_in_pool(const AttentionStep& step, std::int32_t block, std::int32_t slot) {
  const std::int64_t row = static_cast<std::int64_t>(block) * step.tokens_per_block.value() + slot;
  return static_cast<T*>(step.kv_pool) + row * step.head_dim;
}

/// A block rotates the key of one token and writes it to the pool.
template <typename T>
class WriteKeys {
 public:
  using Parameters = AttentionStep;
  static constexpr int kThreads = 64;
  static constexpr int kBlocksPerMultiprocessor = 16;

  __device__ static void run(const AttentionStep& step) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const auto token = static_cast<std::int32_t>(blockIdx.x);
    const auto [sequence, position, block] =
        place_of_token(step, token, reinterpret_cast<std::int32_t*>(shared_memory()));
    if (block < 0) return;
    T* to = key_in_pool<T>(step, block, step.tokens_per_block.remainder(position));
    const T* from = kv_source<T>(step, step.key, token, 0);
    const std::int32_t units = (step.head_dim - step.rotary_half) / rows::kVector;
    for (auto unit = static_cast<std::int32_t>(threadIdx.x); unit < units; unit += kThreads) {
      rotate_unit<T, rows::kVector>(step, token, unit, from, to);
    }
  }
};

/// A block computes up to 16 heads of one token, 32 keys at a time. Its heads share the keys, which are their
/// values too, in shared memory. A tile of keys begins at a multiple of 32, and weights are relative to the
/// largest score so far, so the order of all sums follows from the token's position.
template <typename T>
class Attend {
 public:
  using Parameters = AttentionStep;
  static constexpr int kHeads = 16;
  static constexpr int kKeys = 32;
  static constexpr int kWarps = 4;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kBlocksPerMultiprocessor = 3;

  __device__ static void run(const AttentionStep& step) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const Places places(step);
    const auto token = static_cast<std::int32_t>(blockIdx.x);
    const auto first_head = static_cast<std::int32_t>(blockIdx.y) * kHeads;
    const std::int32_t heads_left = step.num_heads - first_head;
    const std::int32_t heads = heads_left < kHeads ? heads_left : kHeads;
    T* attended = static_cast<T*>(step.attended) +
                  (static_cast<std::int64_t>(token) * step.num_heads + first_head) * step.head_dim;
    const auto [sequence, position, block] =
        place_of_token(step, token, reinterpret_cast<std::int32_t*>(places.factors));
    if (block < 0) {
      for (int at = thread() * kVector; at < heads * step.head_dim; at += kThreads * kVector) {
        store_words<4>(attended + at, {});
      }
      return;
    }
    load_queries(step, places, token, first_head, heads);
    const std::int32_t visible = first_visible(step, position);
    RowTotals totals[kRowsOfWarp];
    float sums[kMostUnits][2][4] = {};
    for (std::int32_t tile = visible / kKeys * kKeys; tile <= position; tile += kKeys) {
      load_keys(step, places, sequence, tile, visible, position);
      score_keys(places);
      weigh_keys(step, places, tile, visible, position, totals);
      add_values(places, sums);
    }
    store_inverses(places, totals);
    store_sums(step, places, heads, sums, attended);
  }

  [[nodiscard]] static std::size_t shared_bytes(std::int32_t head_dim) {
    return static_cast<std::size_t>((kHeads + kKeys) * stride_of(head_dim) + kHeads * kWeightStride) *
               sizeof(T) +
           static_cast<std::size_t>(kHeads * kScoreStride + kHeads) * sizeof(float);
  }

 private:
  static constexpr int kVector = rows::kVector;
  static constexpr int kRowsOfWarp = kHeads / kWarps;
  static constexpr int kUnit = 16;  ///< columns that a warp multiplies with weights at a time
  static constexpr int kMostUnits = kMaxKeyDim / kUnit / kWarps;
  static_assert(kMostUnits * kUnit * kWarps == kMaxKeyDim && kMaxKeyDim % kKeys == 0);
  static constexpr int kScoreStride = kKeys + 4;
  /// An odd number of vectors, so that ldmatrix has no bank conflicts.
  static constexpr int kWeightStride = kKeys + kVector;

  /// Columns of a key, with those of zeros that complete a unit of two mma steps.
  [[nodiscard]] __host__ __device__ static int columns_of(std::int32_t head_dim) {
    return (head_dim + 2 * kUnit - 1) / (2 * kUnit) * (2 * kUnit);
  }
  /// Elements from a row of keys or queries to the next, an odd number of vectors.
  [[nodiscard]] __host__ __device__ static int stride_of(std::int32_t head_dim) {
    return columns_of(head_dim) + kVector;
  }

  /// Arrays in shared memory.
  struct Places {
    __device__ explicit Places(const AttentionStep& step)
        : columns(columns_of(step.head_dim)),
          stride(stride_of(step.head_dim)),
          queries(reinterpret_cast<T*>(shared_memory())),
          keys(queries + kHeads * stride),
          weights(keys + kKeys * stride),
          scores(reinterpret_cast<float*>(weights + kHeads * kWeightStride)),
          factors(scores + kHeads * kScoreStride) {}

    int columns;
    int stride;
    T* queries;      // [kHeads, stride]
    T* keys;         // [kKeys, stride]
    T* weights;      // [kHeads, kWeightStride]
    float* scores;   // [kHeads, kScoreStride]
    float* factors;  // [kHeads]
  };

  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int warp() { return thread() / kWarpSize; }
  __device__ static int lane() { return thread() % kWarpSize; }

  /// Brings the rotated queries to shared memory; rows without a head become zeros, and so do the columns
  /// after a head's.
  __device__ static void load_queries(const AttentionStep& step, const Places& places, std::int32_t token,
                                      std::int32_t first_head, std::int32_t heads) {
    const std::int32_t units = (step.head_dim - step.rotary_half) / kVector;
    for (int i = thread(); i < heads * units; i += kThreads) {
      const int row = i / units;
      rotate_unit<T, kVector>(step, token, i % units, query_source<T>(step, token, first_head + row),
                              places.queries + row * places.stride);
    }
    const int vectors = places.columns / kVector;
    for (int i = thread(); i < kHeads * vectors; i += kThreads) {
      const int row = i / vectors;
      const int column = i % vectors * kVector;
      if (row < heads && column < step.head_dim) continue;
      store_words<4>(places.queries + row * places.stride + column, {});
    }
  }

  /// Brings a tile of keys to shared memory. Keys that are not visible become zeros, because their slots may
  /// hold anything.
  __device__ static void load_keys(const AttentionStep& step, const Places& places, std::int32_t sequence,
                                   std::int32_t tile, std::int32_t visible, std::int32_t position) {
    constexpr int kThreadsOfKey = kThreads / kKeys;
    const int row = thread() / kThreadsOfKey;
    const std::int32_t key = tile + row;
    const bool is_visible = key >= visible && key <= position;
    const std::int32_t block = is_visible ? block_of(step, sequence, key) : -1;
    const T* from =
        key_in_pool<T>(step, block < 0 ? 0 : block, block < 0 ? 0 : step.tokens_per_block.remainder(key));
    T* to = places.keys + row * places.stride;
    __syncthreads();  // the previous tile was read
    for (int at = thread() % kThreadsOfKey * kVector; at < places.columns; at += kThreadsOfKey * kVector) {
      const bool valid = block >= 0 && at < step.head_dim;
      copy_async_16(to + at, from + (valid ? at : 0), valid);
    }
    commit_copies();
    wait_copies<0>();
    __syncthreads();
  }

  /// A warp multiplies all queries with eight keys.
  __device__ static void score_keys(const Places& places) {
    const T* query = places.queries + lane() % 16 * places.stride + lane() / 16 * 8;
    const T* key = places.keys + (8 * warp() + lane() % 8) * places.stride + lane() / 8 * 8;
    // Two sums, so that an instruction need not wait for the one before.
    float even[4] = {};
    float odd[4] = {};
    for (int column = 0; column < places.columns; column += 2 * kUnit) {
      std::uint32_t columns_of_keys[4];
      load_matrix_x4(columns_of_keys, key + column);
      std::uint32_t rows[4];
      load_matrix_x4(rows, query + column);
      const std::uint32_t first[2] = {columns_of_keys[0], columns_of_keys[1]};
      mma_16x8x16<T>(even, rows, first);
      load_matrix_x4(rows, query + column + kUnit);
      const std::uint32_t second[2] = {columns_of_keys[2], columns_of_keys[3]};
      mma_16x8x16<T>(odd, rows, second);
    }
    ADAPTRT_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int row = lane() / 4 + i / 2 * 8;
      places.scores[row * kScoreStride + 8 * warp() + 2 * (lane() % 4) + i % 2] = even[i] + odd[i];
    }
    __syncthreads();
  }

  /// Converts scores to weights relative to the largest score so far. A warp has four rows, and each thread
  /// one key.
  __device__ static void weigh_keys(const AttentionStep& step, const Places& places, std::int32_t tile,
                                    std::int32_t visible, std::int32_t position,
                                    RowTotals (&totals)[kRowsOfWarp]) {
    const std::int32_t key = tile + lane();
    const bool is_visible = key >= visible && key <= position;
    ADAPTRT_UNROLL
    for (int i = 0; i < kRowsOfWarp; ++i) {
      const int row = warp() * kRowsOfWarp + i;
      const float score =
          is_visible ? places.scores[row * kScoreStride + lane()] * step.scale : kMinusInfinity;
      const float maximum = fmaxf(totals[i].maximum, maximum_over_lanes(score));
      const float factor = rescale_factor(totals[i].maximum, maximum);
      const float weight = rescale_factor(score, maximum);
      totals[i] = {maximum, fmaf(totals[i].total, factor, sum_over_lanes(weight))};
      places.weights[row * kWeightStride + lane()] = from_float<T>(weight);
      if (lane() == 0) places.factors[row] = factor;
    }
    __syncthreads();
  }

  /// Adds weights * values. Units of 16 columns are distributed over the warps.
  __device__ static void add_values(const Places& places, float (&sums)[kMostUnits][2][4]) {
    const float factors[2] = {places.factors[lane() / 4], places.factors[lane() / 4 + 8]};
    std::uint32_t weights[kKeys / 16][4];
    ADAPTRT_UNROLL
    for (int i = 0; i < kKeys / 16; ++i) {
      load_matrix_x4(weights[i], places.weights + lane() % 16 * kWeightStride + lane() / 16 * 8 + 16 * i);
    }
    const T* values = places.keys + lane() % 16 * places.stride + lane() / 16 * 8;
    ADAPTRT_UNROLL
    for (int unit = 0; unit < kMostUnits; ++unit) {
      const int column = (unit * kWarps + warp()) * kUnit;
      if (column >= places.columns) break;
      ADAPTRT_UNROLL
      for (int i = 0; i < 4; ++i) {
        sums[unit][0][i] *= factors[i / 2];
        sums[unit][1][i] *= factors[i / 2];
      }
      ADAPTRT_UNROLL
      for (int i = 0; i < kKeys / 16; ++i) {
        std::uint32_t value[4];
        load_matrix_x4_transposed(value, values + 16 * i * places.stride + column);
        const std::uint32_t first[2] = {value[0], value[1]};
        const std::uint32_t second[2] = {value[2], value[3]};
        mma_16x8x16<T>(sums[unit][0], weights[i], first);
        mma_16x8x16<T>(sums[unit][1], weights[i], second);
      }
    }
  }

  __device__ static void store_inverses(const Places& places, const RowTotals (&totals)[kRowsOfWarp]) {
    __syncthreads();  // the factors of the last tile were read
    ADAPTRT_UNROLL
    for (int i = 0; i < kRowsOfWarp; ++i) {
      if (lane() == 0) places.factors[warp() * kRowsOfWarp + i] = 1.0F / totals[i].total;
    }
    __syncthreads();
  }

  __device__ static void store_sums(const AttentionStep& step, const Places& places, std::int32_t heads,
                                    const float (&sums)[kMostUnits][2][4], T* attended) {
    ADAPTRT_UNROLL
    for (int unit = 0; unit < kMostUnits; ++unit) {
      ADAPTRT_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int column = (unit * kWarps + warp()) * kUnit + 8 * half + 2 * (lane() % 4);
        if (column >= step.head_dim) break;
        ADAPTRT_UNROLL
        for (int i = 0; i < 2; ++i) {
          const int row = lane() / 4 + 8 * i;
          if (row >= heads) continue;
          const float inverse = places.factors[row];
          store_words<1>(
              attended + static_cast<std::int64_t>(row) * step.head_dim + column,
              {pack_pair<T>(sums[unit][half][2 * i] * inverse, sums[unit][half][2 * i + 1] * inverse)});
        }
      }
    }
  }
};

void check(const LatentAttention& work) {
  constexpr std::int64_t kMostOfGrid = 65535;
  rows::Checks()
      .type(work.dtype)
      .count("tokens", work.tokens)
      .count("sequences", work.sequences, work.tokens)
      .positive("num_heads", work.num_heads, kMostOfGrid)
      .vectors("key_dim", work.key_dim, kRotatedUnit, kMaxKeyDim)
      .condition(
          work.rotary_dim >= 0 && work.rotary_dim % kRotatedUnit == 0 && work.rotary_dim <= work.key_dim,
          "rotary_dim is not a multiple of 16 up to key_dim")
      .positive("tokens_per_block", work.tokens_per_block)
      .count("sliding_window", work.sliding_window)
      .condition(work.scale > 0.0F && std::isfinite(work.scale), "scale is not above 0")
      .done("LatentAttention");
  rows::Checks()
      .count("tokens * (num_heads + 1) * key_dim",
             std::int64_t{work.tokens} * (work.num_heads + 1) * (work.key_dim / rows::kVector))
      .done("LatentAttention");
}

}  // namespace

void enqueue(const LatentAttention& work, void* stream) {
  check(work);
  if (work.tokens == 0) return;
  const std::size_t element = size_of(work.dtype);
  const std::int32_t queries = work.num_heads * work.key_dim;
  const AttentionStep step{
      .query = work.qk,
      .key = static_cast<const std::byte*>(work.qk) + static_cast<std::size_t>(queries) * element,
      .value = nullptr,
      .kv_pool = work.kv_pool,
      .block_tables = work.block_tables,
      .sequence_offsets = work.sequence_offsets,
      .positions = work.positions,
      .cosine = work.cosine,
      .sine = work.sine,
      .sinks = nullptr,
      .rotated_query = nullptr,
      .attended = work.attended,
      .tokens = work.tokens,
      .sequences = work.sequences,
      .max_blocks = work.max_blocks,
      .rotary_half = work.rotary_dim / 2,
      .query_stride = queries + work.key_dim,
      .kv_stride = queries + work.key_dim,
      .num_heads = work.num_heads,
      .num_kv_heads = 1,
      .head_dim = work.key_dim,
      .sliding_window = work.sliding_window,
      .scale = work.scale * std::numbers::log2e_v<float>,
      .softcap = 0.0F,
      .exponent = 0.0F,
      .interleaved = work.interleaved,
      .int8_pool = false,
      .tokens_per_block = Divisor(work.tokens_per_block),
      .group = Divisor(work.num_heads)};
  with_element_type(work.dtype, [&]<typename T>(TypeTag<T>) {
    const auto tokens = static_cast<std::uint32_t>(work.tokens);
    launch<WriteKeys<T>>({.x = tokens, .shared_bytes = sizeof(std::int32_t), .overlaps_previous = true}, step,
                         stream);
    constexpr std::int32_t kHeads = Attend<T>::kHeads;
    launch<Attend<T>>({.x = tokens,
                       .y = static_cast<std::uint32_t>((work.num_heads + kHeads - 1) / kHeads),
                       .shared_bytes = Attend<T>::shared_bytes(work.key_dim),
                       .overlaps_previous = true},
                      step, stream);
  });
}

}  // namespace adaptrt::cuda
