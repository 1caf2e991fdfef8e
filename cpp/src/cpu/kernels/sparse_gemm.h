#pragma once

// Products that read only a part of a matrix: rows of outputs at any address, or the weights of inputs that
// are not zero. Each element is summed in the order of gemm.h. Skipped products are zeros, which can only
// change the sign of a zero sum. Included after simd_*.h and gemm.h; gemm.h says why.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "adaptrt/cpu/kernel_table.h"
#include "gemm.h"

namespace adaptrt {
namespace {

/// Maximum number of rows for sparse_gemm. With more rows, few inputs are zero in all of them.
inline constexpr int kSparseRows = 4;

/// Size of a word: one group of inputs of one output. A line of a gathered panel has a word of each output.
inline constexpr std::int64_t kGatheredWord = 4;
inline constexpr std::int64_t kGatheredLine = kPanelColumns * kGatheredWord;
/// Number of words of an output that fill a cache line, and number of words that are prefetched ahead.
inline constexpr std::int64_t kLineWords = kCacheLine / kGatheredWord;
inline constexpr std::int64_t kGatheredAhead = 64;

/// Prefetches, for each of kLanes outputs, the cache line that is read kGatheredAhead words after `word`.
/// Near the end, it prefetches lines of the next outputs.
inline void fetch_gathered(const GatheredOutputs& gathered, std::int64_t column, std::int64_t word,
                           std::int64_t words) {
  const std::byte* const* outputs = gathered.outputs;
  word += kGatheredAhead;
  if (word >= words) {
    outputs = gathered.next;
    word -= words;
    if (outputs == nullptr || word >= words) return;
  }
  for (std::int64_t i = 0; i < Simd::kLanes; ++i) {
    __builtin_prefetch(outputs[column + i] + word * kGatheredWord, 0, 2);
  }
}

/// Writes words [begin, end) of the outputs, which have `words` words each, as lines of a panel. Does not
/// write vectors of columns without any output.
inline void gather_words(const GatheredOutputs& gathered, std::int64_t words, std::int64_t begin,
                         std::int64_t end, std::byte* out) {
  constexpr std::int64_t kAtOnce = 4;
  for (std::int64_t column = 0; column < gathered.count; column += Simd::kLanes) {
    const std::byte* const* outputs = gathered.outputs + column;
    std::byte* to = out + column * kGatheredWord;
    std::int64_t word = begin;
    for (; word + kAtOnce <= end; word += kAtOnce, to += kAtOnce * kGatheredLine) {
      if ((word - begin) % kLineWords == 0) fetch_gathered(gathered, column, word, words);
      Simd::transpose_words(outputs, word * kGatheredWord, to, kGatheredLine);
    }
    for (; word < end; ++word, to += kGatheredLine) {
      for (std::int64_t i = 0; i < Simd::kLanes; ++i) {
        std::memcpy(to + i * kGatheredWord, outputs[i] + word * kGatheredWord, kGatheredWord);
      }
    }
  }
}

/// True if gather_words does not write some columns.
inline bool has_empty_columns(const GatheredOutputs& gathered) {
  return gathered.count <= kPanelColumns - Simd::kLanes;
}

inline void gather_outputs(const GatheredOutputs& gathered, std::int64_t words, std::byte* out) {
  if (has_empty_columns(gathered)) std::memset(out, 0, static_cast<std::size_t>(words * kGatheredLine));
  // Some words of all outputs at a time, so that these writes go to few pages.
  for (std::int64_t begin = 0; begin < words; begin += kGatheredAhead) {
    gather_words(gathered, words, begin, std::min(begin + kGatheredAhead, words),
                 out + begin * kGatheredLine);
  }
}

/// Prefetches the first words; fetch_gathered prefetches later ones. This costs little if they are cached.
inline void fetch_first_words(const GatheredOutputs& gathered, std::int64_t words) {
  for (std::int64_t word = 0; word < std::min(kGatheredAhead, words); word += kLineWords) {
    for (std::int64_t i = 0; i < gathered.count; ++i) {
      __builtin_prefetch(gathered.outputs[i] + word * kGatheredWord, 0, 2);
    }
  }
}

/// Like codebook_gemm: gathers a part of k, and multiplies it from the first-level cache.
template <class Weights>
void gathered_gemm(const PanelGemm& gemm, const GatheredOutputs& gathered) {
  using A = typename Weights::A;
  static_assert(Weights::kColumnBytes == kGatheredWord);
  alignas(kCacheLine) std::byte made[kStreamSteps * kGatheredLine];
  if (has_empty_columns(gathered)) std::memset(made, 0, sizeof(made));
  const std::int64_t words = gemm.call.k / Weights::kInterleave;
  fetch_first_words(gathered, words);
  SpanFetcher others(gemm.fetch);
  others.fetch(others.lines());
  PanelGemm part = gemm;
  part.call.panel = made;
  for (std::int64_t begin = 0; begin < words; begin += kStreamSteps) {
    const std::int64_t end = std::min(begin + kStreamSteps, words);
    gather_words(gathered, words, begin, end, made);
    part.call.a = static_cast<const A*>(gemm.call.a) + begin * Weights::kInterleave;
    part.call.k = (end - begin) * Weights::kInterleave;
    streamed_tile_of<Weights>(gemm.call.rows, 0)(part, 0, 0, Simd::kLanes, begin > 0, {});
  }
}

using GatheredGemm = void (*)(const PanelGemm& gemm, const GatheredOutputs& gathered);

/// nullptr if panels are not streamed.
template <class Weights>
constexpr GatheredGemm gathered_gemm_of() {
  if constexpr (kCanStream<Weights>) {
    static_assert(kSparseRows <= kTileRows);
    return &gathered_gemm<Weights>;
  } else {
    return nullptr;
  }
}

/// Prefetches lines of live inputs: this panel's to the first-level cache, some steps ahead, and the next
/// panel's to the second-level cache. The latter are prefetched in kTurns passes over the panel, each with
/// every kTurns-th line: ascending lines within a page would start the hardware prefetcher, which would also
/// read the lines to skip.
class LiveFetcher {
 public:
  LiveFetcher(const std::byte* panel, const std::byte* next, const LiveInputs& live, std::int64_t row_bytes)
      : panel_(panel), next_(next), live_(live), row_bytes_(row_bytes) {}

  /// Must be called once for each live input, with its number.
  template <int kLines>
  void fetch(std::int64_t index) {
    if (index + kAhead < live_.count) fetch_line<kLines, 3>(panel_, index + kAhead);
    if (next_ == nullptr) return;
    fetch_line<kLines, 2>(next_, at_);
    at_ += kTurns;
    if (at_ >= live_.count) at_ = ++turn_;
  }

 private:
  static constexpr std::int64_t kAhead = 20;
  static constexpr std::int64_t kTurns = 8;

  template <int kLines, int kLevel>
  void fetch_line(const std::byte* panel, std::int64_t index) const {
    const std::byte* from = panel + live_.groups[index] * row_bytes_;
    ADAPTRT_UNROLL
    for (int line = 0; line < kLines; ++line) __builtin_prefetch(from + line * kCacheLine, 0, kLevel);
  }

  const std::byte* panel_;
  const std::byte* next_;
  const LiveInputs& live_;
  std::int64_t row_bytes_;
  std::int64_t turn_ = 0;
  std::int64_t at_ = 0;  ///< number of the live input to prefetch in the next panel
};

/// Like gemm_tile, for the live inputs.
template <class Weights, int kRows>
void sparse_tile(const PanelGemm& gemm, const LiveInputs& live, std::int64_t column, LiveFetcher fetcher) {
  using A = typename Weights::A;
  using Vec = Simd::Vec;
  constexpr int kChains = chains_of(kTileVectors);
  static_assert(kChains <= 2);
  constexpr std::int64_t kVectorBytes = Simd::kLanes * Weights::kColumnBytes;
  constexpr int kLines = static_cast<int>((kTileVectors * kVectorBytes + kCacheLine - 1) / kCacheLine);
  const std::int64_t row_bytes = gemm.call.width * Weights::kColumnBytes;
  const A* a = static_cast<const A*>(gemm.call.a);
  const std::byte* b = gemm.call.panel + column * Weights::kColumnBytes;
  const std::int64_t half_group =
      gemm.call.k % Weights::kInterleave == 0 ? -1 : gemm.call.k / Weights::kInterleave;
  Vec sums[kChains][kRows][kTileVectors];
  ADAPTRT_UNROLL
  for (int chain = 0; chain < kChains; ++chain) {
    ADAPTRT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      ADAPTRT_UNROLL
      for (int v = 0; v < kTileVectors; ++v) sums[chain][r][v] = Simd::zero();
    }
  }
  const auto step = [&](Vec(&sum)[kRows][kTileVectors], std::int64_t group) __attribute__((always_inline)) {
    typename Weights::B columns[kTileVectors];
    const std::byte* from = b + group * row_bytes;
    ADAPTRT_UNROLL
    for (int v = 0; v < kTileVectors; ++v) columns[v] = Weights::load(from + v * kVectorBytes);
    ADAPTRT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const A* of_row = a + r * gemm.call.a_stride + group * Weights::kInterleave;
      const auto value = group == half_group ? Weights::broadcast_last(of_row) : Weights::broadcast(of_row);
      ADAPTRT_UNROLL
      for (int v = 0; v < kTileVectors; ++v) sum[r][v] = Weights::multiply_add(value, columns[v], sum[r][v]);
    }
  };
  for (std::int64_t i = 0; i < live.count; ++i) {
    const std::int64_t group = live.groups[i];
    fetcher.fetch<kLines>(i);
    if (kChains == 1 || group % kChains == 0) {
      step(sums[0], group);
    } else {
      step(sums[kChains - 1], group);
    }
  }
  ADAPTRT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    ADAPTRT_UNROLL
    for (int v = 0; v < kTileVectors; ++v) {
      Vec sum = sums[0][r][v];
      if constexpr (kChains == 2) sum = Simd::add(sum, sums[1][r][v]);
      Simd::store(gemm.call.out + r * gemm.call.out_stride + column + v * Simd::kLanes, sum);
    }
  }
}

using SparseTile = void (*)(const PanelGemm&, const LiveInputs&, std::int64_t, LiveFetcher);

template <class Weights, int kRows = kSparseRows>
SparseTile sparse_tile_of_rows(std::int64_t rows) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return sparse_tile_of_rows<Weights, kRows - 1>(rows);
  }
  return &sparse_tile<Weights, kRows>;
}

template <class Weights>
void sparse_gemm(const PanelGemm& gemm, const LiveInputs& live) {
  constexpr std::int64_t kGroup = kTileVectors * Simd::kLanes;
  static_assert(kPanelColumns % kGroup == 0);
  SpanFetcher others(gemm.fetch);
  others.fetch(others.lines());
  const SparseTile tile = sparse_tile_of_rows<Weights>(gemm.call.rows);
  const std::int64_t row_bytes = kPanelColumns * Weights::kColumnBytes;
  for (std::int64_t column = 0; column < kPanelColumns; column += kGroup) {
    const bool is_last = column + kGroup == kPanelColumns;
    const std::byte* here = gemm.call.panel + column * Weights::kColumnBytes;
    const std::byte* next = is_last ? gemm.call.next_panel : here + kGroup * Weights::kColumnBytes;
    tile(gemm, live, column, {here, next, live, row_bytes});
  }
}

}  // namespace
}  // namespace adaptrt
