#include "linear_op.h"

#include <cstdint>
#include <optional>

#include "adaptrt/cuda/lora_kernel.h"
#include "adaptrt/cuda/new_token_logits.h"
#include "adaptrt/cuda/product_kernel.h"
#include "adaptrt/cuda/quantized_product_kernel.h"
#include "adaptrt/cuda/row_kernels.h"
#include "adaptrt/gpu/adapter_entries.h"
#include "kernel_configs.h"

namespace adaptrt {
namespace {

/// A site's adapters, in place.
struct Adapters {
  cuda::LoraKernel kernel;
  std::int64_t in = 0;
  const AdapterArrays* tables = nullptr;
  void* workspace = nullptr;
};

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
        x_(memory.buffer(op.input)),
        y_(destination(op, program, memory)),
        product_(op, program, x_, y_, weights) {
    if (const auto config = lora_config(op, program)) {
      adapters_ = Adapters{.kernel = cuda::LoraKernel(*config),
                           .in = op.parts.front().weight.k,
                           .tables = &*memory.adapters(),
                           .workspace = memory.workspace()};
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

  void enqueue(const CudaRun& run) const override {
    const std::int64_t rows = is_head_ ? run.shape.logit_rows : run.shape.tokens;
    product_.enqueue(rows, run.stream);
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
    if (new_token_logits_ && run.shape.has_adapters) {
      cuda::NewTokenLogits logits = *new_token_logits_;
      logits.rows = rows;
      logits.adapter_slots = run.row_adapter_slots;
      cuda::enqueue(logits, run.stream);
    }
  }

 private:
  /// `site`: that of new tokens.
  void set_new_tokens(const LinearOp& op, const Program& program, const CudaMemory& memory,
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

  /// Returns where the product is written.
  static void* destination(const LinearOp& op, const Program& program, const CudaMemory& memory) {
    if (has_padded_output(op, program)) return memory.padded_output();
    if (is_activated(op.epilogue)) return memory.product();
    return op.epilogue == LinearEpilogue::kAdd ? memory.addend() : memory.buffer(op.output);
  }

  void adapt(const CudaRun& run, const Adapters& adapters) const {
    adapters.kernel.enqueue(
        {.tokens = is_head_ ? run.shape.logit_rows : run.shape.tokens,
         .in = adapters.in,
         .sequences = is_head_ ? run.shape.logit_rows : run.shape.sequences + run.shape.split_sequences,
         .layers = adapters.tables->ranks.dims[1]},
        {.x = x_,
         .base = y_,
         .sequence_offsets = is_head_ ? run.row_adapter_offsets : run.adapter_offsets,
         .adapter_slots = is_head_ ? run.row_adapter_slots : run.adapter_slots,
         .ranks = reinterpret_cast<const std::int32_t*>(adapters.tables->ranks.address),
         .pointers = reinterpret_cast<const std::int64_t*>(adapters.tables->pointers.address),
         .shifts = reinterpret_cast<const std::int64_t*>(adapters.tables->shifts.address)},
        y_, adapters.workspace, run.stream);
  }

  bool is_head_;
  const void* x_;
  void* y_;
  Product product_;
  std::optional<Adapters> adapters_;
  std::optional<cuda::Finish> finish_;
  std::optional<cuda::FinishLogits> logits_finish_;
  std::optional<cuda::FinishPaddedLogits> padded_logits_finish_;
  std::optional<cuda::NewTokenLogits> new_token_logits_;
};

}  // namespace

std::unique_ptr<const CudaOp> make_linear(const LinearOp& op, const Program& program, bool is_head,
                                          const CudaMemory& memory, DeviceWeights& weights) {
  return std::make_unique<LinearLaunches>(op, program, is_head, memory, weights);
}

}  // namespace adaptrt
