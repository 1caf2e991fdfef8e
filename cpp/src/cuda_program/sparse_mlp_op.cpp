#include "sparse_mlp_op.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <variant>

#include "adaptrt/cuda/product_kernel.h"
#include "adaptrt/cuda/row_kernels.h"
#include "adaptrt/cuda/sparse_kernels.h"
#include "buffers.h"
#include "kernel_configs.h"
#include "linear_op.h"

namespace adaptrt {
namespace {

/// A layer's adapters of one part, in place.
std::optional<LayerAdapters> adapters_of_part(const LinearOp& op, std::size_t part, const Program& program,
                                              const CudaMemory& memory, void* y) {
  std::optional<cuda::LoraKernel::Config> config = lora_config(op, program);
  if (!config) return std::nullopt;
  config->entries = {config->entries[part]};
  config->module_ids = {config->module_ids[part]};
  config->out_sizes = {config->out_sizes[part]};
  return LayerAdapters(*config, /*is_head=*/false, memory, memory.buffer(op.input), op.parts[part].weight.k,
                       y);
}

/// The gate is computed whole, with its adapters. Then its ReLU says which neurons are active. Adapters of up
/// change whole rows; the gate discards what they write to other neurons.
class SparseMlp final : public CudaOp {
 public:
  SparseMlp(const LinearOp& gated, const LinearOp& down, const NeuronWeights& neurons, const Program& program,
            const CudaMemory& memory, DeviceWeights& weights)
      : neurons_(neurons),
        x_(memory.buffer(gated.input)),
        gate_(memory.product()),
        up_(memory.product() + static_cast<std::size_t>(program.max_num_tokens * gated.parts[1].weight.n) *
                                   size_of(program.dtype)),
        input_product_({.dtype = program.dtype,
                        .in_size = static_cast<std::int32_t>(gated.parts[0].weight.k),
                        .out_size = static_cast<std::int32_t>(gated.parts[0].weight.n)}),
        down_product_({.dtype = program.dtype,
                       .in_size = static_cast<std::int32_t>(down.parts[0].weight.k),
                       .out_size = static_cast<std::int32_t>(down.parts[0].weight.n)}),
        gate_weights_(weights.matrix(gated.parts[0].weight)),
        gate_adapters_(adapters_of_part(gated, 0, program, memory, gate_)),
        up_adapters_(adapters_of_part(gated, 1, program, memory, up_)),
        down_finish_(down, program, /*is_head=*/false, memory, weights) {
    const std::int64_t width = gated.parts[0].weight.n;
    const float* bias = weights.biases(gated.parts);
    finish_ = {.dtype = program.dtype,
               .width = width,
               .product = gate_,
               .linear = up_,
               .bias = bias,
               .epilogue = gated.epilogue,
               .threshold = gated.threshold,
               .output = memory.buffer(gated.output)};
    mark_ = {.dtype = program.dtype,
             .neurons = width,
             .gate = gate_,
             .bias = bias,
             .threshold = gated.threshold,
             .masks = memory.neuron_masks()};
    sparse_up_ = {.dtype = program.dtype,
                  .in_size = gated.parts[1].weight.k,
                  .neurons = width,
                  .x = x_,
                  .masks = memory.neuron_masks(),
                  .rows = neurons.rows,
                  .y = up_};
    sparse_down_ = {.dtype = program.dtype,
                    .neurons = width,
                    .out_size = down.parts[0].weight.n,
                    .x = memory.buffer(down.input),
                    .masks = memory.neuron_masks(),
                    .columns = neurons.columns,
                    .y = down_finish_.product()};
  }

  void enqueue(const CudaRun& run) const override {
    const std::int64_t tokens = run.shape.tokens;
    const bool is_sparse = reads_active_neurons(run.shape);
    input_product_.enqueue(tokens, {.x = x_, .weights = gate_weights_}, gate_, run.stream);
    if (gate_adapters_ && run.shape.has_adapters) gate_adapters_->enqueue(run);
    if (is_sparse) {
      enqueue_rows(mark_, run);
      enqueue_rows(sparse_up_, run);
    } else {
      input_product_.enqueue(tokens, {.x = x_, .weights = neurons_.up}, up_, run.stream);
    }
    if (up_adapters_ && run.shape.has_adapters) up_adapters_->enqueue(run);
    enqueue_rows(finish_, run);
    if (is_sparse) {
      enqueue_rows(sparse_down_, run);
    } else {
      down_product_.enqueue(tokens, {.x = sparse_down_.x, .weights = neurons_.down}, sparse_down_.y,
                            run.stream);
    }
    down_finish_.enqueue(run);
  }

 private:
  template <typename Kernel>
  static void enqueue_rows(Kernel kernel, const CudaRun& run) {
    kernel.tokens = run.shape.tokens;
    cuda::enqueue(kernel, run.stream);
  }

  NeuronWeights neurons_;
  const void* x_;
  std::byte* gate_;
  std::byte* up_;
  cuda::ProductKernel input_product_;  ///< of gate and of up
  cuda::ProductKernel down_product_;
  const void* gate_weights_;
  std::optional<LayerAdapters> gate_adapters_;
  std::optional<LayerAdapters> up_adapters_;
  LinearFinish down_finish_;
  cuda::Finish finish_;
  cuda::MarkActive mark_;
  cuda::SparseUp sparse_up_;
  cuda::SparseDown sparse_down_;
};

}  // namespace

const LinearOp* sparse_gate(const Op& first, const Op& second) {
  const auto* gated = std::get_if<LinearOp>(&first);
  const auto* down = std::get_if<LinearOp>(&second);
  if (gated == nullptr || down == nullptr || !down->has_sparse_input) return nullptr;
  const bool is_pair = is_relu_gated(gated->epilogue) && gated->output == down->input &&
                       down->parts.size() == 1 && !is_activated(down->epilogue);
  if (!is_pair || gated->parts[1].weight.n > cuda::kMaxNeurons) return nullptr;
  const bool is_scaled = gated->scale != 1.0F || gated->softcap != 0.0F;
  return !is_scaled && gated->parts[1].weight.is_plain() ? gated : nullptr;
}

bool reads_active_neurons(const RunShape& shape) {
  return shape.tokens <= cuda::kMaxSparseTokens;
}

std::unique_ptr<const CudaOp> make_sparse_mlp(const LinearOp& gated, const LinearOp& down,
                                              const NeuronWeights& neurons, const Program& program,
                                              const CudaMemory& memory, DeviceWeights& weights) {
  return std::make_unique<SparseMlp>(gated, down, neurons, program, memory, weights);
}

}  // namespace adaptrt
