#pragma once

// Attention of few rows, as in a decoding step, with vectors instead of tile registers, but with the bits of
// Tiles::dot_bfloat16. This is faster for few rows: a tile of rows would be mostly empty, vectors read keys
// and values from memory faster than tiles, and int8 values are multiplied right after they are widened.
// Included after attention.h and tile_few_rows.h.

#include <cstddef>
#include <cstdint>

#include "adaptrt/cpu/attention_tile.h"
#include "attention.h"
#include "tile_few_rows.h"

namespace adaptrt {
namespace {

/// Maximum number of rows whose sums of even and odd inputs, for two vectors of columns, stay in registers.
inline constexpr int kFewAttendedRows = 4;
/// Number of vectors of slots or columns that are multiplied together.
inline constexpr int kFewVectors = 2;
/// Number of elements of a head that are converted to float32 at once; a multiple of a step.
inline constexpr std::int64_t kFewElements = 256;

/// Pairs of elements of keys or values, one for each of Simd::kLanes slots or columns.
template <bool kInt8>
struct StoredPairs {
  static constexpr std::int64_t kBytes = kInt8 ? 2 : 4;
  static Simd::Pair load(const std::byte* from) {
    if constexpr (kInt8) {
      return Simd::load_int8_pairs(from, Simd::kLanes);
    } else {
      return Simd::bfloat16_pairs(Simd::load_words(from, Simd::kLanes));
    }
  }
};

/// Sums of a step for kRows rows and kVectors vectors; even and odd inputs have separate sums, each in order.
template <int kRows, int kVectors>
struct StepSums {
  Simd::Vec even[kRows][kVectors];
  Simd::Vec odd[kRows][kVectors];

  StepSums() {
    ADAPTRT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      ADAPTRT_UNROLL
      for (int v = 0; v < kVectors; ++v) even[r][v] = odd[r][v] = Simd::zero();
    }
  }

  /// Adds the products of two inputs. Those of row r are at a + r * stride.
  void add(const float* a, std::int64_t stride, const Simd::Pair (&columns)[kVectors]) {
    ADAPTRT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const Simd::Vec first = Simd::set(a[r * stride]);
      const Simd::Vec second = Simd::set(a[r * stride + 1]);
      ADAPTRT_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        even[r][v] = Simd::fma(first, columns[v].even, even[r][v]);
        odd[r][v] = Simd::fma(second, columns[v].odd, odd[r][v]);
      }
    }
  }

  [[nodiscard]] Simd::Vec total(int r, int v) const { return Simd::add(even[r][v], odd[r][v]); }
};

/// Attention of kRows rows to one tile of keys and values.
template <bool kInt8, int kRows>
class FewAttendedRows {
 public:
  explicit FewAttendedRows(const FetchingTile& tile) : tile_(tile) {
    block_.rows = kRows;
    block_.first_position = tile.first_position;
    block_.last_position = tile.first_position + (kRows - 1) / tile.rows_per_position;
    block_.num_groups = groups_until(tile, block_.last_position + tile.look_ahead);
  }

  void run() {
    if (block_.num_groups == 0) return;
    {
      const FlushSubnormals flush;
      for (std::int64_t begin = 0; begin < tile_.head_dim; begin += kFewElements) add_scores(begin);
    }
    take_scores<kInt8>(tile_, &block_);
    widen(reinterpret_cast<const std::byte*>(block_.probabilities), kTileSlots * 2, kTileSlots,
          probabilities_[0], kTileSlots);
    const FlushSubnormals flush;
    const std::int64_t columns = whole_groups(tile_.head_dim);
    for (std::int64_t column = 0; column < columns; column += kFewVectors * Simd::kLanes) {
      const std::int64_t left = (columns - column) / Simd::kLanes;
      with_constant<kFewVectors>(std::min<std::int64_t>(kFewVectors, left),
                                 [&](auto vectors) { weigh<vectors()>(column); });
    }
  }

 private:
  using Stored = StoredPairs<kInt8>;

  /// Converts kRows rows of `count` bfloat16, `stride` bytes apart, to float32.
  static void widen(const std::byte* from, std::int64_t stride, std::int64_t count, float* to,
                    std::int64_t to_stride) {
    for (std::int64_t r = 0; r < kRows; ++r) {
      for (std::int64_t i = 0; i < count; i += Simd::kLanes) {
        const std::int64_t lanes = std::min<std::int64_t>(Simd::kLanes, count - i);
        Simd::store(to + r * to_stride + i, Simd::load_bfloat16(from + r * stride + i * 2, lanes), lanes);
      }
    }
  }

  /// Adds the products of the elements from `begin` on, at most kFewElements, to the scores.
  void add_scores(std::int64_t begin) {
    const std::int64_t count = std::min(kFewElements, tile_.head_dim - begin);
    widen(static_cast<const std::byte*>(tile_.queries) + begin * 2, tile_.head_dim * 2, count, queries_[0],
          kFewElements);
    const std::int64_t vectors = block_.num_groups * kVectorsPerGroup;
    for (std::int64_t first = 0; first < vectors; first += kFewVectors) {
      with_constant<kFewVectors>(std::min<std::int64_t>(kFewVectors, vectors - first),
                                 [&](auto constant) { score<constant()>(begin, count, first); });
    }
  }

  template <int kVectors>
  void score(std::int64_t begin, std::int64_t count, std::int64_t first) {
    const std::int64_t line = tile_.slots * Stored::kBytes;
    const std::byte* keys[kVectors];
    const std::byte* next[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const std::int64_t group = (first + v) / kVectorsPerGroup;
      const std::int64_t offset =
          (first + v) % kVectorsPerGroup * Simd::kLanes * Stored::kBytes + begin / 2 * line;
      keys[v] = tile_.groups[group].keys + offset;
      next[v] = tile_.next[static_cast<std::size_t>(group)].keys + offset;
    }
    for (std::int64_t step = 0; step < count; step += kStepInputs) {
      StepSums<kRows, kVectors> sums;
      const std::int64_t end = std::min(step + kStepInputs, count);
      for (std::int64_t k = step; k < end; k += 2) {
        Simd::Pair columns[kVectors];
        ADAPTRT_UNROLL
        for (int v = 0; v < kVectors; ++v) {
          columns[v] = Stored::load(keys[v] + k / 2 * line);
          __builtin_prefetch(next[v] + k / 2 * line, 0, 2);
        }
        sums.add(queries_[0] + k, kFewElements, columns);
      }
      ADAPTRT_UNROLL
      for (int r = 0; r < kRows; ++r) {
        ADAPTRT_UNROLL
        for (int v = 0; v < kVectors; ++v) {
          float* out = block_.scores[r] + (first + v) * Simd::kLanes;
          const Simd::Vec before = begin + step == 0 ? Simd::zero() : Simd::load(out);
          Simd::store(out, Simd::add(before, sums.total(r, v)));
        }
      }
    }
  }

  /// Adds the values of kVectors vectors of columns, from `column` on, to the accumulator.
  template <int kVectors>
  void weigh(std::int64_t column) {
    const std::int64_t stride = whole_groups(tile_.head_dim);
    const std::int64_t line = stride * Stored::kBytes;
    constexpr std::int64_t kStepGroups = kStepInputs / kKeyGroup;
    for (std::int64_t first = 0; first < block_.num_groups; first += kStepGroups) {
      StepSums<kRows, kVectors> sums;
      const std::int64_t end = std::min(first + kStepGroups, block_.num_groups);
      for (std::int64_t group = first; group < end; ++group) {
        const std::byte* values = tile_.groups[group].values + column * Stored::kBytes;
        const std::byte* next = tile_.next[static_cast<std::size_t>(group)].values + column * Stored::kBytes;
        for (std::int64_t k = 0; k < kKeyGroup; k += 2, values += line, next += line) {
          Simd::Pair columns[kVectors];
          ADAPTRT_UNROLL
          for (int v = 0; v < kVectors; ++v) {
            columns[v] = Stored::load(values + v * Simd::kLanes * Stored::kBytes);
            __builtin_prefetch(next + v * Simd::kLanes * Stored::kBytes, 0, 2);
          }
          sums.add(probabilities_[0] + group * kKeyGroup + k, kTileSlots, columns);
        }
      }
      ADAPTRT_UNROLL
      for (int r = 0; r < kRows; ++r) {
        ADAPTRT_UNROLL
        for (int v = 0; v < kVectors; ++v) {
          float* out = tile_.accumulator + r * stride + column + v * Simd::kLanes;
          Simd::store(out, Simd::add(Simd::load(out), sums.total(r, v)));
        }
      }
    }
  }

  const FetchingTile& tile_;
  RowBlock<BFloat16Weights, kRows> block_;
  alignas(kCacheLine) float queries_[kRows][kFewElements];
  alignas(kCacheLine) float probabilities_[kRows][kTileSlots];
};

/// Attention of at most kFewAttendedRows rows.
inline void attend_few_rows(const AttentionRows& rows, const KeyTiles& tiles) {
  with_constant<kFewAttendedRows>(rows.rows, [&](auto count) {
    for (std::int64_t first = 0; first < tiles.attended; first += kTileGroups) {
      const FetchingTile tile(rows, tiles, first);
      if (rows.is_int8) {
        FewAttendedRows<true, count()>(tile).run();
      } else {
        FewAttendedRows<false, count()>(tile).run();
      }
    }
  });
}

}  // namespace
}  // namespace adaptrt
