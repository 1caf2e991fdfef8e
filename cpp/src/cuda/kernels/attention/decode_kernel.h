#pragma once

#include <cstdint>

#include "cuda/kernels/attention/softmax.h"
#include "cuda/kernels/attention/splits.h"
#include "cuda/kernels/attention/step.h"
#include "cuda/kernels/attention/words.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/ptx.h"
#include "cuda/kernels/types.h"

namespace adaptrt::cuda {

/// Query heads in one block that share a KV head's keys: the rows of an mma.
inline constexpr std::int32_t kDecodeRows = 16;

/// A block computes up to 16 query heads of one KV head, for one sequence and one split of its keys. Each of
/// its warps takes every fourth tile of 16 keys (for a wide head, every second one). Keys and values go from
/// global memory to registers, up to 16 bytes per thread at a time, and are multiplied in memory order. That
/// is possible because the order of an mma's inner dimension, and of its columns, is arbitrary as long as
/// both operands, or the reader of the result, use the same one.
template <typename T, int kHeadDim>
class Decode {
 public:
  struct Parameters {
    AttentionStep step;
    Splits splits;
    std::int32_t row_tiles;  // blocks that share a KV head, one per 16 of its query heads
  };
  static constexpr int kWarps = 4;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kBlocksPerMultiprocessor = 2;

  __device__ static void run(const Parameters& parameters) {
    const AttentionStep& step = parameters.step;
    const auto sequence = static_cast<std::int32_t>(blockIdx.z);
    const std::int32_t token = step.sequence_offsets[sequence];
    if (step.sequence_offsets[sequence + 1] - token != 1) return;
    const auto kv_head = static_cast<std::int32_t>(blockIdx.y) / parameters.row_tiles;
    const std::int32_t first_row = static_cast<std::int32_t>(blockIdx.y) % parameters.row_tiles * kDecodeRows;
    const std::int32_t rows_left = step.group.value() - first_row;
    const Heads heads{.first = kv_head * step.group.value() + first_row,
                      .count = rows_left < kDecodeRows ? rows_left : kDecodeRows};
    const std::int32_t position = step.positions[token];
    if (block_of(step, sequence, position) < 0) return;
    const auto split = static_cast<std::int32_t>(blockIdx.x);
    const KeyRange keys = keys_of_split(step, parameters.splits, position, split);
    if (keys.begin >= keys.end) return;

    const Shared shared;
    load_queries(step, token, heads, shared);
    __syncthreads();
    Accumulators own;
    attend(step, {sequence, kv_head, first_visible(step, position), keys}, shared, own);
    merge(own, step.scale, shared);
    if (used_splits(step, parameters.splits, position) == 1) {
      store_attended(step, token, heads, shared);
    } else {
      store_split(parameters, sequence, split, heads, shared);
    }
  }

  [[nodiscard]] static std::size_t shared_bytes() { return Shared::kBytes; }

 private:
  /// Dimensions of keys in registers at a time, and dimensions of values that a warp sums. For a wide head,
  /// two warps take the same keys and half of the values each.
  static constexpr int kChunk = kHeadDim <= 128 ? kHeadDim : 128;
  static constexpr int kChunks = kHeadDim / kChunk;
  static constexpr int kKeyWarps = kWarps / kChunks;
  static constexpr int kSteps = kChunk / 16;    // mma steps over a chunk's dimensions
  static constexpr int kKeyWords = kChunk / 8;  // words of a key's chunk per thread; 4 threads share a key
  static constexpr int kValueWords =
      kChunk / 16;  // words of a value's chunk per thread; 8 threads share a value
  static constexpr int kTileKeys = 16;

  struct Heads {
    std::int32_t first;
    std::int32_t count;
  };

  struct Task {
    std::int32_t sequence;
    std::int32_t kv_head;
    std::int32_t first_visible;
    KeyRange keys;
  };

  /// The block's shared memory.
  struct Shared {
    static constexpr int kRowFloats = kHeadDim + 4;  // stride of a row of sums: rows begin in different banks
    static constexpr std::size_t kQueryBytes = kChunks * kSteps * kWarpSize * sizeof(Vector16);
    static constexpr std::size_t kSumBytes = kDecodeRows * kRowFloats * sizeof(float);
    static constexpr std::size_t kTotalBytes = kKeyWarps * kDecodeRows * 2 * sizeof(float);
    static constexpr std::size_t kBytes = kQueryBytes + kSumBytes + kTotalBytes;

    // Fragment a of an mma, for each step and each thread of a warp.
    __device__ unsigned char* query(int mma_step, int lane) const {
      return shared_memory() + static_cast<std::size_t>(mma_step * kWarpSize + lane) * sizeof(Vector16);
    }
    // Sums of the weighted values, relative to the row's maximum.
    __device__ float* sums(int row) const {
      return reinterpret_cast<float*>(shared_memory() + kQueryBytes) + row * kRowFloats;
    }
    // Maximum score of a row among a warp's keys, in units of log2. total() is the sum of the weights
    // relative to it.
    __device__ float* maximum(int key_warp, int row) const {
      return reinterpret_cast<float*>(shared_memory() + kQueryBytes + kSumBytes) + key_warp * kDecodeRows +
             row;
    }
    __device__ float* total(int key_warp, int row) const { return maximum(kKeyWarps + key_warp, row); }
  };

  /// A warp's state for its rows lane / 4 (index 0) and lane / 4 + 8 (index 1).
  struct Accumulators {
    float maximum[2] = {kMinusInfinity, kMinusInfinity};  // of the unscaled scores
    float total[2] = {0.0F, 0.0F};                        // sum of this thread's weights
    float sums[2 * kValueWords][4] = {};                  // mma results; see add_values for the columns
  };

  __device__ static int warp() { return static_cast<int>(threadIdx.x) / kWarpSize; }
  /// Index of this warp among those that share the tiles, and of its chunk of the values.
  __device__ static int key_warp() { return warp() / kChunks; }
  __device__ static int value_chunk() { return warp() % kChunks; }
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % kWarpSize; }

  /// The first of a thread's four dimensions of a key's chunk in an mma step. Each thread holds 8 consecutive
  /// dimensions of a slab of 32, which two steps share. The last slab may have 16.
  __device__ static int key_dimension(int mma_step) {
    const int slab = mma_step / 2 * 32;
    return slab + 32 <= kChunk ? slab + 8 * (lane() % 4) + 4 * (mma_step % 2) : slab + 4 * (lane() % 4);
  }

  /// The first dimension of a value's chunk in a word of thread 0 .. 7 of the threads that share the value. 8
  /// threads share a slab of 64 dimensions; the last slab may have 16 or 32.
  __device__ static int value_dimension(int word, int thread) {
    const int slab = word / 4 * 64;
    const int width = kChunk - slab < 64 ? kChunk - slab : 64;
    return slab + thread * (width / 8) + 2 * (word % 4);
  }

  __device__ static void load_queries(const AttentionStep& step, std::int32_t token, const Heads& heads,
                                      const Shared& shared) {
    const auto* query = static_cast<const T*>(step.rotated_query) +
                        (static_cast<std::int64_t>(token) * step.num_heads + heads.first) * kHeadDim;
    for (int mma_step = warp(); mma_step < kChunks * kSteps; mma_step += kWarps) {
      const int row = lane() / 4;
      const int dimension = mma_step / kSteps * kChunk + key_dimension(mma_step % kSteps);
      Words<2> upper{};
      Words<2> lower{};
      if (row < heads.count) upper = load_words<2>(query + row * kHeadDim + dimension);
      if (row + 8 < heads.count) lower = load_words<2>(query + (row + 8) * kHeadDim + dimension);
      store_words<4>(shared.query(mma_step, lane()),
                     {upper.words[0], lower.words[0], upper.words[1], lower.words[1]});
    }
  }

  /// Loads kWords consecutive words. `from` is aligned to their size.
  template <int kWords>
  __device__ static void load_into(const T* from, std::uint32_t* to) {
    if constexpr (kWords == 4) {
      const Vector16 vector = load_read_only_16(from);
      ADAPTRT_UNROLL
      for (int i = 0; i < 4; ++i) to[i] = vector.words[i];
    } else {
      const auto vector = load_words<kWords>(from);
      ADAPTRT_UNROLL
      for (int i = 0; i < kWords; ++i) to[i] = vector.words[i];
    }
  }

  /// Loads this thread's words of keys lane / 4 and lane / 4 + 8 of a tile, whose chunk begins at `tile`.
  __device__ static void load_keys(const T* tile, std::uint32_t (&keys)[2][kKeyWords]) {
    ADAPTRT_UNROLL
    for (int i = 0; i < 2; ++i) {
      const T* key = tile + (lane() / 4 + 8 * i) * kHeadDim;
      ADAPTRT_UNROLL
      for (int word = 0; word + 4 <= kKeyWords; word += 4) {
        load_into<4>(key + key_dimension(word / 2), &keys[i][word]);
      }
      if constexpr (kKeyWords % 4 != 0)
        load_into<2>(key + key_dimension(kSteps - 1), &keys[i][kKeyWords - 2]);
    }
  }

  /// The key in a tile that a thread's value i belongs to.
  __device__ static int key_of_value(int i) { return 2 * (lane() % 4) + i % 2 + i / 2 * 8; }

  /// Loads this thread's words of the values of its four keys, whose chunk begins at `tile`.
  __device__ static void load_values(const T* tile, std::uint32_t (&values)[4][kValueWords]) {
    ADAPTRT_UNROLL
    for (int i = 0; i < 4; ++i) {
      const T* value = tile + key_of_value(i) * kHeadDim;
      ADAPTRT_UNROLL
      for (int word = 0; word + 4 <= kValueWords; word += 4) {
        load_into<4>(value + value_dimension(word, lane() / 4), &values[i][word]);
      }
      constexpr int kRest = kValueWords % 4;
      if constexpr (kRest != 0) {
        load_into<kRest>(value + value_dimension(kValueWords - kRest, lane() / 4),
                         &values[i][kValueWords - kRest]);
      }
    }
  }

  /// First key of the tile at `key`; a tile's keys are all in one block. nullptr if the table has no block.
  __device__ static const T* tile_at(const AttentionStep& step, const Task& task, std::int32_t key) {
    const std::int32_t block = block_of(step, task.sequence, key);
    if (block < 0) return nullptr;
    return static_cast<const T*>(step.kv_pool) +
           key_offset(step, block, task.kv_head, step.tokens_per_block.remainder(key));
  }

  /// Processes this warp's tiles of the split.
  __device__ static void attend(const AttentionStep& step, const Task& task, const Shared& shared,
                                Accumulators& own) {
    std::int32_t key = task.keys.begin + key_warp() * kTileKeys;
    if (key >= task.keys.end) return;
    std::uint32_t keys[2][kKeyWords];
    std::uint32_t values[4][kValueWords];
    const T* tile = tile_at(step, task, key);
    if (tile != nullptr) load_keys(tile, keys);
    while (key < task.keys.end) {
      const std::int32_t next_key = key + kKeyWarps * kTileKeys;
      const T* next_tile = next_key < task.keys.end ? tile_at(step, task, next_key) : nullptr;
      if (tile == nullptr) {
        if (next_tile != nullptr) load_keys(next_tile, keys);
      } else {
        // Prefetch: these loads run while the data loaded before is multiplied.
        load_values(tile + value_offset(step) + value_chunk() * kChunk, values);
        float scores[2][4] = {};
        ADAPTRT_UNROLL
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          add_scores(shared, chunk, keys, scores);
          const T* from = chunk + 1 < kChunks ? tile + (chunk + 1) * kChunk : next_tile;
          if (from != nullptr) load_keys(from, keys);
        }
        if (step.softcap != 0.0F) bound(scores, step);
        const KeyRange seen{task.first_visible - key, task.keys.end - key};
        if (seen.begin > 0 || seen.end < kTileKeys) hide(seen, scores, values);
        weigh(scores, step.scale, own);
        add_values(scores, values, own);
      }
      key = next_key;
      tile = next_tile;
    }
  }

  /// Adds to scores[i] the mma result of keys 8 i .. 8 i + 7 of the tile.
  __device__ static void add_scores(const Shared& shared, int chunk,
                                    const std::uint32_t (&keys)[2][kKeyWords], float (&scores)[2][4]) {
    ADAPTRT_UNROLL
    for (int mma_step = 0; mma_step < kSteps; ++mma_step) {
      const Words<4> query = load_words<4>(shared.query(chunk * kSteps + mma_step, lane()));
      ADAPTRT_UNROLL
      for (int i = 0; i < 2; ++i) {
        const std::uint32_t key[2] = {keys[i][2 * mma_step], keys[i][2 * mma_step + 1]};
        mma_16x8x16<T>(scores[i], query.words, key);
      }
    }
  }

  __device__ static void bound(float (&scores)[2][4], const AttentionStep& step) {
    ADAPTRT_UNROLL
    for (int i = 0; i < 2; ++i) {
      ADAPTRT_UNROLL
      for (float& score : scores[i]) score = bounded(score, step.softcap, step.exponent);
    }
  }

  /// Masks the tile's keys that are not visible. Their slots may hold anything, even NaN, so values become
  /// zero.
  __device__ static void hide(const KeyRange& seen, float (&scores)[2][4],
                              std::uint32_t (&values)[4][kValueWords]) {
    ADAPTRT_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (key_of_value(i) >= seen.begin && key_of_value(i) < seen.end) continue;
      scores[i / 2][i % 2] = kMinusInfinity;
      scores[i / 2][i % 2 + 2] = kMinusInfinity;
      ADAPTRT_UNROLL
      for (int word = 0; word < kValueWords; ++word) values[i][word] = 0;
    }
  }

  /// Converts scores to weights relative to the maximum score so far.
  __device__ static void weigh(float (&scores)[2][4], float scale, Accumulators& own) {
    ADAPTRT_UNROLL
    for (int half = 0; half < 2; ++half) {
      float* first = &scores[0][2 * half];
      float* second = &scores[1][2 * half];
      const float maximum = row_maximum(
          fmaxf(fmaxf(own.maximum[half], fmaxf(first[0], first[1])), fmaxf(second[0], second[1])));
      const float factor = rescale_factor(own.maximum[half], maximum, scale);
      own.maximum[half] = maximum;
      const float offset = maximum == kMinusInfinity ? 0.0F : maximum * scale;
      ADAPTRT_UNROLL
      for (int i = 0; i < 2; ++i) {
        first[i] = power_of_two(first[i] * scale - offset);
        second[i] = power_of_two(second[i] * scale - offset);
      }
      own.total[half] = own.total[half] * factor + ((first[0] + first[1]) + (second[0] + second[1]));
      ADAPTRT_UNROLL
      for (int column = 0; column < 2 * kValueWords; ++column) {
        own.sums[column][2 * half] *= factor;
        own.sums[column][2 * half + 1] *= factor;
      }
    }
  }

  /// sums += weights * values. The columns of result 2 i are the first elements of word i of the threads'
  /// values, those of result 2 i + 1 the second elements.
  __device__ static void add_values(const float (&weights)[2][4],
                                    const std::uint32_t (&values)[4][kValueWords], Accumulators& own) {
    const std::uint32_t rounded[4] = {
        pack_pair<T>(weights[0][0], weights[0][1]), pack_pair<T>(weights[0][2], weights[0][3]),
        pack_pair<T>(weights[1][0], weights[1][1]), pack_pair<T>(weights[1][2], weights[1][3])};
    ADAPTRT_UNROLL
    for (int word = 0; word < kValueWords; ++word) {
      const std::uint32_t first[2] = {low_halves(values[0][word], values[1][word]),
                                      low_halves(values[2][word], values[3][word])};
      const std::uint32_t second[2] = {high_halves(values[0][word], values[1][word]),
                                       high_halves(values[2][word], values[3][word])};
      mma_16x8x16<T>(own.sums[2 * word], rounded, first);
      mma_16x8x16<T>(own.sums[2 * word + 1], rounded, second);
    }
  }

  __device__ static std::uint32_t low_halves(std::uint32_t first, std::uint32_t second) {
    return (first & 0xffffU) | (second << 16);
  }
  __device__ static std::uint32_t high_halves(std::uint32_t first, std::uint32_t second) {
    return (first >> 16) | (second & 0xffff0000U);
  }

  /// Adds the warps' sums in shared memory, warp by warp, relative to the block's maximum.
  __device__ static void merge(const Accumulators& own, float scale, const Shared& shared) {
    const int row = lane() / 4;
    ADAPTRT_UNROLL
    for (int half = 0; half < 2; ++half) {
      const float total = row_sum(own.total[half]);
      if (lane() % 4 == 0 && value_chunk() == 0) {
        *shared.maximum(key_warp(), row + 8 * half) = own.maximum[half] * scale;
        *shared.total(key_warp(), row + 8 * half) = total;
      }
    }
    __syncthreads();
    for (int turn = 0; turn < kKeyWarps; ++turn) {
      if (key_warp() == turn) {
        ADAPTRT_UNROLL
        for (int half = 0; half < 2; ++half) {
          float* sums = shared.sums(row + 8 * half);
          const float factor = rescale_factor(*shared.maximum(key_warp(), row + 8 * half),
                                              block_maximum(shared, row + 8 * half));
          ADAPTRT_UNROLL
          for (int column = 0; column < 2 * kValueWords; ++column) {
            ADAPTRT_UNROLL
            for (int i = 0; i < 2; ++i) {
              const int dimension =
                  value_chunk() * kChunk + value_dimension(column / 2, 2 * (lane() % 4) + i) + column % 2;
              const float sum = own.sums[column][2 * half + i] * factor;
              sums[dimension] = turn == 0 ? sum : sums[dimension] + sum;
            }
          }
        }
      }
      __syncthreads();
    }
  }

  __device__ static float block_maximum(const Shared& shared, int row) {
    float maximum = *shared.maximum(0, row);
    ADAPTRT_UNROLL
    for (int i = 1; i < kKeyWarps; ++i) maximum = fmaxf(maximum, *shared.maximum(i, row));
    return maximum;
  }

  __device__ static float block_total(const Shared& shared, int row) {
    const float maximum = block_maximum(shared, row);
    float total = 0.0F;
    ADAPTRT_UNROLL
    for (int i = 0; i < kKeyWarps; ++i) {
      total += *shared.total(i, row) * rescale_factor(*shared.maximum(i, row), maximum);
    }
    return total;
  }

  __device__ static T* attended_rows(const AttentionStep& step, std::int32_t token, const Heads& heads) {
    return static_cast<T*>(step.attended) +
           (static_cast<std::int64_t>(token) * step.num_heads + heads.first) * kHeadDim;
  }

  __device__ static void store_attended(const AttentionStep& step, std::int32_t token, const Heads& heads,
                                        const Shared& shared) {
    T* out = attended_rows(step, token, heads);
    for (int at = static_cast<int>(threadIdx.x) * 8; at < heads.count * kHeadDim; at += kThreads * 8) {
      const int row = at / kHeadDim;
      const float* sums = shared.sums(row) + at % kHeadDim;
      const float factor = 1.0F / block_total(shared, row);
      Words<4> words;
      ADAPTRT_UNROLL
      for (int i = 0; i < 4; ++i)
        words.words[i] = pack_pair<T>(sums[2 * i] * factor, sums[2 * i + 1] * factor);
      store_words(out + at, words);
    }
  }

  __device__ static void store_split(const Parameters& parameters, std::int32_t sequence, std::int32_t split,
                                     const Heads& heads, const Shared& shared) {
    const Splits& splits = parameters.splits;
    for (int at = static_cast<int>(threadIdx.x); at < heads.count * kHeadDim; at += kThreads) {
      const int row = at / kHeadDim;
      const int dimension = at % kHeadDim;
      const std::int64_t index = split_index(parameters.step, splits, sequence, heads.first + row) + split;
      splits.sums[index * kHeadDim + dimension] = shared.sums(row)[dimension];
      if (dimension < 2) {
        splits.totals[2 * index + dimension] =
            dimension == 0 ? block_maximum(shared, row) : block_total(shared, row);
      }
    }
  }
};

}  // namespace adaptrt::cuda
