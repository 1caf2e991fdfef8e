#pragma once

#include <cstdint>

#include "cuda/kernels/attention/int8_rows.h"
#include "cuda/kernels/attention/rotation.h"
#include "cuda/kernels/attention/splits.h"
#include "cuda/kernels/attention/step.h"
#include "cuda/kernels/attention/tile_sums.h"
#include "cuda/kernels/attention/words.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/ptx.h"
#include "cuda/kernels/types.h"

namespace adaptrt::cuda {

/// Query heads in one block that share a KV head's keys: the rows of an mma.
inline constexpr std::int32_t kDecodeRows = 16;

/// A block computes up to 16 query heads of one KV head, for some splits of a sequence's keys. In each round
/// every warp takes one tile of keys: it copies chunks of 16 keys, and then of 16 values, to its own stages
/// of shared memory, ahead of their use, and no barrier of the block is needed. At the end of a round the
/// block merges the warps' tiles, in order.
template <typename T, int kHeadDim, KvFormat kFormat>
class Decode {
 public:
  struct Parameters {
    AttentionStep step;
    Splits splits;
    std::int32_t row_tiles;  // blocks that share a KV head, one per 16 of its query heads
    bool rotates;            // this kernel does RotateAndWrite's work; all sequences have one token
  };
  static constexpr int kWarps = kHeadDim < 128 ? 8 : 4;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kBlocksPerMultiprocessor = 2;

  __device__ static void run(const Parameters& parameters) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const AttentionStep& step = parameters.step;
    const auto sequence = static_cast<std::int32_t>(blockIdx.z);
    const std::int32_t token = step.sequence_offsets[sequence];
    if (step.sequence_offsets[sequence + 1] - token != 1) return;
    const auto kv_head = static_cast<std::int32_t>(blockIdx.y) / parameters.row_tiles;
    const std::int32_t first_row = static_cast<std::int32_t>(blockIdx.y) % parameters.row_tiles * kDecodeRows;
    const std::int32_t rows_left = step.group.value() - first_row;
    const std::int32_t position = step.positions[token];
    const std::int32_t newest_block = block_of(step, sequence, position);
    const SplitRange range = splits_of<kKeys>(step, position);
    const Task found{.token = token,
                     .sequence = sequence,
                     .kv_head = kv_head,
                     .first_head = kv_head * step.group.value() + first_row,
                     .num_heads = rows_left < kDecodeRows ? rows_left : kDecodeRows,
                     .position = position,
                     .visible = first_visible(step, position),
                     .splits = range};
    const auto lane_of_splits = static_cast<std::int32_t>(blockIdx.x);
    if (newest_block < 0) {
      if (parameters.rotates && lane_of_splits == 0) clear(step, found);
      return;
    }
    if (lane_of_splits >= range.count()) return;
    if (parameters.rotates) {
      // The warp that will read the newest key writes it, so no other warp must wait for it.
      const bool has_newest = (range.count() - 1 - lane_of_splits) % parameters.splits.lanes == 0;
      if (has_newest && warp() == position / kKeys % kWarps) write_newest(step, found, newest_block);
    }
    Task& task = shared_task();
    if (threadIdx.x == 0) task = found;
    load_queries(parameters, found);
    // Registers are scarce, so the split's number is computed from the key when it is needed.
    std::int32_t key = (task.splits.first + lane_of_splits) * task.splits.keys;
    while (key <= task.position) {
      Sums sums;
      do {
        if (key + kWarps * kKeys > task.visible) add_round(step, task, key, sums);
        key += kWarps * kKeys;
      } while (key <= task.position && key % task.splits.keys != 0);
      if (task.splits.count() == 1) {
        store_attended(step, task, sums);
      } else {
        store_split(parameters, task, (key - 1) / task.splits.keys - task.splits.first, sums);
      }
      // The begin of the block's next split.
      key = ((key - 1) / task.splits.keys + parameters.splits.lanes) * task.splits.keys;
    }
  }

  [[nodiscard]] static std::size_t shared_bytes() {
    return kStageBytes + kQueryBytes + kTotalBytes + sizeof(Task);
  }

 private:
  static constexpr int kKeys = kTileKeys<kHeadDim>;
  static_assert(kSplitTiles % kWarps == 0);
  static constexpr int kGroup = 16;  // keys of a chunk; a KV block's size is a multiple of it
  static constexpr int kGroups = kKeys / kGroup;
  /// Dimensions of a chunk. A wide head has two halves.
  static constexpr int kChunk = kHeadDim <= 128 ? kHeadDim : 128;
  static constexpr int kHalves = kHeadDim / kChunk;
  static constexpr int kChunks = 2 * kGroups * kHalves;  // of a tile: its keys, then its values
  static constexpr int kPieces = kChunk / 8;             // 16-byte pieces of a chunk's row
  static constexpr int kSteps = kChunk / 16;             // mma steps over a chunk's dimensions
  static constexpr int kColumns = kHeadDim / 8;

  /// Stride of a chunk's row: an odd number of 16-byte pieces, so that ldmatrix has no bank conflicts.
  static constexpr int kRowElements = kChunk + 8;
  static constexpr int kStageElements = kGroup * kRowElements;
  /// For 128 dimensions, 2 blocks x 4 warps x 4 stages x 4 KiB are in flight on a multiprocessor.
  static constexpr int kStages = kChunk == 64 || kChunk == 128 ? 4 : 3;
  static constexpr std::size_t kStageBytes = std::size_t{kWarps} * kStages * kStageElements * sizeof(T);
  static constexpr int kQueryElements = kHeadDim + 8;  // of a row
  static constexpr std::size_t kQueryBytes = std::size_t{kDecodeRows} * kQueryElements * sizeof(T);
  static constexpr std::size_t kTotalBytes = std::size_t{kWarps} * kDecodeRows * sizeof(RowTotals);
  static constexpr int kSumElements = kHeadDim + 4;  // of a row of a tile's sums
  static_assert(std::size_t{kDecodeRows} * kSumElements * sizeof(float) <=
                    std::size_t{kStages} * kStageElements * sizeof(T),
                "a warp's sums use the memory of its stages");

  struct Task {
    std::int32_t token;
    std::int32_t sequence;
    std::int32_t kv_head;
    std::int32_t first_head;
    std::int32_t num_heads;
    std::int32_t position;
    std::int32_t visible;  // the first key that the token sees
    SplitRange splits;
  };

  /// A thread's part of the block's sums: pairs of columns of one row.
  static constexpr int kRowThreads = kThreads / kDecodeRows;
  static constexpr int kPairs = (kHeadDim / 2 + kRowThreads - 1) / kRowThreads;
  struct Sums {
    RowTotals totals;
    float values[kPairs][2] = {};
  };
  __device__ static int own_row() { return static_cast<int>(threadIdx.x) / kRowThreads; }
  __device__ static int column_of_pair(int pair) {
    return (pair * kRowThreads + static_cast<int>(threadIdx.x) % kRowThreads) * 2;
  }

  __device__ static int warp() { return static_cast<int>(threadIdx.x) / kWarpSize; }
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % kWarpSize; }

  __device__ static T* stage(int warp, int index) {
    return reinterpret_cast<T*>(shared_memory()) + (warp * kStages + index) * kStageElements;
  }
  /// A 16-byte piece of a row of a chunk.
  __device__ static T* piece(T* chunk, int row, int index) { return chunk + row * kRowElements + 8 * index; }
  __device__ static T* query(int row) {
    return reinterpret_cast<T*>(shared_memory() + kStageBytes) + row * kQueryElements;
  }
  __device__ static RowTotals* totals(int warp, int row) {
    return reinterpret_cast<RowTotals*>(shared_memory() + kStageBytes + kQueryBytes) + warp * kDecodeRows +
           row;
  }
  /// In shared memory because registers are scarce.
  __device__ static Task& shared_task() {
    return *reinterpret_cast<Task*>(shared_memory() + kStageBytes + kQueryBytes + kTotalBytes);
  }
  /// An element of a warp's sums, in the memory of its stages.
  __device__ static float* sum(int warp, int row, int column) {
    return reinterpret_cast<float*>(stage(warp, 0)) + row * kSumElements + column;
  }

  /// Sets the result of a token that attends to nothing to zero.
  __device__ static void clear(const AttentionStep& step, const Task& task) {
    for (int at = static_cast<int>(threadIdx.x) * 8; at < task.num_heads * kHeadDim; at += kThreads * 8) {
      store_words<4>(attended_rows(step, task) + at, {});
    }
  }

  /// Warp: rotates the newest key, and writes it and its value to the pool.
  __device__ static void write_newest(const AttentionStep& step, const Task& task, std::int32_t block) {
    if constexpr (kFormat == KvFormat::kInt8) {
      const std::int32_t slot = step.tokens_per_block.remainder(task.position);
      write_int8_key<T, 8>(step, task.token, task.kv_head, int8_row(step, block, 0, task.kv_head, slot));
      write_int8_value<T, 8>(step, task.token, task.kv_head, int8_row(step, block, 1, task.kv_head, slot));
      __syncwarp();
      return;
    }
    T* key = static_cast<T*>(step.kv_pool) +
             key_offset(step, block, task.kv_head, step.tokens_per_block.remainder(task.position));
    const T* key_source = kv_source<T>(step, step.key, task.token, task.kv_head);
    const T* source = kv_source<T>(step, step.value, task.token, task.kv_head);
    for (int unit = lane(); unit < kHeadDim / 8; unit += kWarpSize) {
      store_words(key + value_offset(step) + 8 * unit, load_words<4>(source + 8 * unit));
      if (unit < (kHeadDim - step.rotary_half) / 8) {
        rotate_unit<T, 8>(step, task.token, unit, key_source, key);
      }
    }
    __syncwarp();
  }

  /// Brings the rotated queries to shared memory; rows without a head become zeros.
  __device__ static void load_queries(const Parameters& parameters, const Task& task) {
    const AttentionStep& step = parameters.step;
    if (parameters.rotates) {
      const std::int32_t units = (kHeadDim - step.rotary_half) / 8;
      const float factor = query_factor(step, task.position);
      for (int i = static_cast<int>(threadIdx.x); i < task.num_heads * units; i += kThreads) {
        const int row = i / units;
        rotate_query_unit<T, 8>(step, task.token, factor, i % units,
                                query_source<T>(step, task.token, task.first_head + row), query(row));
      }
    }
    const T* from = static_cast<const T*>(step.rotated_query) +
                    (static_cast<std::int64_t>(task.token) * step.num_heads + task.first_head) * kHeadDim;
    for (int i = static_cast<int>(threadIdx.x); i < kDecodeRows * (kHeadDim / 8); i += kThreads) {
      const int row = i / (kHeadDim / 8);
      const int element = i % (kHeadDim / 8) * 8;
      if (row >= task.num_heads) {
        store_words<4>(query(row) + element, {});
      } else if (!parameters.rotates) {
        store_words(query(row) + element, load_words<4>(from + row * kHeadDim + element));
      }
    }
    __syncthreads();
  }

  /// Adds the tiles of a round, which begins at key `round`.
  __device__ static void add_round(const AttentionStep& step, const Task& task, std::int32_t round,
                                   Sums& sums) {
    const std::int32_t tile = round + warp() * kKeys;
    if (tile <= task.position && tile + kKeys > task.visible) attend(step, task, tile);
    __syncthreads();
    ADAPTRT_NO_UNROLL
    for (int i = 0; i < kWarps; ++i) {
      const std::int32_t key = round + i * kKeys;
      if (key + kKeys <= task.visible) continue;
      if (key > task.position || own_row() >= task.num_heads) break;
      const MergeFactors factors = merge_totals(sums.totals, *totals(i, own_row()));
      ADAPTRT_UNROLL
      for (int pair = 0; pair < kPairs; ++pair) {
        if (column_of_pair(pair) >= kHeadDim) break;
        const float* part = sum(i, own_row(), column_of_pair(pair));
        sums.values[pair][0] = merge_value(sums.values[pair][0], part[0], factors);
        sums.values[pair][1] = merge_value(sums.values[pair][1], part[1], factors);
      }
    }
    __syncthreads();  // before the next round's copies overwrite the tiles' sums
  }

  /// Warp: computes a tile's sums.
  __device__ static void attend(const AttentionStep& step, const Task& task, std::int32_t tile) {
    // Lane i looks up the block of the tile's group i of 16 keys.
    const std::int32_t group = tile + lane() % kGroups * kGroup;
    const std::int32_t own_block =
        group <= task.position && group + kGroup > task.visible ? block_of(step, task.sequence, group) : -1;
    float scores[kKeys / 8][4] = {};
    std::uint32_t weights[kGroups][4];
    float values[kColumns][4] = {};
    ADAPTRT_UNROLL
    for (int chunk = 0; chunk < kStages; ++chunk) copy_chunk(step, task, tile, own_block, chunk);
    ADAPTRT_UNROLL
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      wait_copies<kStages - 1>();
      __syncwarp();
      T* data = stage(warp(), chunk % kStages);
      if (chunk < kChunks / 2) {
        add_scores(data, chunk / kHalves, chunk % kHalves, scores);
      } else {
        const int index = chunk - kChunks / 2;
        if (index == 0) weigh(step, task, tile, scores, weights);
        add_values(data, index / kGroups, weights[index % kGroups], values);
      }
      __syncwarp();  // all lanes have read the stage
      copy_chunk(step, task, tile, own_block, chunk + kStages);
    }
    store_tile(task, values);
  }

  /// Starts copying a chunk of the tile to its stage. Keys that are not visible become zeros, because their
  /// slots may hold anything.
  __device__ static void copy_chunk(const AttentionStep& step, const Task& task, std::int32_t tile,
                                    std::int32_t own_block, int chunk) {
    if (chunk < kChunks) {
      const bool is_value = chunk >= kChunks / 2;
      const int index = chunk % (kChunks / 2);
      const int group = is_value ? index % kGroups : index / kHalves;
      const int half = is_value ? index / kGroups : index % kHalves;
      const std::int32_t block = __shfl_sync(kAllLanes, own_block, group);
      const std::int32_t first = tile + group * kGroup;
      T* to = stage(warp(), chunk % kStages);
      if constexpr (kFormat == KvFormat::kInt8) {
        load_int8(step, task, first, block, is_value, half, to);
        commit_copies();
        return;
      }
      const T* from = static_cast<const T*>(step.kv_pool);
      if (block >= 0) {
        from += key_offset(step, block, task.kv_head, step.tokens_per_block.remainder(first)) +
                (is_value ? value_offset(step) : 0) + half * kChunk;
      }
      ADAPTRT_UNROLL
      for (int row = lane() / 4; row < kGroup; row += 8) {
        const std::int32_t key = first + row;
        const bool valid = block >= 0 && key >= task.visible && key <= task.position;
        ADAPTRT_UNROLL
        for (int i = lane() % 4; i < kPieces; i += 4) {
          copy_async_16(piece(to, row, i), from + (row * kHeadDim + 8 * i), valid);
        }
      }
    }
    commit_copies();
  }

  /// The same of an int8 pool, without copies in flight: other warps load while this one waits.
  __device__ static void load_int8(const AttentionStep& step, const Task& task, std::int32_t first,
                                   std::int32_t block, bool is_value, int half, T* to) {
    const std::int32_t slot = step.tokens_per_block.remainder(first);
    const Int8Row rows = int8_row(step, block < 0 ? 0 : block, is_value ? 1 : 0, task.kv_head, slot);
    ADAPTRT_UNROLL
    for (int row = lane() / 4; row < kGroup; row += 8) {
      const std::int32_t key = first + row;
      const bool valid = block >= 0 && key >= task.visible && key <= task.position;
      const float scale = valid ? rows.scale[row] : 0.0F;
      const std::int8_t* from = rows.elements + row * kHeadDim + half * kChunk;
      ADAPTRT_UNROLL
      for (int i = lane() % 4; i < kPieces; i += 4) {
        store_words(piece(to, row, i), valid ? dequantized<T>(from + 8 * i, scale) : Words<4>{});
      }
    }
  }

  /// Adds the products of the queries with half `half` of a group's keys.
  __device__ static void add_scores(T* keys, int group, int half, float (&scores)[kKeys / 8][4]) {
    const T* query_row = query(lane() % 16) + lane() / 16 * 8 + half * kChunk;
    const int key_row = lane() / 16 * 8 + lane() % 8;
    ADAPTRT_UNROLL
    for (int mma_step = 0; mma_step < kSteps; ++mma_step) {
      std::uint32_t rows[4];
      load_matrix_x4(rows, query_row + 16 * mma_step);
      std::uint32_t key[4];
      load_matrix_x4(key, piece(keys, key_row, 2 * mma_step + lane() / 8 % 2));
      const std::uint32_t first[2] = {key[0], key[1]};
      const std::uint32_t second[2] = {key[2], key[3]};
      mma_16x8x16<T>(scores[2 * group], rows, first);
      mma_16x8x16<T>(scores[2 * group + 1], rows, second);
    }
  }

  /// Converts the tile's scores to weights, as mma operands for each 16 keys.
  __device__ static void weigh(const AttentionStep& step, const Task& task, std::int32_t tile,
                               float (&scores)[kKeys / 8][4], std::uint32_t (&weights)[kGroups][4]) {
    ADAPTRT_UNROLL
    for (int half = 0; half < 2; ++half) {
      if (8 * half < task.num_heads) {
        if (step.softcap != 0.0F) bound(step, half, scores);
        if (task.visible > tile || task.position < tile + kKeys - 1) {
          apply_mask(scores, half, lane(), task.visible - tile, task.position + 1 - tile);
        }
        const RowTotals row = weigh_tile(scores, half, step.scale);
        if (lane() % 4 == 0) *totals(warp(), lane() / 4 + 8 * half) = row;
      }
      ADAPTRT_UNROLL
      for (int column = 0; column < kKeys / 8; ++column) {
        weights[column / 2][column % 2 * 2 + half] =
            8 * half < task.num_heads ? pack_pair<T>(scores[column][2 * half], scores[column][2 * half + 1])
                                      : 0;
      }
    }
  }

  __device__ static void bound(const AttentionStep& step, int half, float (&scores)[kKeys / 8][4]) {
    ADAPTRT_UNROLL
    for (int column = 0; column < kKeys / 8; ++column) {
      ADAPTRT_UNROLL
      for (int element = 2 * half; element < 2 * half + 2; ++element) {
        scores[column][element] = bounded(scores[column][element], step.softcap, step.exponent);
      }
    }
  }

  /// Adds weights * half `half` of a group's values.
  __device__ static void add_values(T* data, int half, const std::uint32_t (&weights)[4],
                                    float (&values)[kColumns][4]) {
    ADAPTRT_UNROLL
    for (int pair = 0; pair < kSteps; ++pair) {
      std::uint32_t value[4];
      load_matrix_x4_transposed(value, piece(data, lane() % 16, 2 * pair + lane() / 16));
      const std::uint32_t first[2] = {value[0], value[1]};
      const std::uint32_t second[2] = {value[2], value[3]};
      mma_16x8x16<T>(values[half * (kChunk / 8) + 2 * pair], weights, first);
      mma_16x8x16<T>(values[half * (kChunk / 8) + 2 * pair + 1], weights, second);
    }
  }

  /// Stores the rows of the tile's sums over the stages, which the warp has read.
  __device__ static void store_tile(const Task& task, const float (&values)[kColumns][4]) {
    wait_copies<0>();
    __syncwarp();
    ADAPTRT_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = lane() / 4 + 8 * half;
      if (row >= task.num_heads) continue;
      ADAPTRT_UNROLL
      for (int column = 0; column < kColumns; ++column) {
        float* to = sum(warp(), row, 8 * column + 2 * (lane() % 4));
        to[0] = values[column][2 * half];
        to[1] = values[column][2 * half + 1];
      }
    }
  }

  __device__ static T* attended_rows(const AttentionStep& step, const Task& task) {
    return static_cast<T*>(step.attended) +
           (static_cast<std::int64_t>(task.token) * step.num_heads + task.first_head) * kHeadDim;
  }

  __device__ static void store_attended(const AttentionStep& step, const Task& task, const Sums& sums) {
    if (own_row() >= task.num_heads) return;
    const float inverse = 1.0F / total_with_sink(step, task.first_head + own_row(), sums.totals);
    T* out = attended_rows(step, task) + own_row() * kHeadDim;
    ADAPTRT_UNROLL
    for (int pair = 0; pair < kPairs; ++pair) {
      if (column_of_pair(pair) >= kHeadDim) break;
      store_words<1>(out + column_of_pair(pair),
                     {pack_pair<T>(sums.values[pair][0] * inverse, sums.values[pair][1] * inverse)});
    }
  }

  __device__ static void store_split(const Parameters& parameters, const Task& task, std::int32_t split,
                                     const Sums& sums) {
    if (own_row() >= task.num_heads) return;
    const std::int64_t index =
        split_index(parameters.step, parameters.splits, task.sequence, task.first_head + own_row()) + split;
    float* to = parameters.splits.sums + index * kHeadDim;
    ADAPTRT_UNROLL
    for (int pair = 0; pair < kPairs; ++pair) {
      const int column = column_of_pair(pair);
      if (column >= kHeadDim) break;
      to[column] = sums.values[pair][0];
      to[column + 1] = sums.values[pair][1];
    }
    if (column_of_pair(0) == 0) {
      parameters.splits.totals[2 * index] = sums.totals.maximum;
      parameters.splits.totals[2 * index + 1] = sums.totals.total;
    }
  }
};

}  // namespace adaptrt::cuda
