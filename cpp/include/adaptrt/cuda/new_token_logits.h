#pragma once

#include <cstdint>

#include "adaptrt/core/dtype.h"

namespace adaptrt::cuda {

/// Logits of the tokens that a row's adapter adds to the vocabulary, in the columns after it:
///
///   logits[row, vocabulary + i] = softcap * tanh(x[row] A[i]^T * scale / softcap)
///
/// for each row i of the adapter's A[new tokens, width]. Other columns stay as they are. A sum has an order
/// that depends on the width only.
struct NewTokenLogits {
  DType dtype = DType::kBFloat16;
  std::int64_t rows = 0;
  std::int64_t width = 0;                       ///< of x, a multiple of 8
  std::int64_t vocabulary = 0;                  ///< logits before those of new tokens
  std::int64_t max_tokens = 0;                  ///< most new tokens of an adapter
  std::int64_t entry = 0;                       ///< of new tokens, among a slot's entries
  std::int64_t slot_entries = 0;                ///< entries of a slot in the tables
  const void* x = nullptr;                      ///< T [rows, width], aligned to 16 bytes
  const std::int32_t* adapter_slots = nullptr;  ///< [rows]; -1: the base model
  const std::int32_t* ranks = nullptr;          ///< see LoraKernel::Inputs
  const std::int64_t* pointers = nullptr;
  float scale = 1.0F;
  float softcap = 0.0F;     ///< 0: none
  float* logits = nullptr;  ///< [rows, vocabulary + max_tokens]
};

/// Enqueues one launch, whose shape depends on sizes only. Throws as the kernels of rows.
void enqueue(const NewTokenLogits& work, void* stream);

}  // namespace adaptrt::cuda
