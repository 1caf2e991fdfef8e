#pragma once

#include <cstdint>

#include "adaptrt/cuda/slot_tile.h"
#include "adaptrt/lora/modules.h"
#include "cuda/kernels/platform.h"

namespace adaptrt::cuda::lora {

/// Size of the tables' third dimension.
inline constexpr int kNumModules = kNumLoraModules;
/// attn_qkv has three parts; lm_head has one for each slice of the vocabulary (kVocabularySlice).
inline constexpr int kMaxParts = 32;
/// Elements in 16 bytes: the size of a thread's loads, and the padding unit of rows of `shrunk`.
inline constexpr int kVector = 8;

/// The input's width is summed in this many slices, each a multiple of kSliceUnit columns.
inline constexpr int kSlices = 8;
inline constexpr int kSliceUnit = 64;

/// Blocks of the kernels for decode steps per multiprocessor. For other GPUs than the H100's and H200's, nvcc
/// spills registers if there are more than two.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
inline constexpr int kDecodeBlocksPerMultiprocessor = 3;
#else
inline constexpr int kDecodeBlocksPerMultiprocessor = 2;
#endif

/// One part of the linear layer's output.
struct Part {
  int entry;  ///< in a slot's entries of the tables; with experts, the first expert's
  int out;    ///< width
  int start;  ///< first column in y
};

/// Consecutive tokens with the same adapter, and with the same expert if the layer has experts.
struct TokenTile {
  int first;
  int count;  ///< 0: nothing to do
  int slot;   ///< -1: the base model
  int expert;
};

/// Input of both kernels.
struct Step {
  const std::int32_t* sequence_offsets;
  const std::int32_t* adapter_slots;
  const std::int32_t* ranks;
  const std::int64_t* pointers;
  const std::int64_t* shifts;  ///< nullptr: no adapter has any
  int tokens;
  int sequences;
  int slot_entries;  ///< entries of a slot in the tables
  int tile;          ///< maximum number of tokens that a block processes at once
  /// For experts: the tiles, instead of sequence_offsets and adapter_slots. See NumberTiles.
  const SlotTile* tiles;
  int num_tiles;
  int expert_entries;  ///< entries of an expert; those of the next one follow
  int num_parts;
  Part parts[kMaxParts];
  void* shrunk;       ///< [parts, tokens, shrunk_stride] of the engine's type
  int shrunk_stride;  ///< max_rank, padded to a multiple of kVector
};

__device__ inline int slice_width(int in) {
  const int width = (in + kSlices - 1) / kSlices;
  return (width + kSliceUnit - 1) / kSliceUnit * kSliceUnit;
}

/// An adapter's update of one part.
struct Update {
  int rank;  ///< 0: no update, and the other fields are unused
  const void* a;
  const void* b;
  const float* magnitude;  ///< nullptr: none
  const float* shift;      ///< nullptr: none
};

__device__ inline Update update_of(const Step& step, const TokenTile& tile, int part) {
  if (tile.count == 0 || tile.slot < 0) return {0, nullptr, nullptr, nullptr, nullptr};
  const std::int64_t entry = static_cast<std::int64_t>(tile.slot) * step.slot_entries +
                             tile.expert * step.expert_entries + step.parts[part].entry;
  const std::int64_t* pointers = step.pointers + 3 * entry;
  return {step.ranks[entry], reinterpret_cast<const void*>(pointers[0]),
          reinterpret_cast<const void*>(pointers[1]), reinterpret_cast<const float*>(pointers[2]),
          step.shifts == nullptr ? nullptr : reinterpret_cast<const float*>(step.shifts[entry])};
}

/// Columns of a part that a block of expand computes.
struct Columns {
  int part;
  int first;
};

/// Columns of block `block`, if blocks have `block_columns` columns.
__device__ inline Columns find_columns(const Step& step, int block, int block_columns) {
  int part = 0;
  while (block * block_columns >= step.parts[part].out) {
    block -= (step.parts[part].out + block_columns - 1) / block_columns;
    ++part;
  }
  return {part, block * block_columns};
}

template <typename T>
__device__ inline T* shrunk_row(const Step& step, int part, int token) {
  const std::int64_t row = static_cast<std::int64_t>(part) * step.tokens + token;
  return static_cast<T*>(step.shrunk) + row * step.shrunk_stride;
}

}  // namespace adaptrt::cuda::lora
