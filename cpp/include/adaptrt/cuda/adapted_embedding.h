#pragma once

#include <cstdint>

#include "adaptrt/cuda/row_kernels.h"

namespace adaptrt::cuda {

/// Writes the rows of Embedding again for tokens whose adapter changes the embedding:
///
///   output[row] = ((table[id] + B A[:, id]) * magnitude + shift) * scale + positions[position]
///
/// A[rank, tokens of the slice], B[width, rank]. Each slice of kVocabularySlice tokens has an A and a B of
/// its own, in the place of a layer of the tables. Other rows are not touched. A sum adds the rank's elements
/// in order.
///
/// A token beyond the vocabulary is one that its adapter adds: its row of the table is a column of the
/// adapter's B[width, new tokens] at new_tokens_entry, and it has no A, magnitude and shift.
struct AdaptedEmbedding {
  static constexpr std::int64_t kNoNewTokens = -1;

  Embedding embedding;
  std::int64_t layers = 0;                       ///< second dimension of the tables
  std::int64_t new_tokens_entry = kNoNewTokens;  ///< among a slot's entries
  std::int32_t max_rank = 0;                     ///< maximum rank in the tables
  bool dora = false;                             ///< true: applies magnitudes
  const std::int32_t* adapter_slots = nullptr;   ///< [tokens]; -1: the base model
  const std::int32_t* ranks = nullptr;           ///< see LoraKernel::Inputs
  const std::int64_t* pointers = nullptr;
  const std::int64_t* shifts = nullptr;
};

/// Enqueues one launch, whose shape depends on sizes only. Throws as the kernels of rows.
void enqueue(const AdaptedEmbedding& work, void* stream);

}  // namespace adaptrt::cuda
