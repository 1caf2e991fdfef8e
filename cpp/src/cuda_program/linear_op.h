#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "adaptrt/cuda/lora_kernel.h"
#include "adaptrt/cuda/new_token_logits.h"
#include "adaptrt/cuda/row_kernels.h"
#include "adaptrt/program/program.h"
#include "cuda_memory.h"
#include "cuda_op.h"
#include "device_weights.h"

namespace adaptrt {

/// The adapters of a linear layer, or of some of its parts, in place.
class LayerAdapters {
 public:
  /// `is_head`: the rows are logit rows. x: T [rows, in].
  LayerAdapters(const cuda::LoraKernel::Config& config, bool is_head, const CudaMemory& memory, const void* x,
                std::int64_t in, void* y);
  void enqueue(const CudaRun& run) const;

 private:
  cuda::LoraKernel kernel_;
  bool is_head_;
  const AdapterArrays& tables_;
  void* workspace_;
  const void* x_;
  std::int64_t in_;
  void* y_;
};

/// Work after the product of a linear layer: its adapters, then bias, scale, soft cap and activation.
class LinearFinish {
 public:
  LinearFinish(const LinearOp& op, const Program& program, bool is_head, const CudaMemory& memory,
               DeviceWeights& weights);
  /// Returns where the product must be written.
  [[nodiscard]] void* product() const { return y_; }
  void enqueue(const CudaRun& run) const;

 private:
  /// `site`: that of new tokens.
  void set_new_tokens(const LinearOp& op, const Program& program, const CudaMemory& memory,
                      std::int32_t site);

  bool is_head_;
  const void* x_;
  void* y_;
  std::optional<LayerAdapters> adapters_;
  std::optional<cuda::Finish> finish_;
  std::optional<cuda::FinishLogits> logits_finish_;
  std::optional<cuda::FinishPaddedLogits> padded_logits_finish_;
  std::optional<cuda::NewTokenLogits> new_token_logits_;
};

/// Makes a linear layer: the product, then its adapters, then bias, scale, soft cap and activation.
/// `is_head`: its rows are logit rows.
[[nodiscard]] std::unique_ptr<const CudaOp> make_linear(const LinearOp& op, const Program& program,
                                                        bool is_head, const CudaMemory& memory,
                                                        DeviceWeights& weights);

}  // namespace adaptrt
