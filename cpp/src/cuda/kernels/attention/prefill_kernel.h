#pragma once

#include <cstdint>

#include "cuda/kernels/attention/int8_rows.h"
#include "cuda/kernels/attention/query_tiles.h"
#include "cuda/kernels/attention/softmax.h"
#include "cuda/kernels/attention/splits.h"
#include "cuda/kernels/attention/step.h"
#include "cuda/kernels/attention/tile_sums.h"
#include "cuda/kernels/attention/words.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/ptx.h"
#include "cuda/kernels/types.h"

namespace adaptrt::cuda {

/// A block computes a tile of rows, which are the query heads of one KV head for some tokens of a sequence.
/// It processes their visible keys in tiles. Each warp has its own rows, and keeps their sums in registers.
/// The tile's values are copied to shared memory while scores are computed, and the next keys while values
/// are added. The order of the sums is that of Decode (tile_sums.h), so a token's result does not depend on
/// how the prompt was chunked.
template <typename T, int kHeadDim, KvFormat kFormat>
class Prefill {
 public:
  using Parameters = AttentionStep;
  static constexpr int kWarps = 4;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kBlocksPerMultiprocessor = kHeadDim <= 128 ? 2 : 1;
  /// Limited by registers: a warp's sums take kHeadDim / 4 of them per 16 rows.
  static constexpr int kRowTiles = kHeadDim <= 128 ? 2 : 1;
  static constexpr int kWarpRows = 16 * kRowTiles;
  static constexpr int kRows = kWarps * kWarpRows;
  /// Limited by 99 KiB of shared memory, and by registers for the scores.
  static constexpr int kKeys = kTileKeys<kHeadDim>;

  __device__ static void run(const AttentionStep& step) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const QueryTile tile = find_query_tile<kRows>(step, reinterpret_cast<std::int32_t*>(shared_memory()));
    if (tile.num_rows <= 0) return;
    __syncthreads();  // before the queries overwrite the search result
    Block block(step, tile);
    block.run();
  }

  [[nodiscard]] static std::size_t shared_bytes() {
    return static_cast<std::size_t>(kRows + 2 * kKeys) * kRowElements * sizeof(T);
  }

 private:
  /// Stride of a row in shared memory: an odd number of 16-byte pieces, so that eight rows are in different
  /// banks.
  static constexpr int kRowElements = kHeadDim + 8;
  static constexpr int kPieces = kHeadDim / 8;  // 16-byte pieces of a row
  static constexpr int kSteps = kHeadDim / 16;  // mma steps over the head's dimensions
  static constexpr int kColumns = kHeadDim / 8;
  static constexpr int kBlockKeys = 16;  // a KV block's size is a multiple of it

  /// A warp's sums for its rows: index [i][0] is row 16 i + lane / 4, [i][1] row 16 i + lane / 4 + 8.
  struct Accumulators {
    RowTotals totals[kRowTiles][2];
    float sums[kRowTiles][kColumns][4];
  };

  /// Prevents that the compiler puts a rarely used object into registers.
  template <typename Object>
  __device__ static void keep_in_memory([[maybe_unused]] Object& object) {
#ifdef __CUDACC__
    asm volatile("" : : "l"(&object) : "memory");
#endif
  }

  class Block {
   public:
    __device__ Block(const AttentionStep& step, const QueryTile& tile)
        : step_(step),
          tile_(tile),
          begin_(first_visible(step, tile.first_position)),
          end_(tile.last_position + 1) {}

    __device__ void run() {
      own_ = {};
      Accumulators splits;  // the splits before the current one; unused if there are none
      keep_in_memory(splits);
      bool has_splits = false;
      const PositionRange rows = positions_of_warp();
      std::int32_t key = begin_ / kKeys * kKeys;
      load_queries();
      load_rows(key, keys(), false);
      commit_copies();
      for (const std::int32_t first = key; key < end_; key += kKeys) {
        if (key > first && key % (kKeys * kSplitTiles) == 0) {
          if (!has_splits) splits = {};
          has_splits = true;
          finish_split(key, splits);
        }
        wait_copies<0>();
        __syncthreads();  // the keys have arrived, and the previous tile's values are no longer read
        load_rows(key, values(), true);
        commit_copies();
        const bool takes_part = key <= rows.last && key + kKeys > first_visible(step_, rows.first);
        std::uint32_t weights[kRowTiles][kKeys / 16][4];
        MergeFactors factors[kRowTiles][2];
        if (takes_part) {
          float scores[kRowTiles][kKeys / 8][4];
          score(scores);
          if (step_.softcap != 0.0F) bound(scores);
          if (key + kKeys - 1 > rows.first || key < first_visible(step_, rows.last)) hide(key, scores);
          weigh(scores, factors);
          round(scores, weights);
        }
        wait_copies<0>();
        __syncthreads();  // the values have arrived, and the keys are no longer read
        if (key + kKeys < end_) load_rows(key + kKeys, keys(), false);
        commit_copies();
        if (takes_part) add_values(weights, factors);
      }
      if (step_.sinks != nullptr && !has_splits) splits = {};
      if (step_.sinks != nullptr || has_splits) {
        finish_split(end_, splits);
        if (step_.sinks != nullptr) add_sinks(splits);
        own_ = splits;
      }
      store();
    }

   private:
    struct PositionRange {
      std::int32_t first;
      std::int32_t last;
    };

    __device__ static int warp() { return static_cast<int>(threadIdx.x) / kWarpSize; }
    __device__ static int lane() { return static_cast<int>(threadIdx.x) % kWarpSize; }

    __device__ static T* queries() { return reinterpret_cast<T*>(shared_memory()); }
    __device__ static T* keys() { return queries() + kRows * kRowElements; }
    __device__ static T* values() { return keys() + kKeys * kRowElements; }

    /// The position of a row of this thread; -1 for no row or padding. Looking it up again saves a register.
    __device__ std::int32_t position_of(int i, int half) const {
      return tile_.position_of(step_, warp() * kWarpRows + 16 * i + 8 * half + lane() / 4);
    }

    /// The positions of a warp's first and last row; 0 .. -1 for a warp without rows, which sees no keys.
    __device__ PositionRange positions_of_warp() const {
      const std::int32_t first_row = warp() * kWarpRows;
      const std::int32_t rows = tile_.num_rows - first_row;
      if (rows <= 0) return {0, -1};
      const std::int32_t last_row = first_row + (rows < kWarpRows ? rows : kWarpRows) - 1;
      return {step_.positions[tile_.token_of(step_, first_row)],
              step_.positions[tile_.token_of(step_, last_row)]};
    }

    __device__ void load_queries() const {
      for (int i = static_cast<int>(threadIdx.x); i < kRows * kPieces; i += kThreads) {
        const int row = i / kPieces;
        const int element = i % kPieces * 8;
        const bool valid = row < tile_.num_rows;
        const T* from =
            static_cast<const T*>(step_.rotated_query) + (valid ? tile_.row_offset(step_, row) : 0) + element;
        copy_async_16(queries() + row * kRowElements + element, from, valid);
      }
    }

    /// Starts copying the keys or values of kKeys positions from `first` on, or loads them from an int8 pool.
    /// Positions that no row sees become zeros, because their slots may hold anything.
    __device__ void load_rows(std::int32_t first, T* to, bool is_value) const {
      ADAPTRT_UNROLL
      for (int group = 0; group < kKeys; group += kBlockKeys) {
        const std::int32_t begin = first + group;
        const bool seen = begin < end_ && begin + kBlockKeys > begin_;
        const std::int32_t block = seen ? block_of(step_, tile_.sequence, begin) : -1;
        const std::int32_t slot = step_.tokens_per_block.remainder(begin);
        const T* from = static_cast<const T*>(step_.kv_pool);
        Int8Row integers{};
        if constexpr (kFormat == KvFormat::kInt8) {
          integers = int8_row(step_, block < 0 ? 0 : block, is_value ? 1 : 0, tile_.kv_head, slot);
        } else if (block >= 0) {
          from += key_offset(step_, block, tile_.kv_head, slot) + (is_value ? value_offset(step_) : 0);
        }
        ADAPTRT_UNROLL
        for (int pass = 0; pass < kBlockKeys * kPieces; pass += kThreads) {
          const int i = pass + static_cast<int>(threadIdx.x);
          if (pass + kThreads > kBlockKeys * kPieces && i >= kBlockKeys * kPieces) break;
          const int row = i / kPieces;
          const int element = i % kPieces * 8;
          const std::int32_t key = begin + row;
          const bool valid = block >= 0 && key >= begin_ && key < end_;
          T* const place = to + (group + row) * kRowElements + element;
          const int at = row * kHeadDim + element;
          if constexpr (kFormat == KvFormat::kInt8) {
            store_words(place,
                        valid ? dequantized<T>(integers.elements + at, integers.scale[row]) : Words<4>{});
          } else {
            copy_async_16(place, from + at, valid);
          }
        }
      }
    }

    __device__ void score(float (&scores)[kRowTiles][kKeys / 8][4]) const {
      ADAPTRT_UNROLL
      for (int i = 0; i < kRowTiles; ++i) {
        ADAPTRT_UNROLL
        for (int column = 0; column < kKeys / 8; ++column) {
          ADAPTRT_UNROLL
          for (int element = 0; element < 4; ++element) scores[i][column][element] = 0.0F;
        }
      }
      const T* query_row = queries() + (warp() * kWarpRows + lane() % 16) * kRowElements + lane() / 16 * 8;
      const T* key_row = keys() + (lane() / 16 * 8 + lane() % 8) * kRowElements + lane() / 8 % 2 * 8;
      ADAPTRT_UNROLL
      for (int mma_step = 0; mma_step < kSteps; ++mma_step) {
        std::uint32_t query[kRowTiles][4];
        ADAPTRT_UNROLL
        for (int i = 0; i < kRowTiles; ++i) {
          load_matrix_x4(query[i], query_row + 16 * i * kRowElements + 16 * mma_step);
        }
        ADAPTRT_UNROLL
        for (int pair = 0; pair < kKeys / 16; ++pair) {
          std::uint32_t key[4];
          load_matrix_x4(key, key_row + 16 * pair * kRowElements + 16 * mma_step);
          const std::uint32_t first[2] = {key[0], key[1]};
          const std::uint32_t second[2] = {key[2], key[3]};
          ADAPTRT_UNROLL
          for (int i = 0; i < kRowTiles; ++i) {
            mma_16x8x16<T>(scores[i][2 * pair], query[i], first);
            mma_16x8x16<T>(scores[i][2 * pair + 1], query[i], second);
          }
        }
      }
    }

    __device__ void bound(float (&scores)[kRowTiles][kKeys / 8][4]) const {
      ADAPTRT_UNROLL
      for (int i = 0; i < kRowTiles; ++i) {
        ADAPTRT_UNROLL
        for (int column = 0; column < kKeys / 8; ++column) {
          ADAPTRT_UNROLL
          for (float& score : scores[i][column]) score = bounded(score, step_.softcap, step_.exponent);
        }
      }
    }

    /// Masks the keys that a row does not see.
    __device__ void hide(std::int32_t first, float (&scores)[kRowTiles][kKeys / 8][4]) const {
      ADAPTRT_UNROLL
      for (int i = 0; i < kRowTiles; ++i) {
        ADAPTRT_UNROLL
        for (int half = 0; half < 2; ++half) {
          const std::int32_t last = position_of(i, half);
          apply_mask(scores[i], half, lane(), first_visible(step_, last) - first, last + 1 - first);
        }
      }
    }

    /// Converts scores to weights relative to the row's maximum in this tile.
    __device__ void weigh(float (&scores)[kRowTiles][kKeys / 8][4], MergeFactors (&factors)[kRowTiles][2]) {
      ADAPTRT_UNROLL
      for (int i = 0; i < kRowTiles; ++i) {
        ADAPTRT_UNROLL
        for (int half = 0; half < 2; ++half) {
          factors[i][half] = merge_totals(own_.totals[i][half], weigh_tile(scores[i], half, step_.scale));
        }
      }
    }

    /// The weights as mma operands, for each 16 keys.
    __device__ static void round(const float (&scores)[kRowTiles][kKeys / 8][4],
                                 std::uint32_t (&weights)[kRowTiles][kKeys / 16][4]) {
      ADAPTRT_UNROLL
      for (int i = 0; i < kRowTiles; ++i) {
        ADAPTRT_UNROLL
        for (int at = 0; at < kKeys / 4; ++at) {
          const float* pair = &scores[i][at / 2][at % 2 * 2];
          weights[i][at / 4][at % 4] = pack_pair<T>(pair[0], pair[1]);
        }
      }
    }

    /// Merges the tile's weighted values, 16 columns at a time.
    __device__ void add_values(const std::uint32_t (&weights)[kRowTiles][kKeys / 16][4],
                               const MergeFactors (&factors)[kRowTiles][2]) {
      const T* value_row = values() + lane() % 16 * kRowElements + lane() / 16 * 8;
      ADAPTRT_UNROLL
      for (int pair = 0; pair < kSteps; ++pair) {
        float tile[kRowTiles][2][4] = {};
        ADAPTRT_UNROLL
        for (int mma_step = 0; mma_step < kKeys / 16; ++mma_step) {
          std::uint32_t value[4];
          load_matrix_x4_transposed(value, value_row + 16 * mma_step * kRowElements + 16 * pair);
          const std::uint32_t first[2] = {value[0], value[1]};
          const std::uint32_t second[2] = {value[2], value[3]};
          ADAPTRT_UNROLL
          for (int i = 0; i < kRowTiles; ++i) {
            mma_16x8x16<T>(tile[i][0], weights[i][mma_step], first);
            mma_16x8x16<T>(tile[i][1], weights[i][mma_step], second);
          }
        }
        ADAPTRT_UNROLL
        for (int i = 0; i < kRowTiles; ++i) {
          ADAPTRT_UNROLL
          for (int element = 0; element < 8; ++element) {
            float& sum = own_.sums[i][2 * pair + element / 4][element % 4];
            sum = merge_value(sum, tile[i][element / 4][element % 4], factors[i][element % 4 / 2]);
          }
        }
      }
    }

    /// Merges the sums of the rows' current split into those of the splits before it. If `key` is not the end
    /// of a row's split, the row is left as it is. Rows of a tile may have splits of different sizes.
    __device__ void finish_split(std::int32_t key, Accumulators& splits) {
      ADAPTRT_UNROLL
      for (int i = 0; i < kRowTiles; ++i) {
        ADAPTRT_UNROLL
        for (int half = 0; half < 2; ++half) {
          const std::int32_t position = position_of(i, half);
          if (position < 0 || (key < end_ && key % splits_of<kKeys>(step_, position).keys != 0)) continue;
          const MergeFactors merge = merge_totals(splits.totals[i][half], own_.totals[i][half]);
          own_.totals[i][half] = {};
          ADAPTRT_UNROLL
          for (int column = 0; column < kColumns; ++column) {
            ADAPTRT_UNROLL
            for (int element = 2 * half; element < 2 * half + 2; ++element) {
              float& sum = splits.sums[i][column][element];
              sum = merge_value(sum, own_.sums[i][column][element], merge);
              own_.sums[i][column][element] = 0.0F;
            }
          }
        }
      }
    }

    /// Adds the sinks of the rows' heads. `splits` is in memory, since registers are scarce.
    __device__ void add_sinks(Accumulators& splits) const {
      ADAPTRT_NO_UNROLL
      for (int i = 0; i < 2 * kRowTiles; ++i) {
        RowTotals& totals = splits.totals[i / 2][i % 2];
        const int row = warp() * kWarpRows + 8 * i + lane() / 4;
        totals.total = total_with_sink(step_, tile_.head_of(step_, row), totals);
      }
    }

    /// Divides by the totals of the weights, and stores 16 bytes at a time, through the warp's own rows of
    /// queries().
    __device__ void store() const {
      T* rows = queries() + warp() * kWarpRows * kRowElements;
      __syncwarp();
      ADAPTRT_UNROLL
      for (int i = 0; i < kRowTiles; ++i) {
        ADAPTRT_UNROLL
        for (int half = 0; half < 2; ++half) {
          const float inverse = 1.0F / own_.totals[i][half].total;
          const bool attends = position_of(i, half) >= 0;
          T* row = rows + (16 * i + 8 * half + lane() / 4) * kRowElements + lane() % 4 * 2;
          ADAPTRT_UNROLL
          for (int column = 0; column < kColumns; ++column) {
            const float first = attends ? own_.sums[i][column][2 * half] * inverse : 0.0F;
            const float second = attends ? own_.sums[i][column][2 * half + 1] * inverse : 0.0F;
            store_words<1>(row + 8 * column, {pack_pair<T>(first, second)});
          }
        }
      }
      __syncwarp();
      const std::int32_t num_rows = tile_.num_rows - warp() * kWarpRows;
      for (int i = lane(); i < kWarpRows * kPieces; i += kWarpSize) {
        const int row = i / kPieces;
        const int element = i % kPieces * 8;
        if (row >= num_rows) break;
        store_words(
            static_cast<T*>(step_.attended) + tile_.row_offset(step_, warp() * kWarpRows + row) + element,
            load_words<4>(rows + row * kRowElements + element));
      }
    }

    const AttentionStep& step_;
    const QueryTile tile_;
    const std::int32_t begin_;  // first key that any row sees
    const std::int32_t end_;
    Accumulators own_;
  };
};

}  // namespace adaptrt::cuda
