#pragma once

// Included after simd_*.h and gemm.h; gemm.h says why.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "adaptrt/core/quantized_panels.h"
#include "adaptrt/cpu/kernel_table.h"
#include "elementwise.h"
#include "gemm.h"
#include "narrow_weights.h"
#include "panel_stream.h"
#include "quantized_tile.h"
#include "quantized_weights.h"

namespace adaptrt {
namespace {

/// Size of the decoded part of a panel. It fits in the first-level cache together with the rows and the
/// prefetched data.
inline constexpr std::int64_t kDecodedBytes = 16384;

/// Multiplies all rows and columns, in tiles of at most kRows rows.
template <class Weights, int kRows, bool kStreams>
void quantized_panel(const QuantizedGemm& gemm, const QuantizedPanel& panel, const std::byte* words) {
  const auto decoder = decoder_of<Weights>(gemm.quantization);
  constexpr std::int64_t kGroup = kTileVectors * Simd::kLanes;
  constexpr int kLines =
      kStreams ? static_cast<int>((kGroup * Weights::kColumnBytes + kCacheLine - 1) / kCacheLine) : 0;
  const std::int64_t blocks = (gemm.call.rows + kRows - 1) / kRows;
  const InputRange inputs{0, gemm.call.k};
  std::int64_t column = 0;
  for (; column + kGroup <= gemm.call.width; column += kGroup) {
    const auto prefetch = [&] {
      if constexpr (kStreams) {
        return stream_of_columns(panel, column, gemm.call.width, Weights::kColumnBytes, gemm.call.next_panel);
      } else {
        return Prefetch{};
      }
    }();
    for (std::int64_t row = 0, block = 0; block < blocks; ++block) {
      const std::int64_t rows = rows_of_tile(gemm.call.rows - row, blocks - block);
      quantized_rows<Weights, kLines, kRows>(gemm, panel, decoder, words, inputs, row, rows, column,
                                             prefetch);
      row += rows;
    }
  }
  // Few matrices have such columns, in their last panel. Rows after the last whole tile are multiplied one by
  // one.
  for (; column < gemm.call.width; column += Simd::kLanes) {
    const std::int64_t lanes = std::min<std::int64_t>(Simd::kLanes, gemm.call.width - column);
    std::int64_t row = 0;
    for (; row + kRows <= gemm.call.rows; row += kRows) {
      quantized_tile<Weights, kRows, 1, true, 0>(gemm, panel, decoder, words, inputs, row, column, lanes,
                                                 Prefetch{});
    }
    for (; row < gemm.call.rows; ++row) {
      quantized_tile<Weights, 1, 1, true, 0>(gemm, panel, decoder, words, inputs, row, column, lanes,
                                             Prefetch{});
    }
  }
}

/// Size of a pair of bfloat16 or of a float32.
inline constexpr std::int64_t kExpandedBytes = 4;

/// Decodes `units` units of k for kVectors vectors of columns of a panel; the last one has last_lanes
/// columns. Calls fetch.at_lines() for the lines that it reads.
template <class Packed, int kVectors, class Fetch = FetchAhead>
void expand_columns(const Packed& words_decoder, const std::byte* words, std::int64_t width,
                    std::int64_t units, std::int64_t last_lanes, std::byte* out, std::int64_t out_row_bytes,
                    const Fetch& fetch = {}) {
  const Packed decoder = words_decoder;
  const std::int64_t row_bytes = width * Packed::kColumnBytes;
  const auto expand = [&](auto wanted) __attribute__((always_inline)) {
    ADAPTRT_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const std::int64_t lanes = v == kVectors - 1 ? last_lanes : Simd::kLanes;
      const auto word = load_word<Packed>(words + v * Simd::kLanes * Packed::kColumnBytes, row_bytes, lanes);
      for_each_index<Packed::kUnits>([&](auto unit) __attribute__((always_inline)) {
        if (!wanted(unit())) return;
        Packed::store(out + unit() * out_row_bytes + v * Simd::kLanes * kExpandedBytes,
                      decoder.template decode<unit()>(word), lanes);
      });
    }
    constexpr int kLines =
        static_cast<int>((kVectors * Simd::kLanes * Packed::kColumnBytes + kCacheLine - 1) / kCacheLine);
    ADAPTRT_UNROLL
    for (int row = 0; row < kWordLines<Packed>; ++row) {
      fetch.template at_lines<kLines>(words);
      words += row_bytes;
    }
    out += Packed::kUnits * out_row_bytes;
  };
  for (; units >= Packed::kUnits; units -= Packed::kUnits) {
    expand([](int) __attribute__((always_inline)) { return true; });
  }
  if constexpr (!kHasWholeWords<Packed>) {
    if (units > 0) expand([&](int unit) __attribute__((always_inline)) { return unit < units; });
  }
}

/// Number of inputs that quantized_streamed decodes at once.
template <class Float>
inline constexpr std::int64_t kStretchInputs =
    kDecodedBytes / (kPanelColumns * Float::kColumnBytes) * Float::kInterleave;

/// See KernelTable::stretch_inputs. Panels with one group of columns are faster if they are expanded.
template <class Float>
inline constexpr std::int64_t kStreamedInputs =
    kTileVectors * Simd::kLanes < kPanelColumns ? kStretchInputs<Float> : 0;

/// True if no group of inputs spans two stretches, or if there is one group whose sums can be continued.
template <class Float>
bool has_whole_stretches(const QuantizedGemm& gemm) {
  const std::int64_t size = group_size_of(gemm);
  return kStretchInputs<Float> % size == 0 || (size >= gemm.call.k && chains_of(kTileVectors) == 1);
}

/// Multiplies several tiles of rows by a whole panel, if has_whole_stretches(). A stretch of k is decoded to
/// the first-level cache, and all rows are multiplied by it before the next one is read. Meanwhile the tiles
/// prefetch the next stretch.
template <class Packed, class Float>
void quantized_streamed(const QuantizedGemm& gemm, const QuantizedPanel& panel) {
  constexpr std::int64_t kWordBytes = kPanelColumns * Packed::kColumnBytes * kWordLines<Packed>;
  constexpr std::int64_t kStretch = kStretchInputs<Float>;
  constexpr std::int64_t kWordInputs = Packed::kUnits * Packed::kInterleave;
  constexpr std::int64_t kGroup = kTileVectors * Simd::kLanes;
  alignas(kCacheLine) std::byte decoded[kDecodedBytes];
  const auto decoder = decoder_of<Packed>(gemm.quantization);
  const std::int64_t tiles = (gemm.call.rows + kTileRows - 1) / kTileRows;
  for (std::int64_t begin = 0; begin < gemm.call.k; begin += kStretch) {
    const InputRange inputs{begin, std::min(begin + kStretch, gemm.call.k)};
    const std::byte* words = panel.weights + begin / kWordInputs * kWordBytes;
    const std::int64_t units = (inputs.end - begin + Packed::kInterleave - 1) / Packed::kInterleave;
    for (std::int64_t column = 0; column < kPanelColumns; column += kGroup) {
      expand_columns<Packed, kTileVectors>(decoder, words + column * Packed::kColumnBytes, kPanelColumns,
                                           units, Simd::kLanes, decoded + column * kExpandedBytes,
                                           kPanelColumns * kExpandedBytes);
    }
    const bool is_last = inputs.end == gemm.call.k;
    const std::byte* next = is_last && gemm.call.next_panel != nullptr
                                ? gemm.call.next_panel
                                : words + kStretch / kWordInputs * kWordBytes;
    // Bytes that each tile prefetches with each unit: less than a cache line.
    const std::int64_t parts = tiles * (kPanelColumns / kGroup) * Packed::kUnits;
    const std::int64_t bytes = (kWordBytes + parts - 1) / parts;
    std::int64_t row = 0;
    for (std::int64_t tile = 0; tile < tiles; ++tile) {
      const std::int64_t rows = rows_of_tile(gemm.call.rows - row, tiles - tile);
      for (std::int64_t column = 0; column < kPanelColumns; column += kGroup) {
        quantized_rows<Expanded<Float>, 1, kTileRows>(gemm, panel, {}, decoded, inputs, row, rows, column,
                                                      Prefetch{next, bytes});
        next += units * bytes;
      }
      row += rows;
    }
  }
}

template <class Packed, class Float, bool kIsInt8>
void multiply_quantized(const QuantizedGemm& gemm) {
  const QuantizedPanel panel = parts_of(gemm);
  if (gemm.expanded != nullptr) {
    quantized_panel<Expanded<Float>, kTileRows, false>(gemm, panel, gemm.expanded);
    return;
  }
  // With panels of one group of columns, decoding four bits for each tile takes less time than storing and
  // loading the decoded weights.
  if constexpr (kIsInt8 || kTileVectors * Simd::kLanes < kPanelColumns) {
    if (gemm.call.rows > kTileRows && gemm.call.width == kPanelColumns && has_whole_stretches<Float>(gemm)) {
      quantized_streamed<Packed, Float>(gemm, panel);
      return;
    }
  }
  quantized_panel<Packed, kDecodedTileRows, true>(gemm, panel, panel.weights);
}

template <class Packed>
void expand_weights(const QuantizedGemm& gemm, std::byte* out) {
  constexpr std::int64_t kGroup = kTileVectors * Simd::kLanes;
  const std::int64_t units = (gemm.call.k + Packed::kInterleave - 1) / Packed::kInterleave;
  const auto decoder = decoder_of<Packed>(gemm.quantization);
  const auto columns = [&]<int kVectors>(std::integral_constant<int, kVectors>, std::int64_t column,
                                         std::int64_t last_lanes) {
    expand_columns<Packed, kVectors>(decoder, gemm.call.panel + column * Packed::kColumnBytes,
                                     gemm.call.width, units, last_lanes, out + column * kExpandedBytes,
                                     gemm.call.width * kExpandedBytes);
  };
  std::int64_t column = 0;
  for (; column + kGroup <= gemm.call.width; column += kGroup) {
    columns(std::integral_constant<int, kTileVectors>{}, column, Simd::kLanes);
  }
  for (; column < gemm.call.width; column += Simd::kLanes) {
    columns(std::integral_constant<int, 1>{}, column,
            std::min<std::int64_t>(Simd::kLanes, gemm.call.width - column));
  }
}

/// `Float`: multiplies activations by decoded weights.
template <class Float>
void quantized_gemm(const QuantizedGemm& gemm) {
  if (gemm.quantization.algo != QuantAlgo::kW4A16) {
    multiply_quantized<typename PackedFor<Float>::Int8, Float, true>(gemm);
    return;
  }
  with_bits<PackedFor<Float>>(gemm.quantization, [&]<class Packed>(std::type_identity<Packed>) {
    multiply_quantized<Packed, Float, false>(gemm);
  });
}

template <class Float>
void expand_panel(const QuantizedGemm& gemm, std::byte* out) {
  if (gemm.quantization.algo != QuantAlgo::kW4A16) {
    expand_weights<typename PackedFor<Float>::Int8>(gemm, out);
    return;
  }
  with_bits<PackedFor<Float>>(gemm.quantization, [&]<class Packed>(std::type_identity<Packed>) {
    expand_weights<Packed>(gemm, out);
  });
}

inline void sum_groups(const std::byte* x, DType type, std::int64_t n, std::int64_t group_size, float* out) {
  const std::int64_t size = group_size == 0 ? n : group_size;
  for (std::int64_t first = 0; first < n; first += size) {
    const std::int64_t last = std::min(first + size, n);
    Simd::Vec sums = Simd::zero();
    for (std::int64_t i = first; i < last; i += Simd::kLanes) {
      sums = Simd::add(sums, load_as(x, type, i, std::min<std::int64_t>(Simd::kLanes, last - i)));
    }
    *out++ = Simd::sum(sums);
  }
}

}  // namespace
}  // namespace adaptrt
