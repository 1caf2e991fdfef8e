#pragma once

// Included after a header with Simd and one with Tiles.

#include "adaptrt/cpu/kernel_table.h"
#include "streamed_rows.h"
#include "tile_added_products.h"
#include "tile_attention_pipeline.h"
#include "tile_columns.h"
#include "tile_compressed.h"
#include "tile_compressed_matrix.h"
#include "tile_gemm.h"
#include "tile_int8.h"
#include "tile_quantized.h"
#include "tile_sparse.h"
#include "tile_w4a8.h"

namespace adaptrt {
namespace {

/// The second-level cache holds the sums of a block of rows, its activations for a part of k, and the weights
/// of two panels for that part.
inline constexpr std::int64_t kTiledRows = 512;
inline constexpr std::int64_t kWholeBytes = 1024 * 1024;
inline constexpr std::int64_t kPartBytes = 512 * 1024;

/// Returns the table `vectors` with the products of bfloat16 and int8 on tile registers, and its attention in
/// bfloat16. `vectors` may lack the kernels of ADAPTRT_TILED_FAMILY (families.def); the others must use the
/// same Simd, so that all round to bfloat16 in the same way.
inline KernelTable make_tile_table(const char* name, const KernelTable& vectors) {
  KernelTable table = vectors;
  table.name = name;
  table.block_rows = kTiledRows;
  table.whole_bytes = kWholeBytes;
  table.part_bytes = kPartBytes;
  table.streamed_rows = kTileHeight;
  table.few_rows = kFewRows;
  table.pack_rows = &pack_steps;
  table.stream_rows = &stream_rows;
  table.release_tiles = &Tiles::release;
  table.gemm[static_cast<std::size_t>(DType::kBFloat16)] = &tile_gemm;
  table.add_products = &tile_add_products<Simd::kLanes == kPieceOutputs>;
  table.added_rows = kFewRows;
  table.compressed_gemm = &tile_compressed_gemm<Simd::kLanes == kPieceOutputs>;
  table.compressed_rows = kTiledRows;
  table.matrix_panel_gemm = &tile_matrix_panel_gemm<Simd::kLanes == kPieceOutputs>;
  table.codebook_gemm[static_cast<std::size_t>(DType::kBFloat16)] = &tile_codebook_gemm;
  table.codebook_rows[static_cast<std::size_t>(DType::kBFloat16)] = kTiledRows;
  table.gathered_gemm[static_cast<std::size_t>(DType::kBFloat16)] = &tile_gathered_gemm;
  table.sparse_gemm[static_cast<std::size_t>(DType::kBFloat16)] = &tile_sparse_gemm;
  table.column_gemm[static_cast<std::size_t>(DType::kBFloat16)] = &tile_column_gemm;
  table.sparse_rows[static_cast<std::size_t>(DType::kBFloat16)] = kFewRows;
  table.quantized_gemm[static_cast<std::size_t>(DType::kBFloat16)] = &tile_quantized_gemm;
  table.int8_decoded_rows = kTiledRows;
  table.int4_decoded_rows = kTiledRows;
  table.stretch_inputs[static_cast<std::size_t>(DType::kBFloat16)] = 0;
  table.int16_gemm = nullptr;
  table.round_to_int16 = nullptr;
  table.int8_gemm = &tile_int8_gemm;
  table.w4a8_gemm = &tile_w4a8_gemm;
  table.attend[static_cast<std::size_t>(DType::kBFloat16)] = &tile_attend;
  return table;
}

}  // namespace
}  // namespace adaptrt
