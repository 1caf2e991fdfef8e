#include "row_ops.h"

#include <cstdint>

#include "adaptrt/cuda/adapted_embedding.h"
#include "adaptrt/cuda/row_kernels.h"
#include "adaptrt/gpu/adapter_entries.h"
#include "buffers.h"
#include "kernel_configs.h"
#include "single_launch.h"

namespace adaptrt {
namespace {

DType dtype_of(const Program& program, BufferId id) {
  return program.buffers[static_cast<std::size_t>(id)].dtype;
}

cuda::Embedding embedding_kernel(const EmbeddingOp& op, const Program& program, const CudaMemory& memory,
                                 DeviceWeights& weights) {
  return {.dtype = program.dtype,
          .width = op.table.k,
          .vocabulary = op.table.n,
          .table = weights.matrix(op.table),
          .scale = op.scale,
          .positions = op.positions.data == nullptr ? nullptr : weights.matrix(op.positions),
          .output = floats(memory.buffer(op.output))};
}

void set_tokens(cuda::Embedding& work, const CudaRun& run) {
  work.tokens = run.shape.tokens;
  work.token_ids = run.token_ids;
  work.position_ids = run.positions;
}

}  // namespace

std::unique_ptr<const CudaOp> make_embedding(const EmbeddingOp& op, const Program& program,
                                             const CudaMemory& memory, DeviceWeights& weights) {
  return make_launch(embedding_kernel(op, program, memory, weights), set_tokens);
}

std::unique_ptr<const CudaOp> make_adapted_embedding(const EmbeddingOp& op, const Program& program,
                                                     const CudaMemory& memory, DeviceWeights& weights) {
  const std::int32_t new_tokens = new_tokens_site(program.lora);
  if (op.lora_site < 0 || (!is_adapted(LoraModule::kEmbedding, program) && new_tokens < 0)) return nullptr;
  const AdapterArrays& tables = *memory.adapters();
  const cuda::AdaptedEmbedding kernel{
      .embedding = embedding_kernel(op, program, memory, weights),
      .layers = tables.ranks.dims[1],
      .new_tokens_entry = new_tokens < 0
                              ? cuda::AdaptedEmbedding::kNoNewTokens
                              : AdapterEntries(program.lora).entry(static_cast<std::size_t>(new_tokens), 0),
      .max_rank = program.lora.max_rank,
      .dora = program.lora.dora_enabled,
      .ranks = reinterpret_cast<const std::int32_t*>(tables.ranks.address),
      .pointers = reinterpret_cast<const std::int64_t*>(tables.pointers.address),
      .shifts = reinterpret_cast<const std::int64_t*>(tables.shifts.address)};
  return make_launch(kernel, [](cuda::AdaptedEmbedding& work, const CudaRun& run) {
    set_tokens(work.embedding, run);
    work.adapter_slots = run.token_adapter_slots;
    if (!run.shape.has_adapters) work.embedding.tokens = 0;
  });
}

std::unique_ptr<const CudaOp> make_rope_table(const RopeTableOp& op, const CudaMemory& memory,
                                              DeviceWeights& weights) {
  const cuda::RopeTable kernel{.half = op.inverse_frequencies.size,
                               .kind = op.kind,
                               .attention_scaling = op.attention_scaling,
                               .base = op.base,
                               .factor = op.factor,
                               .original_max_position = op.original_max_position,
                               .inverse_frequencies = weights.vector(op.inverse_frequencies),
                               .long_inverse_frequencies = weights.vector(op.long_inverse_frequencies),
                               .cosine = floats(memory.buffer(op.cosine)),
                               .sine = floats(memory.buffer(op.sine))};
  return make_launch(kernel, [](cuda::RopeTable& work, const CudaRun& run) {
    work.tokens = run.shape.tokens;
    work.positions = run.positions;
    work.sequences = run.shape.sequences;
    work.sequence_offsets = run.sequence_offsets;
    work.prompt_lengths = run.prompt_lengths;
  });
}

std::unique_ptr<const CudaOp> make_rms_norm(const RmsNormOp& op, const Program& program, bool is_head,
                                            bool adds, const CudaMemory& memory, DeviceWeights& weights) {
  const cuda::RmsNorm kernel{.dtype = program.dtype,
                             .width = width_of(program, op.input),
                             .stream = floats(memory.buffer(op.input)),
                             .addend = adds ? memory.addend() : nullptr,
                             .weight = weights.vector(op.weight),
                             .epsilon = op.epsilon,
                             .output = memory.buffer(op.output),
                             .float32_output = dtype_of(program, op.output) == DType::kFloat32};
  return make_launch(kernel,
                     [is_head, gathers = op.gather_logit_rows](cuda::RmsNorm& work, const CudaRun& run) {
                       work.rows = is_head ? run.shape.logit_rows : run.shape.tokens;
                       work.row_ids = gathers ? run.logit_rows : nullptr;
                     });
}

std::unique_ptr<const CudaOp> make_added_norm(const RmsNormOp& op, const Program& program,
                                              const CudaMemory& memory, DeviceWeights& weights) {
  // Each group of a row has its own mean, so it is a row of the kernel.
  const std::int64_t groups = width_of(program, op.input) / op.weight.size;
  const cuda::AddedNorm kernel{.dtype = program.dtype,
                               .width = op.weight.size,
                               .input = memory.buffer(op.input),
                               .float32_input = dtype_of(program, op.input) == DType::kFloat32,
                               .weight = weights.vector(op.weight),
                               .epsilon = op.epsilon,
                               .sum_scale = weights.vector(op.sum_scale),
                               .stream = floats(memory.buffer(op.output))};
  return make_launch(
      kernel, [groups](cuda::AddedNorm& work, const CudaRun& run) { work.rows = run.shape.tokens * groups; });
}

std::unique_ptr<const CudaOp> make_layer_norm(const LayerNormOp& op, const Program& program, bool is_head,
                                              bool adds, const CudaMemory& memory, DeviceWeights& weights) {
  cuda::LayerNorm kernel{.dtype = program.dtype,
                         .width = width_of(program, op.input),
                         .stream = floats(memory.buffer(op.input)),
                         .addend = adds ? memory.addend() : nullptr,
                         .weight = weights.vector(op.weight),
                         .bias = weights.vector(op.bias),
                         .epsilon = op.epsilon,
                         .output = memory.buffer(op.output),
                         .float32_output = dtype_of(program, op.output) == DType::kFloat32};
  const bool is_adapted = op.lora_site >= 0;
  if (is_adapted) {
    const AdapterEntries entries(program.lora);
    kernel.shifts = reinterpret_cast<const std::int64_t*>(memory.adapters()->shifts.address);
    kernel.slot_entries = entries.count();
    kernel.entry = entries.entry(static_cast<std::size_t>(op.lora_site), 0);
  }
  return make_launch(kernel, [is_head, is_adapted, gathers = op.gather_logit_rows](cuda::LayerNorm& work,
                                                                                   const CudaRun& run) {
    work.rows = is_head ? run.shape.logit_rows : run.shape.tokens;
    work.row_ids = gathers ? run.logit_rows : nullptr;
    if (!is_adapted || !run.shape.has_adapters) return;
    work.adapter_slots = is_head ? run.row_adapter_slots : run.token_adapter_slots;
  });
}

std::unique_ptr<const CudaOp> make_cast(const CastOp& op, const Program& program, bool is_head,
                                        const CudaMemory& memory) {
  const cuda::Cast kernel{
      .dtype = program.dtype, .input = floats(memory.buffer(op.input)), .output = memory.buffer(op.output)};
  return make_launch(kernel,
                     [is_head, width = width_of(program, op.input)](cuda::Cast& work, const CudaRun& run) {
                       work.elements = (is_head ? run.shape.logit_rows : run.shape.tokens) * width;
                     });
}

std::unique_ptr<const CudaOp> make_xielu(const XieluOp& op, const Program& program,
                                         const CudaMemory& memory) {
  const cuda::Xielu kernel{.dtype = program.dtype,
                           .coefficients = coefficients_of(op),
                           .input = memory.buffer(op.input),
                           .output = memory.buffer(op.output)};
  return make_launch(kernel, [width = width_of(program, op.input)](cuda::Xielu& work, const CudaRun& run) {
    work.elements = run.shape.tokens * width;
  });
}

std::unique_ptr<const CudaOp> make_addition(BufferId stream, const Program& program,
                                            const CudaMemory& memory) {
  const cuda::Addition kernel{
      .dtype = program.dtype, .stream = floats(memory.buffer(stream)), .addend = memory.addend()};
  return make_launch(kernel, [width = width_of(program, stream)](cuda::Addition& work, const CudaRun& run) {
    work.elements = run.shape.tokens * width;
  });
}

std::unique_ptr<const CudaOp> make_gated_add(const GatedAddOp& op, const Program& program,
                                             const CudaMemory& memory) {
  const cuda::GatedAdd kernel{.dtype = program.dtype,
                              .width = width_of(program, op.output),
                              .input = memory.buffer(op.input),
                              .gate = floats(memory.buffer(op.gate)),
                              .stream = floats(memory.buffer(op.output))};
  return make_launch(kernel,
                     [](cuda::GatedAdd& work, const CudaRun& run) { work.tokens = run.shape.tokens; });
}

std::unique_ptr<const CudaOp> make_gated_columns(const GatedColumnsOp& op, const Program& program,
                                                 const CudaMemory& memory) {
  const cuda::GatedColumns kernel{.dtype = program.dtype,
                                  .width = width_of(program, op.gate),
                                  .stride = width_of(program, op.values),
                                  .first_column = op.first_column,
                                  .activation = op.activation,
                                  .gate = memory.buffer(op.gate),
                                  .values = floats(memory.buffer(op.values)),
                                  .output = memory.buffer(op.output)};
  return make_launch(kernel,
                     [](cuda::GatedColumns& work, const CudaRun& run) { work.tokens = run.shape.tokens; });
}

std::unique_ptr<const CudaOp> make_best_tokens(const Program& program, const CudaMemory& memory,
                                               std::int32_t* best_tokens) {
  const cuda::BestTokens kernel{.width = program.vocab_size,
                                .stride = program.logits_width(),
                                .logits = floats(memory.buffer(program.logits)),
                                .tokens = best_tokens};
  return make_launch(kernel,
                     [](cuda::BestTokens& work, const CudaRun& run) { work.rows = run.shape.logit_rows; });
}

}  // namespace adaptrt
