#include "linear_op.h"

#include <cstdint>
#include <optional>

#include "adaptrt/cuda/product_kernel.h"
#include "adaptrt/cuda/quantized_product_kernel.h"
#include "adaptrt/cuda/row_kernels.h"
#include "adaptrt/gpu/adapter_entries.h"
#include "kernel_configs.h"

namespace adaptrt {
namespace {

/// Returns where the product is written.
void* destination(const LinearOp& op, const Program& program, const CudaMemory& memory) {
  if (has_padded_output(op, program)) return memory.padded_output();
  if (is_activated(op.epilogue)) return memory.product();
  return op.epilogue == LinearEpilogue::kAdd ? memory.addend() : memory.buffer(op.output);
}

}  // namespace

LayerAdapters::LayerAdapters(const cuda::LoraKernel::Config& config, bool is_head, const CudaMemory& memory,
                             const void* x, std::int64_t in, void* y)
    : kernel_(config),
      is_head_(is_head),
      tables_(*memory.adapters()),
      workspace_(memory.workspace()),
      x_(x),
      in_(in),
      y_(y) {}

void LayerAdapters::enqueue(const CudaRun& run) const {
  kernel_.enqueue(
      {.tokens = is_head_ ? run.shape.logit_rows : run.shape.tokens,
       .in = in_,
       .sequences = is_head_ ? run.shape.logit_rows : run.shape.sequences + run.shape.split_sequences,
       .layers = tables_.ranks.dims[1]},
      {.x = x_,
       .base = y_,
       .sequence_offsets = is_head_ ? run.row_adapter_offsets : run.adapter_offsets,
       .adapter_slots = is_head_ ? run.row_adapter_slots : run.adapter_slots,
       .ranks = reinterpret_cast<const std::int32_t*>(tables_.ranks.address),
       .pointers = reinterpret_cast<const std::int64_t*>(tables_.pointers.address),
       .shifts = reinterpret_cast<const std::int64_t*>(tables_.shifts.address)},
      y_, workspace_, run.stream);
}

LinearFinish::LinearFinish(const LinearOp& op, const Program& program, bool is_head, const CudaMemory& memory,
                           DeviceWeights& weights)
    : is_head_(is_head), x_(memory.buffer(op.input)), y_(destination(op, program, memory)) {
  if (const auto config = lora_config(op, program)) {
    adapters_.emplace(*config, is_head, memory, x_, op.parts.front().weight.k, y_);
  }
  const float* bias = weights.biases(op.parts);
  const std::int32_t new_tokens = new_tokens_site(program.lora);
  if (op.output == program.logits && new_tokens >= 0) set_new_tokens(op, program, memory, new_tokens);
  if (has_padded_output(op, program)) {
    padded_logits_finish_ = {.rows = 0,
                             .width = product_width(op),
                             .stride = padded_rows(product_width(op)),
                             .logits_stride = program.buffers[static_cast<std::size_t>(op.output)].width,
                             .input = static_cast<const float*>(y_),
                             .logits = reinterpret_cast<float*>(memory.buffer(op.output)),
                             .scale = op.scale,
                             .softcap = op.softcap,
                             .bias = bias};
    return;
  }
  const bool is_activated_here = is_activated(op.epilogue);
  if (!is_activated_here && bias == nullptr && op.scale == 1.0F && op.softcap == 0.0F) return;
  if (stores_float32(op, program)) {
    logits_finish_ = {.elements = 0,
                      .logits = static_cast<float*>(y_),
                      .scale = op.scale,
                      .softcap = op.softcap,
                      .bias = bias,
                      .width = product_width(op)};
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

void LinearFinish::enqueue(const CudaRun& run) const {
  const std::int64_t rows = is_head_ ? run.shape.logit_rows : run.shape.tokens;
  if (adapters_ && run.shape.has_adapters) adapters_->enqueue(run);
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
  if (new_token_logits_ && run.shape.has_adapters) {
    cuda::NewTokenLogits logits = *new_token_logits_;
    logits.rows = rows;
    logits.adapter_slots = run.row_adapter_slots;
    cuda::enqueue(logits, run.stream);
  }
}

void LinearFinish::set_new_tokens(const LinearOp& op, const Program& program, const CudaMemory& memory,
                                  std::int32_t site) {
  const AdapterArrays& tables = *memory.adapters();
  const AdapterEntries entries(program.lora);
  new_token_logits_ = {.dtype = program.dtype,
                       .width = op.parts.front().weight.k,
                       .vocabulary = program.vocab_size,
                       .max_tokens = program.lora.max_extra_tokens,
                       .entry = entries.entry(static_cast<std::size_t>(site), 0),
                       .slot_entries = entries.count(),
                       .x = x_,
                       .ranks = reinterpret_cast<const std::int32_t*>(tables.ranks.address),
                       .pointers = reinterpret_cast<const std::int64_t*>(tables.pointers.address),
                       .scale = op.scale,
                       .softcap = op.softcap,
                       .logits = reinterpret_cast<float*>(memory.buffer(op.output))};
}

namespace {

/// The product of a layer with plain or quantised weights.
class Product {
 public:
  Product(const LinearOp& op, const Program& program, const void* x, void* y, DeviceWeights& weights)
      : x_(x), y_(y) {
    const PanelMatrix& first = op.parts.front().weight;
    const auto in = static_cast<std::int32_t>(first.k);
    const auto out = static_cast<std::int32_t>(padded_rows(product_width(op)));
    const bool float32_output = stores_float32(op, program);
    const Quantization& how = first.quantization;
    if (how.algo == QuantAlgo::kNone) {
      plain_.emplace(cuda::ProductKernel::Config{
          .dtype = program.dtype, .in_size = in, .out_size = out, .float32_output = float32_output});
      matrix_ = weights.matrices(op.parts);
    } else {
      quantized_.emplace(cuda::QuantizedProductKernel::Config{.dtype = program.dtype,
                                                              .bits = bits_of(how),
                                                              .in_size = in,
                                                              .out_size = out,
                                                              .group_size = group_size_of(first),
                                                              .float32_output = float32_output});
      matrices_ = weights.quantized_matrices(op.parts);
    }
  }

  void enqueue(std::int64_t tokens, void* stream) const {
    if (plain_) {
      plain_->enqueue(tokens, {.x = x_, .weights = matrix_}, y_, stream);
    } else {
      quantized_->enqueue(
          tokens,
          {.x = x_, .weights = matrices_.weights, .scales = matrices_.scales, .zeros = matrices_.zeros}, y_,
          stream);
    }
  }

 private:
  const void* x_;
  void* y_;
  std::optional<cuda::ProductKernel> plain_;
  const void* matrix_ = nullptr;
  std::optional<cuda::QuantizedProductKernel> quantized_;
  QuantizedMatrices matrices_;
};

class LinearLaunches final : public CudaOp {
 public:
  LinearLaunches(const LinearOp& op, const Program& program, bool is_head, const CudaMemory& memory,
                 DeviceWeights& weights)
      : is_head_(is_head),
        finish_(op, program, is_head, memory, weights),
        product_(op, program, memory.buffer(op.input), finish_.product(), weights) {}

  void enqueue(const CudaRun& run) const override {
    product_.enqueue(is_head_ ? run.shape.logit_rows : run.shape.tokens, run.stream);
    finish_.enqueue(run);
  }

 private:
  bool is_head_;
  LinearFinish finish_;
  Product product_;
};

}  // namespace

std::unique_ptr<const CudaOp> make_linear(const LinearOp& op, const Program& program, bool is_head,
                                          const CudaMemory& memory, DeviceWeights& weights) {
  return std::make_unique<LinearLaunches>(op, program, is_head, memory, weights);
}

}  // namespace adaptrt
