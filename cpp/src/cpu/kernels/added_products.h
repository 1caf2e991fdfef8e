#pragma once

// Many small products of few rows that are added to their outputs, with the bits of gemm_panel.
// Included after gemm.h and compressed_matrix_gemm.h.

#include <algorithm>
#include <cstdint>
#include <span>

#include "adaptrt/core/panels.h"
#include "adaptrt/cpu/kernel_table.h"
#include "compressed_matrix_gemm.h"
#include "gemm.h"

namespace adaptrt {
namespace {

/// Nothing is prefetched: the panels are in the cache.
template <class Weights>
void add_products(std::span<const AddedProduct> products) {
  constexpr std::int64_t kElementBytes = sizeof(typename Weights::A);
  for (const AddedProduct& product : products) {
    PanelGemm gemm{.call = {.a_stride = product.a_stride / kElementBytes,
                            .panel = product.panel,
                            .k = product.k,
                            .width = kPanelColumns,
                            .out_stride = kPanelColumns},
                   .accumulate = true};
    for (std::int64_t row = 0; row < product.rows; row += kTileRows) {
      gemm.call.a = product.a + row * product.a_stride;
      gemm.call.out = product.out + row * kPanelColumns;
      gemm.call.rows = std::min<std::int64_t>(kTileRows, product.rows - row);
      if (product.compressed != nullptr) {
        matrix_panel_gemm<Weights>(gemm, *product.compressed);
      } else {
        tile_of_rows<Weights, kTileVectors, false, 0>(gemm.call.rows)(gemm, 0, 0, Simd::kLanes, false, {});
      }
    }
  }
}

/// nullptr without matrix_panel_gemm, or if a panel needs several groups of columns.
template <class Weights>
constexpr auto add_products_of() -> decltype(KernelTable::add_products) {
  if constexpr (kCanStream<Weights> && Simd::kLanes == kPieceOutputs) return &add_products<Weights>;
  return nullptr;
}

}  // namespace
}  // namespace adaptrt
