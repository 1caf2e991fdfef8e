#include "linear_op.h"

#include <cstdint>
#include <optional>

#include "adaptrt/cuda/lora_kernel.h"
#include "adaptrt/cuda/product_kernel.h"
#include "adaptrt/cuda/row_kernels.h"
#include "kernel_configs.h"

namespace adaptrt {
namespace {

/// A site's adapters: y += B A x, in place.
struct Adapters {
  cuda::LoraKernel kernel;
  std::int64_t in = 0;
  const AdapterArrays* tables = nullptr;
  void* workspace = nullptr;
};

class LinearLaunches final : public CudaOp {
 public:
  LinearLaunches(const LinearOp& op, const Program& program, bool is_head, const CudaMemory& memory,
                 DeviceWeights& weights)
      : is_head_(is_head),
        inputs_{.x = memory.buffer(op.input), .weights = weights.matrices(op.parts)},
        product_(product_config(op, program)),
        y_(destination(op, program, memory)) {
    if (const auto config = lora_config(op, program)) {
      adapters_ = Adapters{.kernel = cuda::LoraKernel(*config),
                           .in = op.parts.front().weight.k,
                           .tables = &*memory.adapters(),
                           .workspace = memory.workspace()};
    }
    const float* bias = weights.biases(op.parts);
    if (has_padded_logits(op, program)) {
      padded_logits_finish_ = {.rows = 0,
                               .width = product_width(op),
                               .stride = padded_rows(product_width(op)),
                               .input = static_cast<const float*>(y_),
                               .logits = reinterpret_cast<float*>(memory.buffer(op.output)),
                               .scale = op.scale,
                               .softcap = op.softcap,
                               .bias = bias};
      return;
    }
    const bool is_activated_here = is_activated(op.epilogue);
    if (!is_activated_here && bias == nullptr && op.scale == 1.0F && op.softcap == 0.0F) return;
    if (op.output == program.logits) {
      logits_finish_ = {.elements = 0,
                        .logits = static_cast<float*>(y_),
                        .scale = op.scale,
                        .softcap = op.softcap,
                        .bias = bias,
                        .width = program.logits_width()};
      return;
    }
    finish_ = cuda::Finish{
        .dtype = program.dtype,
        .width = is_gated(op.epilogue) ? op.parts.front().weight.n : product_width(op),
        .product = y_,
        .bias = bias,
        .scale = op.scale,
        .softcap = op.softcap,
        .epilogue = is_activated_here ? op.epilogue : LinearEpilogue::kStore,
        .threshold = op.threshold,
        .output = is_activated_here ? memory.buffer(op.output) : y_,
    };
  }

  void enqueue(const CudaRun& run) const override {
    const std::int64_t rows = is_head_ ? run.shape.logit_rows : run.shape.tokens;
    product_.enqueue(rows, inputs_, y_, run.stream);
    if (adapters_ && run.shape.has_adapters) adapt(run, *adapters_);
    if (finish_) {
      cuda::Finish finish = *finish_;
      finish.tokens = rows;
      cuda::enqueue(finish, run.stream);
    }
    if (logits_finish_) {
      cuda::FinishLogits finish = *logits_finish_;
      finish.elements = rows * finish.width;
      cuda::enqueue(finish, run.stream);
    }
    if (padded_logits_finish_) {
      cuda::FinishPaddedLogits finish = *padded_logits_finish_;
      finish.rows = rows;
      cuda::enqueue(finish, run.stream);
    }
  }

 private:
  static cuda::ProductKernel::Config product_config(const LinearOp& op, const Program& program) {
    return {.dtype = program.dtype,
            .in_size = static_cast<std::int32_t>(op.parts.front().weight.k),
            .out_size = static_cast<std::int32_t>(padded_rows(product_width(op))),
            .float32_output = op.output == program.logits};
  }

  /// Returns where the product is written.
  static void* destination(const LinearOp& op, const Program& program, const CudaMemory& memory) {
    if (has_padded_logits(op, program)) return memory.padded_logits();
    if (is_activated(op.epilogue)) return memory.product();
    return op.epilogue == LinearEpilogue::kAdd ? memory.addend() : memory.buffer(op.output);
  }

  void adapt(const CudaRun& run, const Adapters& adapters) const {
    adapters.kernel.enqueue(
        {.tokens = run.shape.tokens,
         .in = adapters.in,
         .sequences = run.shape.sequences + run.shape.split_sequences,
         .layers = adapters.tables->ranks.dims[1]},
        {.x = inputs_.x,
         .base = y_,
         .sequence_offsets = run.adapter_offsets,
         .adapter_slots = run.adapter_slots,
         .ranks = reinterpret_cast<const std::int32_t*>(adapters.tables->ranks.address),
         .pointers = reinterpret_cast<const std::int64_t*>(adapters.tables->pointers.address)},
        y_, adapters.workspace, run.stream);
  }

  bool is_head_;
  cuda::ProductKernel::Inputs inputs_;
  cuda::ProductKernel product_;
  void* y_;
  std::optional<Adapters> adapters_;
  std::optional<cuda::Finish> finish_;
  std::optional<cuda::FinishLogits> logits_finish_;
  std::optional<cuda::FinishPaddedLogits> padded_logits_finish_;
};

}  // namespace

std::unique_ptr<const CudaOp> make_linear(const LinearOp& op, const Program& program, bool is_head,
                                          const CudaMemory& memory, DeviceWeights& weights) {
  return std::make_unique<LinearLaunches>(op, program, is_head, memory, weights);
}

}  // namespace adaptrt
