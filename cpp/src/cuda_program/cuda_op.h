#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "adaptrt/gpu/gpu_model.h"

namespace adaptrt {

/// One run of the model: its sizes, and the addresses of its step arrays on the device.
struct CudaRun {
  RunShape shape;
  const std::int32_t* token_ids = nullptr;         ///< [tokens]
  const std::int32_t* positions = nullptr;         ///< [tokens]
  const std::int32_t* sequence_offsets = nullptr;  ///< [sequences + 1]
  const std::int32_t* block_tables = nullptr;      ///< [sequences, blocks_per_sequence]
  const std::int32_t* logit_rows = nullptr;        ///< [logit rows]
  const std::int32_t* prompt_lengths = nullptr;    ///< [sequences], where the model has them
  const std::int32_t* adapter_slots = nullptr;     ///< [sequences + split sequences], with LoRA
  const std::int32_t* adapter_offsets = nullptr;   ///< [sequences + split sequences + 1], with LoRA
  /// See StepPlaces; nullptr where no op reads them.
  const std::int32_t* token_adapter_slots = nullptr;
  const std::int32_t* row_adapter_slots = nullptr;
  const std::int32_t* row_adapter_offsets = nullptr;
  const std::int32_t* state_slots = nullptr;  ///< [sequences], where the model keeps states
  void* stream = nullptr;                     ///< cudaStream_t
};

/// An op of a program with its addresses on the device resolved. The launches of a run depend on its shape
/// only, so a captured graph may run again with other step arrays.
class CudaOp {
 public:
  virtual ~CudaOp() = default;
  /// Enqueues the op's launches. Throws StepError if CUDA rejects one.
  virtual void enqueue(const CudaRun& run) const = 0;
};

using CudaOps = std::vector<std::unique_ptr<const CudaOp>>;

}  // namespace adaptrt
