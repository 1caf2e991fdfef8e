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

/// Warps of a block, which compute as many tiles at a time.
template <int kHeadDim>
inline constexpr int kDecodeWarps = kHeadDim < 128 ? 8 : 4;

/// A block computes up to 16 query heads of one KV head, for some splits of a sequence's keys. In each round
/// every warp takes one tile of keys: it copies chunks of 16 keys, and then of 16 values, to its own stages
/// of shared memory, ahead of their use, and no barrier of the block is needed. Of an int8 pool it copies the
/// integers and their scales, and converts a chunk to T when it is used. At the end of a round the
/// block merges the warps' tiles, in order. The last block that stores its part of a sequence's KV head
/// combines all parts, in order: splits, or tiles that have a block each.
template <typename T, int kHeadDim, KvFormat kFormat>
class Decode {
 public:
  struct Parameters {
    AttentionStep step;
    Splits splits;
    std::int32_t row_tiles;  // blocks that share a KV head, one per 16 of its query heads
    bool rotates;            // this kernel does RotateAndWrite's work; all sequences have one token
  };
  static constexpr int kWarps = kDecodeWarps<kHeadDim>;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kBlocksPerMultiprocessor = 2;

  __device__ static void run(const Parameters& parameters) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const AttentionStep& step = parameters.step;
    const auto sequence = static_cast<std::int32_t>(blockIdx.z);
    // With as many tokens as sequences, each sequence has one.
    std::int32_t token = sequence;
    if (step.tokens != step.sequences) {
      token = step.sequence_offsets[sequence];
      if (step.sequence_offsets[sequence + 1] - token != 1) return;
    }
    const std::int32_t position = step.positions[token];
    const auto kv_head = static_cast<std::int32_t>(blockIdx.y) / parameters.row_tiles;
    const std::int32_t first_row = static_cast<std::int32_t>(blockIdx.y) % parameters.row_tiles * kDecodeRows;
    const std::int32_t rows_left = step.group.value() - first_row;
    const std::int32_t first_head = kv_head * step.group.value() + first_row;
    const std::int32_t num_heads = rows_left < kDecodeRows ? rows_left : kDecodeRows;
    // Loads of the queries overlap with that of the position.
    load_queries(parameters, token, position, first_head, num_heads);
    const Parts parts = find_parts(parameters, position);
    const Task found{.token = token,
                     .sequence = sequence,
                     .kv_head = kv_head,
                     .first_head = first_head,
                     .num_heads = num_heads,
                     .position = position,
                     .visible = first_visible(step, position),
                     .parts = parts,
                     .is_last = false};
    const auto part = static_cast<std::int32_t>(blockIdx.x);  // the block's first one
    // Registers are scarce, so a part's number is computed from the key when it is needed.
    std::int32_t round = (parts.first + part) * parts.keys;
    std::int32_t own_block = kLooksAhead ? block_of_lane(step, found, round + warp() * kKeys) : -1;
    const std::int32_t newest_block = block_of(step, sequence, position);
    if (newest_block < 0) {
      if (parameters.rotates && part == 0) clear(step, found);
      return;
    }
    if (part >= parts.count) return;
    if (parameters.rotates) {
      // The warp that will read the newest key writes it, so no other warp must wait for it.
      const bool has_newest = (parts.count - 1 - part) % parameters.splits.lanes == 0;
      const int newest_warp = parts.are_tiles ? 0 : position / kKeys % kWarps;
      if (has_newest && warp() == newest_warp) write_newest(step, found, newest_block);
    }
    Task& task = shared_task();
    if (threadIdx.x == 0) task = found;
    __syncthreads();
    Sums sums;
    while (round <= task.position) {
      if constexpr (!kLooksAhead) own_block = block_of_lane(step, task, round + warp() * kKeys);
      const std::int32_t next = next_round(parameters, task, round);
      const std::int32_t next_block = kLooksAhead ? block_of_lane(step, task, next + warp() * kKeys) : -1;
      if (round + kWarps * kKeys > task.visible) add_round(step, task, round, own_block, sums);
      if (next > task.position || next / task.parts.keys != round / task.parts.keys) {
        if (task.parts.count == 1) {
          store_attended(step, task, sums);
          return;
        }
        store_part(parameters, task, round / task.parts.keys - task.parts.first, sums);
        sums = {};
      }
      round = next;
      own_block = next_block;
    }
    if (is_last(parameters, task)) combine(parameters, task);
  }

  [[nodiscard]] static std::size_t shared_bytes() {
    return kStageBytes + kQueryBytes + kTotalBytes + sizeof(Task);
  }

 private:
  static constexpr int kKeys = kTileKeys<kHeadDim>;
  /// A tile's blocks are looked up before the round that needs them. Narrow heads have no registers for it.
  static constexpr bool kLooksAhead = kHeadDim >= 128;
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
  /// With an int8 pool, the first stage has the converted chunk and the others have chunks of integers.
  static constexpr bool kIsInt8 = kFormat == KvFormat::kInt8;
  static constexpr int kScaleBytes = kGroup * static_cast<int>(sizeof(float));
  static constexpr int kInt8Bytes = kGroup * kChunk + kScaleBytes;
  static constexpr int kInt8Stages =
      (kStages - 1) * kStageElements * static_cast<int>(sizeof(T)) / kInt8Bytes;
  /// Chunks that are copied ahead of their use.
  static constexpr int kAhead = !kIsInt8 ? kStages : kInt8Stages < kChunks ? kInt8Stages : kChunks;
  static_assert(kAhead >= 3);
  static constexpr int kQueryElements = kHeadDim + 8;  // of a row
  static constexpr std::size_t kQueryBytes = std::size_t{kDecodeRows} * kQueryElements * sizeof(T);
  static constexpr std::size_t kTotalBytes = std::size_t{kWarps} * kDecodeRows * sizeof(RowTotals);
  static constexpr int kSumElements = kHeadDim + 4;  // of a row of a tile's sums
  static_assert(std::size_t{kDecodeRows} * kSumElements * sizeof(float) <=
                    std::size_t{kStages} * kStageElements * sizeof(T),
                "a warp's sums use the memory of its stages");

  /// The parts of a sequence's keys whose sums are stored: its splits, or its tiles.
  struct Parts {
    std::int32_t keys;  // of a part
    std::int32_t first;
    std::int32_t count;
    bool are_tiles;

    /// True if the parts are tiles of several splits.
    [[nodiscard]] __device__ bool are_of_splits() const {
      return are_tiles && first / kSplitTiles != (first + count - 1) / kSplitTiles;
    }
    /// True for the last tile of a split.
    [[nodiscard]] __device__ bool ends_split(std::int32_t part) const {
      return part + 1 == count || (first + part + 1) % kSplitTiles == 0;
    }
  };

  /// Tiles have a block each if splits would be computed in several rounds. Such splits have kSplitTiles.
  __device__ static Parts find_parts(const Parameters& parameters, std::int32_t position) {
    if constexpr (kWarps < kSplitTiles) {
      const std::int32_t first_tile = first_visible(parameters.step, position) / kKeys;
      const std::int32_t tiles = position / kKeys - first_tile + 1;
      if (parameters.splits.separates_tiles && tiles > kWarps && tiles <= kMostParts) {
        return {kKeys, first_tile, tiles, true};
      }
    }
    const SplitRange splits = splits_of<kKeys>(parameters.step, position);
    return {splits.keys, splits.first, splits.count(), false};
  }

  struct Task {
    std::int32_t token;
    std::int32_t sequence;
    std::int32_t kv_head;
    std::int32_t first_head;
    std::int32_t num_heads;
    std::int32_t position;
    std::int32_t visible;  // the first key that the token sees
    Parts parts;
    bool is_last;  // this block is the last one that stored its parts
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
  /// A chunk of an int8 pool: integers of its rows without gaps, then their scales.
  __device__ static unsigned char* int8_stage(int warp, int index) {
    return reinterpret_cast<unsigned char*>(stage(warp, 1)) + index * kInt8Bytes;
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

  /// Brings the rotated queries to shared memory; rows without a head become zeros. Other threads see them
  /// after a barrier.
  __device__ static void load_queries(const Parameters& parameters, std::int32_t token, std::int32_t position,
                                      std::int32_t first_head, std::int32_t num_heads) {
    const AttentionStep& step = parameters.step;
    if (parameters.rotates) {
      const std::int32_t units = (kHeadDim - step.rotary_half) / 8;
      const float factor = query_factor(step, position);
      for (int i = static_cast<int>(threadIdx.x); i < num_heads * units; i += kThreads) {
        const int row = i / units;
        rotate_query_unit<T, 8>(step, token, factor, i % units,
                                query_source<T>(step, token, first_head + row), query(row));
      }
    }
    const T* from = static_cast<const T*>(step.rotated_query) +
                    (static_cast<std::int64_t>(token) * step.num_heads + first_head) * kHeadDim;
    for (int i = static_cast<int>(threadIdx.x); i < kDecodeRows * (kHeadDim / 8); i += kThreads) {
      const int row = i / (kHeadDim / 8);
      const int element = i % (kHeadDim / 8) * 8;
      if (row >= num_heads) {
        store_words<4>(query(row) + element, {});
      } else if (!parameters.rotates) {
        store_words(query(row) + element, load_words<4>(from + row * kHeadDim + element));
      }
    }
  }

  /// Lane i looks up the block of group i of a tile's 16 keys; negative if the group has no visible key.
  __device__ static std::int32_t block_of_lane(const AttentionStep& step, const Task& task,
                                               std::int32_t tile) {
    const std::int32_t group = tile + lane() % kGroups * kGroup;
    return group <= task.position && group + kGroup > task.visible ? block_of(step, task.sequence, group)
                                                                   : -1;
  }

  /// First key of the block's round after the one at `round`.
  __device__ static std::int32_t next_round(const Parameters& parameters, const Task& task,
                                            std::int32_t round) {
    const std::int32_t end = round + kWarps * kKeys;
    if (end <= task.position && end % task.parts.keys != 0) return end;
    return (round / task.parts.keys + parameters.splits.lanes) * task.parts.keys;
  }

  /// Adds the tiles of a round, which begins at key `round`. A tile that is a part becomes the sums as it is.
  __device__ static void add_round(const AttentionStep& step, const Task& task, std::int32_t round,
                                   std::int32_t own_block, Sums& sums) {
    const std::int32_t tile = round + warp() * kKeys;
    const bool has_tile = !task.parts.are_tiles || warp() == 0;
    if (has_tile && tile <= task.position && tile + kKeys > task.visible) attend(step, task, tile, own_block);
    __syncthreads();
    if (task.parts.are_tiles) {
      take_tile(task, sums);
      return;
    }
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

  /// Takes the sums of the first warp's tile as they are.
  __device__ static void take_tile(const Task& task, Sums& sums) {
    if (own_row() >= task.num_heads) return;
    sums.totals = *totals(0, own_row());
    ADAPTRT_UNROLL
    for (int pair = 0; pair < kPairs; ++pair) {
      if (column_of_pair(pair) >= kHeadDim) break;
      const float* part = sum(0, own_row(), column_of_pair(pair));
      sums.values[pair][0] = part[0];
      sums.values[pair][1] = part[1];
    }
  }

  /// Warp: computes a tile's sums.
  __device__ static void attend(const AttentionStep& step, const Task& task, std::int32_t tile,
                                std::int32_t own_block) {
    float scores[kKeys / 8][4] = {};
    std::uint32_t weights[kGroups][4];
    float values[kColumns][4] = {};
    ADAPTRT_UNROLL
    for (int chunk = 0; chunk < kAhead; ++chunk) copy_chunk(step, task, tile, own_block, chunk);
    ADAPTRT_UNROLL
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      wait_copies<kAhead - 1>();
      __syncwarp();
      T* data = stage(warp(), kIsInt8 ? 0 : chunk % kStages);
      if constexpr (kIsInt8) {
        convert_chunk(task, tile, own_block, chunk, data);
        __syncwarp();
      }
      if (chunk < kChunks / 2) {
        add_scores(data, chunk / kHalves, chunk % kHalves, scores);
      } else {
        const int index = chunk - kChunks / 2;
        if (index == 0) weigh(step, task, tile, scores, weights);
        add_values(data, index / kGroups, weights[index % kGroups], values);
      }
      __syncwarp();  // all lanes have read the stage
      copy_chunk(step, task, tile, own_block, chunk + kAhead);
    }
    store_tile(task, values);
  }

  /// A chunk of a tile: 16 keys or values, or a half of their dimensions.
  struct Chunk {
    bool is_value;
    int group;
    int half;

    __device__ explicit Chunk(int chunk)
        : is_value(chunk >= kChunks / 2),
          group(is_value ? chunk % (kChunks / 2) % kGroups : chunk % (kChunks / 2) / kHalves),
          half(is_value ? chunk % (kChunks / 2) / kGroups : chunk % (kChunks / 2) % kHalves) {}
  };

  /// True if a key of a block is visible. Other keys become zeros, because their slots may hold anything.
  __device__ static bool is_valid(const Task& task, std::int32_t block, std::int32_t key) {
    return block >= 0 && key >= task.visible && key <= task.position;
  }

  /// Starts copying a chunk of the tile to its stage.
  __device__ static void copy_chunk(const AttentionStep& step, const Task& task, std::int32_t tile,
                                    std::int32_t own_block, int number) {
    if (number < kChunks) {
      const Chunk chunk(number);
      const std::int32_t block = __shfl_sync(kAllLanes, own_block, chunk.group);
      const std::int32_t first = tile + chunk.group * kGroup;
      if constexpr (kIsInt8) {
        copy_int8(step, task, first, block, chunk, int8_stage(warp(), number % kAhead));
      } else {
        copy_plain(step, task, first, block, chunk, stage(warp(), number % kAhead));
      }
    }
    commit_copies();
  }

  __device__ static void copy_plain(const AttentionStep& step, const Task& task, std::int32_t first,
                                    std::int32_t block, const Chunk& chunk, T* to) {
    const T* from = static_cast<const T*>(step.kv_pool);
    if (block >= 0) {
      from += key_offset(step, block, task.kv_head, step.tokens_per_block.remainder(first)) +
              (chunk.is_value ? value_offset(step) : 0) + chunk.half * kChunk;
    }
    ADAPTRT_UNROLL
    for (int row = lane() / 4; row < kGroup; row += 8) {
      const bool valid = is_valid(task, block, first + row);
      ADAPTRT_UNROLL
      for (int i = lane() % 4; i < kPieces; i += 4) {
        copy_async_16(piece(to, row, i), from + (row * kHeadDim + 8 * i), valid);
      }
    }
  }

  __device__ static void copy_int8(const AttentionStep& step, const Task& task, std::int32_t first,
                                   std::int32_t block, const Chunk& chunk, unsigned char* to) {
    constexpr int kBytes = 16;  // of a copy
    constexpr int kCopies = kChunk / kBytes;
    constexpr int kLanes = kCopies <= 4 ? 4 : 8;  // of a row
    const Int8Row rows = int8_row(step, block < 0 ? 0 : block, chunk.is_value ? 1 : 0, task.kv_head,
                                  step.tokens_per_block.remainder(first));
    ADAPTRT_UNROLL
    for (int row = lane() / kLanes; row < kGroup; row += kWarpSize / kLanes) {
      const bool valid = is_valid(task, block, first + row);
      ADAPTRT_UNROLL
      for (int at = kBytes * (lane() % kLanes); at < kChunk; at += kBytes * kLanes) {
        copy_async_16(to + row * kChunk + at, rows.elements + row * kHeadDim + chunk.half * kChunk + at,
                      valid);
      }
    }
    if (lane() < kScaleBytes / kBytes) {
      copy_async_16(to + kGroup * kChunk + kBytes * lane(), rows.scale + lane() * kBytes / sizeof(float),
                    block >= 0);
    }
  }

  /// Converts a chunk of integers to T.
  __device__ static void convert_chunk(const Task& task, std::int32_t tile, std::int32_t own_block,
                                       int number, T* to) {
    const Chunk chunk(number);
    const std::int32_t block = __shfl_sync(kAllLanes, own_block, chunk.group);
    const unsigned char* from = int8_stage(warp(), number % kAhead);
    const auto* scales = reinterpret_cast<const float*>(from + kGroup * kChunk);
    constexpr int kLanes = kPieces < 16 ? 8 : 16;  // of a row
    ADAPTRT_UNROLL
    for (int row = lane() / kLanes; row < kGroup; row += kWarpSize / kLanes) {
      const bool valid = is_valid(task, block, tile + chunk.group * kGroup + row);
      const float scale = valid ? scales[row] : 0.0F;
      ADAPTRT_UNROLL
      for (int i = lane() % kLanes; i < kPieces; i += kLanes) {
        const auto* integers = reinterpret_cast<const std::int8_t*>(from) + row * kChunk + 8 * i;
        store_words(piece(to, row, i), valid ? dequantized<T>(integers, scale) : Words<4>{});
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

  __device__ static void store_part(const Parameters& parameters, const Task& task, std::int32_t part,
                                    const Sums& sums) {
    if (own_row() >= task.num_heads) return;
    const Splits& splits = parameters.splits;
    const std::int64_t index =
        split_index(parameters.step, splits, task.sequence, task.first_head + own_row()) + part;
    ADAPTRT_UNROLL
    for (int pair = 0; pair < kPairs; ++pair) {
      const int column = column_of_pair(pair);
      if (column >= kHeadDim) break;
      store_floats(splits.sums + index * kHeadDim + column, sums.values[pair][0], sums.values[pair][1]);
    }
    if (column_of_pair(0) == 0) {
      store_floats(splits.totals + 2 * index, sums.totals.maximum, sums.totals.total);
    }
  }

  __device__ static void store_floats(float* to, float first, float second) {
    store_words<2>(to, {__float_as_uint(first), __float_as_uint(second)});
  }

  /// True in the last block that has stored its parts of the sequence's KV head. It sees the parts of the
  /// others, and has set the counter back to zero.
  __device__ static bool is_last(const Parameters& parameters, Task& task) {
    __syncthreads();
    const std::int32_t lanes = parameters.splits.lanes;
    const std::int32_t blocks = task.parts.count < lanes ? task.parts.count : lanes;
    if (blocks == 1) return true;
    if (threadIdx.x == 0) {
      std::uint32_t* counter =
          parameters.splits.counters + static_cast<std::int64_t>(task.sequence) * gridDim.y + blockIdx.y;
      const auto last = static_cast<std::uint32_t>(blocks - 1);
      task.is_last = count_block(counter, last) == last;
    }
    __syncthreads();
    return task.is_last;
  }

  /// Combines the parts of the sequence's KV head, in order. A thread handles pairs of columns.
  __device__ static void combine(const Parameters& parameters, const Task& task) {
    constexpr int kPairsOfRow = kHeadDim / 2;
    const AttentionStep& step = parameters.step;
    for (int i = static_cast<int>(threadIdx.x); i < task.num_heads * kPairsOfRow; i += kThreads) {
      const int row = i / kPairsOfRow;
      const int column = i % kPairsOfRow * 2;
      const std::int64_t first = split_index(step, parameters.splits, task.sequence, task.first_head + row);
      Words<2> totals[kMostParts];
      Words<2> values[kMostParts];
      ADAPTRT_UNROLL
      for (int part = 0; part < kMostParts; ++part) {
        if (part >= task.parts.count) break;
        totals[part] = load_words<2>(parameters.splits.totals + 2 * (first + part));
        values[part] = load_words<2>(parameters.splits.sums + (first + part) * kHeadDim + column);
      }
      PairSums split;
      PairSums all;
      ADAPTRT_UNROLL
      for (int part = 0; part < kMostParts; ++part) {
        if (part >= task.parts.count) break;
        if (task.parts.are_of_splits()) {
          split.add(totals[part], values[part]);
          if (!task.parts.ends_split(part)) continue;
          all.add(split);
          split = {};
        } else {
          all.add(totals[part], values[part]);
        }
      }
      const float inverse = 1.0F / total_with_sink(step, task.first_head + row, all.totals);
      store_words<1>(attended_rows(step, task) + row * kHeadDim + column,
                     {pack_pair<T>(all.values[0] * inverse, all.values[1] * inverse)});
    }
  }

  /// Sums of a pair of columns of one row.
  struct PairSums {
    RowTotals totals;
    float values[2] = {};

    __device__ void add(const PairSums& part) {
      const MergeFactors factors = merge_totals(totals, part.totals);
      values[0] = merge_value(values[0], part.values[0], factors);
      values[1] = merge_value(values[1], part.values[1], factors);
    }
    /// Adds a stored part.
    __device__ void add(const Words<2>& part_totals, const Words<2>& part_values) {
      add({{__uint_as_float(part_totals.words[0]), __uint_as_float(part_totals.words[1])},
           {__uint_as_float(part_values.words[0]), __uint_as_float(part_values.words[1])}});
    }
  };
};

}  // namespace adaptrt::cuda
