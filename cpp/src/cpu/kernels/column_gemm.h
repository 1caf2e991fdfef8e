#pragma once

// Products of few rows that read only the columns of inputs that are not zero. The sums are those of
// sparse_gemm.h: a skipped column would only add zeros. Included after simd_*.h, gemm.h and sparse_gemm.h;
// gemm.h says why.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "adaptrt/cpu/kernel_table.h"
#include "gemm.h"
#include "sparse_gemm.h"

namespace adaptrt {
namespace {

/// Prefetches columns, a few lines at a time, each from its first needed output to its last. The hardware
/// prefetcher continues such runs.
class ColumnFetcher {
 public:
  ColumnFetcher(const ColumnGemm& gemm, std::int64_t element)
      : columns_(gemm.live.columns),
        count_(gemm.live.count),
        begin_(gemm.first * element),
        end_(begin_ + gemm.width * element),
        offset_(begin_) {
    fetch(kAhead * (end_ - begin_));
  }

  /// Prefetches as many bytes as were read.
  void fetch(std::int64_t bytes) {
    for (; bytes > 0 && at_ < count_; bytes -= 2 * kCacheLine) {
      // A panel has at least two lines of a column.
      __builtin_prefetch(columns_[at_] + offset_, 0, 3);
      __builtin_prefetch(columns_[at_] + offset_ + kCacheLine, 0, 3);
      offset_ += 2 * kCacheLine;
      if (offset_ < end_) continue;
      offset_ = begin_;
      ++at_;
    }
  }

 private:
  /// Number of columns to prefetch before the first one is read.
  static constexpr std::int64_t kAhead = 8;

  const std::byte* const* columns_;
  std::int64_t count_;
  std::int64_t begin_;
  std::int64_t end_;
  std::int64_t offset_;
  std::int64_t at_ = 0;
};

/// Address of the sum of row 0 and output `column` in ColumnGemm::out.
inline float* sums_of_column(const ColumnGemm& gemm, std::int64_t column) {
  const std::int64_t panel = column / kPanelColumns;
  return gemm.out + panel * gemm.rows * kPanelColumns + column % kPanelColumns;
}

/// A group of inputs, some of which are not zero: their columns from the first needed output on, and zeros
/// for the other inputs.
template <class Weights>
struct GroupColumns {
  std::int64_t group;
  const std::byte* columns[Weights::kInterleave];
};

/// Read instead of a missing column of a group.
alignas(kCacheLine) inline constexpr std::byte kZeroColumn[kMostColumnOutputs * 2] = {};

/// Number of groups that all outputs are multiplied by before the next groups.
inline constexpr std::int64_t kGroupsAtOnce = 16;

/// Fills `groups`, starting with the group of live input number *next, and advances *next. Returns the number
/// of groups.
template <class Weights>
std::int64_t take_groups(const ColumnGemm& gemm, std::int64_t* next,
                         GroupColumns<Weights> (&groups)[kGroupsAtOnce]) {
  constexpr std::int64_t kElement = Weights::kColumnBytes / Weights::kInterleave;
  const LiveColumns& live = gemm.live;
  std::int64_t count = 0;
  for (; *next < live.count && count < kGroupsAtOnce; ++count) {
    GroupColumns<Weights>& taken = groups[count];
    taken.group = live.inputs[*next] / Weights::kInterleave;
    for (int i = 0; i < Weights::kInterleave; ++i) {
      const bool is_live = *next < live.count && live.inputs[*next] == taken.group * Weights::kInterleave + i;
      taken.columns[i] = is_live ? live.columns[(*next)++] + gemm.first * kElement : kZeroColumn;
    }
  }
  return count;
}

template <class Weights>
typename Weights::B load_group(const GroupColumns<Weights>& from, std::int64_t output) {
  if constexpr (Weights::kInterleave == 2) {
    return Simd::pack_bfloat16(Simd::load_bfloat16(from.columns[0] + output * 2, Simd::kLanes),
                               Simd::load_bfloat16(from.columns[1] + output * 2, Simd::kLanes));
  } else {
    return Weights::load(from.columns[0] + output * Weights::kColumnBytes);
  }
}

/// kChains sums for each element; group g of inputs is added to sum g % kChains, as in gemm_tile.
template <int kRows>
struct ColumnSums {
  static constexpr int kChains = chains_of(kTileVectors);
  static_assert(kChains <= 2);

  explicit ColumnSums(const ColumnGemm& gemm) : gemm_(gemm) {
    std::fill_n(gemm.out, kRows * gemm.width, 0.0F);
    if constexpr (kChains == 2) std::fill_n(others_, kRows * gemm.width, 0.0F);
  }

  /// Address of the sums of one chain from output `column` on.
  [[nodiscard]] float* at(int chain, std::int64_t column) {
    float* first = sums_of_column(gemm_, column);
    return chain == 0 ? first : others_ + (first - gemm_.out);
  }

  void finish() {
    if constexpr (kChains == 2) {
      for (std::int64_t i = 0; i < kRows * gemm_.width; i += Simd::kLanes) {
        Simd::store(gemm_.out + i, Simd::add(Simd::load(gemm_.out + i), Simd::load(others_ + i)));
      }
    }
  }

 private:
  const ColumnGemm& gemm_;
  float others_[kChains == 2 ? kRows * kMostColumnOutputs : 1];
};

/// Adds the products of some groups to the sums of kTileVectors vectors of outputs.
template <class Weights, int kRows>
void add_groups(const ColumnGemm& gemm, const GroupColumns<Weights>* groups, std::int64_t count,
                std::int64_t column, ColumnSums<kRows>* all_sums) {
  using A = typename Weights::A;
  constexpr int kChains = ColumnSums<kRows>::kChains;
  const A* a = static_cast<const A*>(gemm.a);
  const std::int64_t half_group = gemm.k % Weights::kInterleave == 0 ? -1 : gemm.k / Weights::kInterleave;
  Simd::Vec sums[kChains][kRows][kTileVectors];
  ADAPTRT_UNROLL
  for (int chain = 0; chain < kChains; ++chain) {
    const float* from = all_sums->at(chain, column);
    ADAPTRT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      ADAPTRT_UNROLL
      for (int v = 0; v < kTileVectors; ++v) {
        sums[chain][r][v] = Simd::load(from + r * kPanelColumns + v * Simd::kLanes);
      }
    }
  }
  const auto add = [&](Simd::Vec(&sum)[kRows][kTileVectors], const GroupColumns<Weights>& from)
                       __attribute__((always_inline)) {
                         typename Weights::B columns[kTileVectors];
                         ADAPTRT_UNROLL
                         for (int v = 0; v < kTileVectors; ++v) {
                           columns[v] = load_group<Weights>(from, column + v * Simd::kLanes);
                         }
                         ADAPTRT_UNROLL
                         for (int r = 0; r < kRows; ++r) {
                           const A* of_row = a + r * gemm.a_stride + from.group * Weights::kInterleave;
                           const auto value = from.group == half_group ? Weights::broadcast_last(of_row)
                                                                       : Weights::broadcast(of_row);
                           ADAPTRT_UNROLL
                           for (int v = 0; v < kTileVectors; ++v) {
                             sum[r][v] = Weights::multiply_add(value, columns[v], sum[r][v]);
                           }
                         }
                       };
  for (std::int64_t i = 0; i < count; ++i) {
    if (kChains == 1 || groups[i].group % kChains == 0) {
      add(sums[0], groups[i]);
    } else {
      add(sums[kChains - 1], groups[i]);
    }
  }
  ADAPTRT_UNROLL
  for (int chain = 0; chain < kChains; ++chain) {
    float* to = all_sums->at(chain, column);
    ADAPTRT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      ADAPTRT_UNROLL
      for (int v = 0; v < kTileVectors; ++v) {
        Simd::store(to + r * kPanelColumns + v * Simd::kLanes, sums[chain][r][v]);
      }
    }
  }
}

template <class Weights, int kRows>
void column_gemm_of_rows(const ColumnGemm& gemm) {
  constexpr std::int64_t kGroup = kTileVectors * Simd::kLanes;
  static_assert(kPanelColumns % kGroup == 0);
  constexpr std::int64_t kElement = Weights::kColumnBytes / Weights::kInterleave;
  ColumnSums<kRows> sums(gemm);
  ColumnFetcher fetcher(gemm, kElement);
  GroupColumns<Weights> groups[kGroupsAtOnce];
  for (std::int64_t next = 0; next < gemm.live.count;) {
    const std::int64_t before = next;
    const std::int64_t count = take_groups<Weights>(gemm, &next, groups);
    const std::int64_t bytes = (next - before) * kGroup * kElement;
    for (std::int64_t column = 0; column < gemm.width; column += kGroup) {
      add_groups<Weights, kRows>(gemm, groups, count, column, &sums);
      fetcher.fetch(bytes);
    }
  }
  sums.finish();
}

template <class Weights, int kRows = kSparseRows>
void column_gemm(const ColumnGemm& gemm) {
  if constexpr (kRows > 1) {
    if (gemm.rows < kRows) return column_gemm<Weights, kRows - 1>(gemm);
  }
  column_gemm_of_rows<Weights, kRows>(gemm);
}

}  // namespace
}  // namespace adaptrt
