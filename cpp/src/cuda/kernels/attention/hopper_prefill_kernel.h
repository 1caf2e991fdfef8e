#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/kernels/attention/query_tiles.h"
#include "cuda/kernels/attention/splits.h"
#include "cuda/kernels/attention/step.h"
#include "cuda/kernels/attention/tile_sums.h"
#include "cuda/kernels/attention/words.h"
#include "cuda/kernels/hopper/ptx.h"
#include "cuda/kernels/hopper/wgmma.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/ptx.h"
#include "cuda/kernels/types.h"

namespace adaptrt::cuda {

/// Prefill with the instructions of compute capability 9.0, for plain pools. It has the bits of Prefill: the
/// same tiles of rows and keys, the same functions, and wgmma in place of mma.
///
/// One warp loads keys and values into stages of shared memory, mostly with the copy engine (TMA). Two
/// warpgroups compute 64 rows each. While the products with a tile's values run, a warpgroup weighs the next
/// tile's scores. The warpgroups take turns to start products, so that one weighs while the other multiplies.
template <typename T, int kHeadDim>
class HopperPrefill {
 public:
  struct Parameters {
    CUtensorMap pool;  ///< rows of keys and values, in boxes of kBoxKeys x kBoxColumns
    AttentionStep step;
  };

  static constexpr int kWarpgroups = 2;
  static constexpr int kWarpgroupThreads = 128;
  static constexpr int kThreads = (kWarpgroups + 1) * kWarpgroupThreads;
  static constexpr int kBlocksPerMultiprocessor = 1;
  static constexpr int kWarpgroupRows = 64;
  static constexpr int kRows = kWarpgroupRows * kWarpgroups;
  static constexpr int kKeys = kTileKeys<kHeadDim>;
  static constexpr int kBoxKeys = 16;  ///< a KV block's size is a multiple of it

  __device__ static void run(const Parameters& parameters) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const AttentionStep& step = parameters.step;
    const QueryTile tile = find_query_tile<kRows>(step, reinterpret_cast<std::int32_t*>(shared_memory()));
    if (tile.num_rows <= 0) return;
    const Buffers buffers = find_buffers();
    const int warpgroups = tile.num_rows > kWarpgroupRows ? kWarpgroups : 1;  // that have rows
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < kStages; ++stage) {
        for (const Operand operand : {Operand::kKeys, Operand::kValues}) {
          init_barrier(buffers.full(operand, stage), 1);
          init_barrier(buffers.empty(operand, stage), warpgroups * kWarps);
        }
      }
      fence_barrier_init();
    }
    __syncthreads();  // barriers exist, and the search result is no longer read
    // Tells the compiler that the value is the same in all threads of a warp.
    const int warpgroup = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarpgroupThreads, 0);
    if (warpgroup == kWarpgroups) {
      release_registers<kLoaderRegisters>();
      if (threadIdx.x / kWarpSize == kWarpgroups * kWarps) Loader(parameters, tile, buffers).run();
    } else if (warpgroup < warpgroups) {
      take_registers<kComputeRegisters>();
      Rows rows(step, tile, buffers, warpgroup, warpgroups == 1);
      rows.run();
    }
  }

  [[nodiscard]] static std::size_t shared_bytes() {
    return kSwizzleBytes + kQueryBytes + kStages * (2 * kStageBytes + 4 * kBarrierBytes);
  }

 private:
  static constexpr int kWarps = kWarpgroupThreads / kWarpSize;  // of a warpgroup
  static constexpr int kWarpRows = 16;
  static constexpr int kBoxColumns = 64;
  static constexpr int kRowBytes = kBoxColumns * static_cast<int>(sizeof(T));  // of a box
  static constexpr int kBoxBytes = kBoxKeys * kRowBytes;
  static constexpr int kParts = (kHeadDim + kBoxColumns - 1) / kBoxColumns;  // boxes next to each other
  /// Columns of the last part; its boxes are as wide as the others.
  static constexpr int kLastColumns = kHeadDim - (kParts - 1) * kBoxColumns;
  static constexpr int kGroups = kKeys / kBoxKeys;
  static constexpr int kBoxes = kGroups * kParts;
  static constexpr int kPieces = kHeadDim / 8;  // 16-byte pieces of a row
  static constexpr int kColumns = kHeadDim / 8;
  static constexpr int kStages = 4;
  static constexpr int kSwizzleBytes = 1024;
  static constexpr int kBarrierBytes = 8;
  static constexpr int kPartBytes = kKeys * kRowBytes;  // of a stage
  static constexpr int kStageBytes = kParts * kPartBytes;
  static constexpr int kQueryPartBytes = kRows * kRowBytes;
  static constexpr int kQueryBytes = kParts * kQueryPartBytes;
  static constexpr int kLoaderRegisters = 40;
  static constexpr int kComputeRegisters = 232;
  static_assert(kBoxes <= kWarpSize, "each lane copies at most one box of a tile");
  static_assert(kPartBytes % kSwizzleBytes == 0 && kQueryPartBytes % kSwizzleBytes == 0,
                "the swizzle's pattern begins at a multiple of its size");

  /// Columns of a part of a head.
  __device__ static constexpr int part_columns(int part) {
    return part == kParts - 1 ? kLastColumns : kBoxColumns;
  }

  enum class Operand : std::uint8_t { kKeys, kValues };

  /// Places in shared memory. Rows of queries, keys and values are in parts of 64 columns, in the copy
  /// engine's 128-byte swizzle.
  struct Buffers {
    unsigned char* begin;   ///< a multiple of kSwizzleBytes
    std::uint32_t address;  ///< the same, in the shared window

    [[nodiscard]] __device__ static int stage(Operand operand, int stage) {
      return kQueryBytes + (2 * stage + static_cast<int>(operand)) * kStageBytes;
    }
    [[nodiscard]] __device__ std::uint32_t full(Operand operand, int stage) const {
      return address + kQueryBytes + 2 * kStages * kStageBytes +
             (2 * stage + static_cast<int>(operand)) * kBarrierBytes;
    }
    [[nodiscard]] __device__ std::uint32_t empty(Operand operand, int stage) const {
      return full(operand, kStages + stage);
    }
    /// The place of a 16-byte piece of a row, in parts of `part_bytes` bytes from `offset` on.
    [[nodiscard]] __device__ unsigned char* piece(int offset, int part_bytes, int row, int piece) const {
      return begin + offset + piece / 8 * part_bytes + row * kRowBytes + (piece % 8 ^ row % 8) * 16;
    }
    [[nodiscard]] __device__ unsigned char* query_piece(int row, int at) const {
      return piece(0, kQueryPartBytes, row, at);
    }
  };

  /// The stage of a tile of keys, and its phase's parity for threads that wait until it is full.
  struct Position {
    std::uint32_t tile = 0;
    [[nodiscard]] __device__ int stage() const { return static_cast<int>(tile % kStages); }
    [[nodiscard]] __device__ std::uint32_t parity() const { return tile / kStages % 2; }
    [[nodiscard]] __device__ Position next() const { return {tile + 1}; }
  };

  __device__ static Buffers find_buffers() {
    const std::uint32_t begin = detail::shared_address(shared_memory());
    const std::uint32_t skipped = (kSwizzleBytes - begin % kSwizzleBytes) % kSwizzleBytes;
    return {shared_memory() + skipped, begin + skipped};
  }

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % kWarpSize; }

  /// Prevents that the compiler puts a rarely used object into registers.
  template <typename Object>
  __device__ static void keep_in_memory([[maybe_unused]] Object& object) {
#ifdef __CUDACC__
    asm volatile("" : : "l"(&object) : "memory");
#endif
  }

  /// First key of the first tile, and the end of the keys that any row sees.
  struct KeyRange {
    std::int32_t begin;  ///< first key that any row sees
    std::int32_t end;

    __device__ KeyRange(const AttentionStep& step, const QueryTile& tile)
        : begin(first_visible(step, tile.first_position)), end(tile.last_position + 1) {}
    [[nodiscard]] __device__ std::int32_t first_tile() const { return begin / kKeys * kKeys; }
  };

  /// A warp that loads the keys and values of all tiles.
  class Loader {
   public:
    __device__ Loader(const Parameters& parameters, const QueryTile& tile, const Buffers& buffers)
        : parameters_(parameters), tile_(tile), buffers_(buffers), keys_(parameters.step, tile) {}

    __device__ void run() {
      Position at;
      std::int32_t block = block_of_lane(keys_.first_tile());
      ADAPTRT_NO_UNROLL
      for (std::int32_t key = keys_.first_tile(); key < keys_.end; key += kKeys) {
        const std::int32_t next = block_of_lane(key + kKeys);
        load(Operand::kKeys, key, block, at);
        load(Operand::kValues, key, block, at);
        block = next;
        at = at.next();
      }
    }

   private:
    /// The first key of a lane's box: lanes have consecutive parts of consecutive groups of keys.
    [[nodiscard]] __device__ static std::int32_t first_key(std::int32_t tile_key, int lane) {
      return tile_key + lane / kParts * kBoxKeys;
    }

    /// True if any row sees one of the keys from `first` on, which are a box.
    [[nodiscard]] __device__ bool is_seen(std::int32_t first) const {
      return first < keys_.end && first + kBoxKeys > keys_.begin;
    }

    /// The block of this lane's box; negative if there is none.
    [[nodiscard]] __device__ std::int32_t block_of_lane(std::int32_t tile_key) const {
      const std::int32_t first = first_key(tile_key, lane());
      const bool seen = lane() < kBoxes && is_seen(first);
      return seen ? block_of(parameters_.step, tile_.sequence, first) : -1;
    }

    /// Loads a stage. Keys that no row sees may be anything, because their scores are replaced. Their values
    /// must be zeros, and slots without a token may hold NaN, so such values do not come from the copy
    /// engine.
    __device__ void load(Operand operand, std::int32_t tile_key, std::int32_t block,
                         const Position& at) const {
      const std::int32_t first = first_key(tile_key, lane());
      const bool whole = first >= keys_.begin && first + kBoxKeys <= keys_.end;
      const bool copies = block >= 0 && (whole || operand == Operand::kKeys);
      const std::uint32_t copied = __ballot_sync(kAllLanes, copies);
      wait(buffers_.empty(operand, at.stage()), at.parity() ^ 1);
      if (copied != kAllBoxes) {
        ADAPTRT_NO_UNROLL
        for (int group = 0; group < kGroups; ++group) {
          const std::int32_t block_of_group = __shfl_sync(kAllLanes, block, group * kParts);
          if ((copied >> (group * kParts) & 1U) == 0) {
            load_rows(operand, tile_key + group * kBoxKeys, group * kBoxKeys, block_of_group, at.stage());
          }
        }
        fence_for_copy_engine();
        __syncwarp();
      }
      if (lane() == 0) arrive_and_expect(buffers_.full(operand, at.stage()), __popc(copied) * kBoxBytes);
      __syncwarp();
      if (copies) {
        const int part = lane() % kParts;
        copy_box(buffers_.address + Buffers::stage(operand, at.stage()) + part * kPartBytes +
                     lane() / kParts * kBoxBytes,
                 &parameters_.pool, buffers_.full(operand, at.stage()), part * kBoxColumns,
                 pool_row(operand, block, first), CachePolicy::kNormal);
      }
    }

    /// Row of the pool, as a matrix whose rows are the heads' keys and values.
    [[nodiscard]] __device__ std::int32_t pool_row(Operand operand, std::int32_t block,
                                                   std::int32_t key) const {
      const AttentionStep& step = parameters_.step;
      const std::int32_t head =
          (block * 2 + static_cast<std::int32_t>(operand)) * step.num_kv_heads + tile_.kv_head;
      return head * step.tokens_per_block.value() + step.tokens_per_block.remainder(key);
    }

    /// Loads kBoxKeys rows of a stage from row `to` on. Rows that no row of the tile sees become zeros.
    __device__ void load_rows(Operand operand, std::int32_t first, int to, std::int32_t block,
                              int stage) const {
      const std::int64_t row = block < 0 ? 0 : pool_row(operand, block, first);
      const T* from = static_cast<const T*>(parameters_.step.kv_pool) + row * kHeadDim;
      ADAPTRT_NO_UNROLL
      for (int i = lane(); i < kBoxKeys * kPieces; i += kWarpSize) {
        const std::int32_t key = first + i / kPieces;
        const bool valid = block >= 0 && key >= keys_.begin && key < keys_.end;
        const Words<4> words = valid ? load_words<4>(from + i * 8) : Words<4>{};
        store_words(buffers_.piece(Buffers::stage(operand, stage), kPartBytes, to + i / kPieces, i % kPieces),
                    words);
      }
    }

    static constexpr std::uint32_t kAllBoxes = kBoxes == kWarpSize ? kAllLanes : (1U << kBoxes) - 1;

    const Parameters& parameters_;
    const QueryTile tile_;
    const Buffers buffers_;
    const KeyRange keys_;
  };

  /// The sums of a warpgroup's rows. In a thread, index 0 is row 16 w + lane / 4 of its warp w, and index 1
  /// the row 8 rows further.
  class Rows {
   public:
    /// `is_alone`: no other warpgroup has rows.
    __device__ Rows(const AttentionStep& step, const QueryTile& tile, const Buffers& buffers, int warpgroup,
                    bool is_alone)
        : step_(step),
          tile_(tile),
          buffers_(buffers),
          keys_(step, tile),
          warpgroup_(warpgroup),
          is_alone_(is_alone),
          first_row_(warpgroup * kWarpgroupRows +
                     static_cast<int>(threadIdx.x) % kWarpgroupThreads / kWarpSize * kWarpRows) {
      find_positions();
    }

    __device__ void run() {
      own_ = {};
      Accumulators splits;  // the splits before the current one; unused if there are none
      keep_in_memory(splits);
      load_queries();
      Tile tile;
      start(tile);
      const std::int32_t first = keys_.first_tile();
      std::int32_t key = first;
      ADAPTRT_NO_UNROLL
      for (; key + kKeys < keys_.end; key += kKeys) add_tile<true>(key, first, tile, splits);
      add_tile<false>(key, first, tile, splits);
      const bool has_splits = has_splits_;
      if (step_.sinks != nullptr && !has_splits) splits = {};
      if (step_.sinks != nullptr || has_splits) {
        finish_split(keys_.end, splits);
        if (step_.sinks != nullptr) add_sinks(splits);
        own_ = splits;
      }
      store();
    }

   private:
    using Scores = float[kKeys / 8][4];

    struct Accumulators {
      RowTotals totals[2];
      float sums[kColumns][4];
    };

    /// The weights of a tile's keys, relative to each row's maximum in the tile.
    struct Tile {
      std::uint32_t weights[kGroups][4];  ///< wgmma operands, for each 16 keys
      RowTotals totals[2];
    };

    struct PositionRange {
      std::int32_t first;
      std::int32_t last;
    };

    /// The registers of a product, in the order in which the instruction names them.
    template <int kCount>
    __device__ static float (&flat(float (&registers)[kCount][4]))[4 * kCount] {
      return reinterpret_cast<float (&)[4 * kCount]>(registers);
    }

    __device__ void find_positions() {
      for (int half = 0; half < 2; ++half) {
        position_[half] = tile_.position_of(step_, first_row_ + 8 * half + lane() / 4);
      }
      const std::int32_t rows = tile_.num_rows - first_row_;
      if (rows <= 0) return;
      const std::int32_t last_row = first_row_ + (rows < kWarpRows ? rows : kWarpRows) - 1;
      positions_ = {step_.positions[tile_.token_of(step_, first_row_)],
                    step_.positions[tile_.token_of(step_, last_row)]};
    }

    __device__ void load_queries() const {
      for (int i = static_cast<int>(threadIdx.x) % kWarpgroupThreads; i < kWarpgroupRows * kPieces;
           i += kWarpgroupThreads) {
        const int row = warpgroup_ * kWarpgroupRows + i / kPieces;
        const bool valid = row < tile_.num_rows;
        const T* from = static_cast<const T*>(step_.rotated_query) +
                        (valid ? tile_.row_offset(step_, row) : 0) + i % kPieces * 8;
        copy_async_16(buffers_.query_piece(row, i % kPieces), from, valid);
      }
      commit_copies();
      wait_copies<0>();
      fence_for_copy_engine();
      warpgroup_barrier(warpgroup_);
    }

    /// Starts the products of the queries with a stage of keys.
    __device__ void start_scores(int stage, Scores& scores) const {
      const std::uint64_t queries =
          matrix_descriptor(buffers_.address + warpgroup_ * kWarpgroupRows * kRowBytes);
      const std::uint64_t keys = matrix_descriptor(buffers_.address + Buffers::stage(Operand::kKeys, stage));
      ADAPTRT_UNROLL
      for (int column = 0; column < kHeadDim; column += 16) {
        const int part = column / kBoxColumns;
        const int skipped = column % kBoxColumns * static_cast<int>(sizeof(T));
        Wgmma<T, kKeys>::run(flat(scores), advanced(queries, part * kQueryPartBytes + skipped),
                             advanced(keys, part * kPartBytes + skipped), column > 0);
      }
      wgmma_commit();
    }

    /// Starts the products of a tile's weights with one part of a stage of values.
    template <int kPart>
    __device__ void start_sums(int stage, const Tile& tile, float (&sums)[part_columns(kPart) / 8][4]) const {
      const std::uint64_t values =
          matrix_descriptor(buffers_.address + Buffers::stage(Operand::kValues, stage));
      ADAPTRT_UNROLL
      for (int group = 0; group < kGroups; ++group) {
        WgmmaOfRegisters<T, part_columns(kPart)>::run(
            flat(sums), tile.weights[group], advanced(values, kPart * kPartBytes + group * kBoxBytes),
            group > 0);
      }
    }

    /// Warp: lets the loader fill a stage again.
    __device__ void release(Operand operand, int stage) const {
      __syncwarp();
      if (lane() == 0) arrive(buffers_.empty(operand, stage));
    }

    /// Weighs the first tile.
    __device__ void start(Tile& tile) {
      Scores scores;
      wait(buffers_.full(Operand::kKeys, at_.stage()), at_.parity());
      wgmma_fence();
      start_scores(at_.stage(), scores);
      wgmma_wait<0>();
      keep_behind_wait(flat(scores));
      release(Operand::kKeys, at_.stage());
      RowTotals totals[2];
      weigh(keys_.first_tile(), scores, totals);
      set(tile, scores, totals);
    }

    /// Merges the tile of keys from `key` on, and weighs the next one if there is any.
    template <bool kHasNext>
    __device__ void add_tile(std::int32_t key, std::int32_t first, Tile& tile, Accumulators& splits) {
      Scores scores;
      float low[part_columns(0) / 8][4];
      float high[part_columns(kParts - 1) / 8][4];
      RowTotals next_totals[2];
      const Position next = at_.next();
      if constexpr (kHasNext) wait(buffers_.full(Operand::kKeys, next.stage()), next.parity());
      wait(buffers_.full(Operand::kValues, at_.stage()), at_.parity());
      wait_for_turn(key == first);
      wgmma_fence();
      if constexpr (kHasNext) start_scores(next.stage(), scores);
      start_sums<0>(at_.stage(), tile, low);
      if constexpr (kParts == 2) start_sums<1>(at_.stage(), tile, high);
      wgmma_commit();
      end_turn(!kHasNext);
      if constexpr (kHasNext) {
        wgmma_wait<1>();
        keep_behind_wait(flat(scores));
        release(Operand::kKeys, next.stage());
        weigh(key + kKeys, scores, next_totals);
      }
      if (key > first && key % (kKeys * kSplitTiles) == 0) {
        if (!has_splits_) splits = {};
        has_splits_ = true;
        finish_split(key, splits);
      }
      const MergeFactors factors[2] = {merge_totals(own_.totals[0], tile.totals[0]),
                                       merge_totals(own_.totals[1], tile.totals[1])};
      wgmma_wait<0>();
      keep_behind_wait(flat(low));
      merge<0>(low, factors);
      if constexpr (kParts == 2) {
        keep_behind_wait(flat(high));
        merge<1>(high, factors);
      }
      release(Operand::kValues, at_.stage());
      at_ = next;
      // Registers that a running product may read are not written.
      if constexpr (kHasNext) set(tile, scores, next_totals);
    }

    /// The warpgroups start the products of their tiles in turns: of the first tile, warpgroup 0 and then 1,
    /// of the second tile again 0 and 1. Each waits at its own barrier for the other one.
    __device__ void wait_for_turn(bool is_first) const {
      if (is_alone_ || (warpgroup_ == 0 && is_first)) return;
      named_barrier_sync(turn_barrier(warpgroup_), kWarpgroups * kWarpgroupThreads);
    }
    __device__ void end_turn(bool is_last) const {
      if (is_alone_ || (warpgroup_ == 1 && is_last)) return;
      named_barrier_arrive(turn_barrier(1 - warpgroup_), kWarpgroups * kWarpgroupThreads);
    }
    [[nodiscard]] __device__ static int turn_barrier(int warpgroup) { return kWarpgroups + 1 + warpgroup; }

    /// Converts the scores of the tile of keys from `first` on to weights.
    __device__ void weigh(std::int32_t first, Scores& scores, RowTotals (&totals)[2]) const {
      if (step_.softcap != 0.0F) {
        ADAPTRT_UNROLL
        for (int column = 0; column < kKeys / 8; ++column) {
          ADAPTRT_UNROLL
          for (float& score : scores[column]) score = bounded(score, step_.softcap, step_.exponent);
        }
      }
      const bool has_hidden_keys =
          first + kKeys - 1 > positions_.first || first < first_visible(step_, positions_.last);
      ADAPTRT_UNROLL
      for (int half = 0; half < 2; ++half) {
        if (has_hidden_keys) {
          const std::int32_t last = position_[half];
          apply_mask(scores, half, lane(), first_visible(step_, last) - first, last + 1 - first);
        }
        totals[half] = weigh_tile(scores, half, step_.scale);
      }
    }

    /// Rounds a tile's weights.
    __device__ static void set(Tile& tile, const Scores& weights, const RowTotals (&totals)[2]) {
      tile.totals[0] = totals[0];
      tile.totals[1] = totals[1];
      ADAPTRT_UNROLL
      for (int at = 0; at < kKeys / 4; ++at) {
        const float* pair = &weights[at / 2][at % 2 * 2];
        tile.weights[at / 4][at % 4] = pack_pair<T>(pair[0], pair[1]);
      }
    }

    /// Merges one part of a tile's weighted values.
    template <int kPart>
    __device__ void merge(const float (&sums)[part_columns(kPart) / 8][4], const MergeFactors (&factors)[2]) {
      ADAPTRT_UNROLL
      for (int column = 0; column < part_columns(kPart) / 8; ++column) {
        ADAPTRT_UNROLL
        for (int element = 0; element < 4; ++element) {
          float& sum = own_.sums[kPart * kBoxColumns / 8 + column][element];
          sum = merge_value(sum, sums[column][element], factors[element / 2]);
        }
      }
    }

    /// Merges the sums of the rows' current split into those of the splits before it. If `key` is not the end
    /// of a row's split, the row is left as it is. Rows of a tile may have splits of different sizes.
    __device__ void finish_split(std::int32_t key, Accumulators& splits) {
      ADAPTRT_UNROLL
      for (int half = 0; half < 2; ++half) {
        const std::int32_t position = position_[half];
        if (position < 0 || (key < keys_.end && key % splits_of<kKeys>(step_, position).keys != 0)) continue;
        const MergeFactors merge = merge_totals(splits.totals[half], own_.totals[half]);
        own_.totals[half] = {};
        ADAPTRT_UNROLL
        for (int column = 0; column < kColumns; ++column) {
          ADAPTRT_UNROLL
          for (int element = 2 * half; element < 2 * half + 2; ++element) {
            float& sum = splits.sums[column][element];
            sum = merge_value(sum, own_.sums[column][element], merge);
            own_.sums[column][element] = 0.0F;
          }
        }
      }
    }

    __device__ void add_sinks(Accumulators& splits) const {
      ADAPTRT_NO_UNROLL
      for (int half = 0; half < 2; ++half) {
        RowTotals& totals = splits.totals[half];
        totals.total =
            total_with_sink(step_, tile_.head_of(step_, first_row_ + 8 * half + lane() / 4), totals);
      }
    }

    /// Divides by the totals of the weights, and stores 16 bytes at a time, through the warpgroup's queries.
    __device__ void store() const {
      warpgroup_barrier(warpgroup_);  // no warp's product reads the queries any more
      ADAPTRT_UNROLL
      for (int half = 0; half < 2; ++half) {
        const float inverse = 1.0F / own_.totals[half].total;
        const bool attends = position_[half] >= 0;
        const int row = first_row_ + 8 * half + lane() / 4;
        ADAPTRT_UNROLL
        for (int column = 0; column < kColumns; ++column) {
          const float first = attends ? own_.sums[column][2 * half] * inverse : 0.0F;
          const float second = attends ? own_.sums[column][2 * half + 1] * inverse : 0.0F;
          store_words<1>(buffers_.query_piece(row, column) + lane() % 4 * 4, {pack_pair<T>(first, second)});
        }
      }
      __syncwarp();
      for (int i = lane(); i < kWarpRows * kPieces; i += kWarpSize) {
        const int row = first_row_ + i / kPieces;
        if (row >= tile_.num_rows) break;
        store_words(static_cast<T*>(step_.attended) + tile_.row_offset(step_, row) + i % kPieces * 8,
                    load_words<4>(buffers_.query_piece(row, i % kPieces)));
      }
    }

    const AttentionStep& step_;
    const QueryTile tile_;
    const Buffers buffers_;
    const KeyRange keys_;
    const int warpgroup_;
    const bool is_alone_;
    const int first_row_;       ///< of the warp, in the tile
    std::int32_t position_[2];  ///< of the thread's rows; -1: no row, or padding
    PositionRange positions_{.first = 0,
                             .last = -1};  ///< of the warp's first and last row; sees no keys: no rows
    Position at_;                          ///< of the current tile
    bool has_splits_ = false;
    Accumulators own_;
  };
};

}  // namespace adaptrt::cuda
