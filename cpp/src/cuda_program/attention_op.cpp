#include "attention_op.h"

#include <cstdint>

#include "adaptrt/cuda/paged_attention_kernel.h"
#include "adaptrt/cuda/row_kernels.h"
#include "buffers.h"
#include "kernel_configs.h"

namespace adaptrt {
namespace {

std::int64_t rotary_half(const AttentionOp& op, const Program& program) {
  return width_of(program, op.cosine);
}

/// Returns the norms of the heads; without any, nothing is launched. Norms after the rotation also rotate.
cuda::HeadNorms head_norms(const AttentionOp& op, const Program& program, const CudaMemory& memory,
                           DeviceWeights& weights) {
  const auto groups = [&](const VectorView& weight, std::int64_t first, std::int64_t columns) {
    if (weight.size == 0) return cuda::NormGroups{};
    return cuda::NormGroups{.first = first,
                            .count = columns / weight.size,
                            .size = weight.size,
                            .weight = weights.vector(weight)};
  };
  const bool rotates = op.norms_after_rotation;
  return {.dtype = program.dtype,
          .stride = width_of(program, op.qkv),
          .queries = groups(op.query_norm, 0, op.shape.query_size()),
          .keys = groups(op.key_norm, op.shape.query_size(), op.shape.key_value_size()),
          .values = groups(op.value_norm, op.shape.query_size() + op.shape.key_value_size(),
                           op.values_from_keys ? 0 : op.shape.key_value_size()),
          .epsilon = op.norm_epsilon,
          .qkv = memory.buffer(op.qkv),
          .values_from_keys = op.values_from_keys ? memory.product() : nullptr,
          .rotary_half = rotates ? rotary_half(op, program) : 0,
          .interleaved = op.interleaved,
          .cosine = rotates ? floats(memory.buffer(op.cosine)) : nullptr,
          .sine = rotates ? floats(memory.buffer(op.sine)) : nullptr};
}

cuda::PagedAttentionConfig with_prefill(cuda::PagedAttentionConfig config, bool hopper_prefill) {
  config.hopper_prefill = hopper_prefill;
  return config;
}

class AttentionLaunches final : public CudaOp {
 public:
  AttentionLaunches(const AttentionOp& op, const Program& program, const CudaMemory& memory,
                    const KvPoolAddresses& pools, DeviceWeights& weights, bool hopper_prefill)
      : norms_(head_norms(op, program, memory, weights)),
        kernel_(with_prefill(attention_config(op, program), hopper_prefill)),
        pool_(pools[static_cast<std::size_t>(op.kv_layer())]) {
    const Buffer& qkv = program.buffers[static_cast<std::size_t>(op.qkv)];
    const std::byte* q = memory.buffer(op.qkv);
    const auto element = size_of(program.dtype);
    const std::byte* k = q + static_cast<std::size_t>(op.shape.query_size()) * element;
    const std::byte* v = k + static_cast<std::size_t>(op.shape.key_value_size()) * element;
    sizes_.tokens_per_block = program.tokens_per_block;
    sizes_.rotary_half = op.norms_after_rotation ? 0 : static_cast<std::int32_t>(rotary_half(op, program));
    sizes_.q_stride = static_cast<std::int32_t>(qkv.width);
    sizes_.kv_stride = static_cast<std::int32_t>(qkv.width);
    arrays_.q = q;
    if (op.shared_layer < 0) {
      arrays_.k = k;
      arrays_.v = op.values_from_keys ? memory.product() : v;
    }
    arrays_.cosine = floats(memory.buffer(op.cosine));
    arrays_.sine = floats(memory.buffer(op.sine));
    arrays_.sinks = weights.vector(op.sinks);
    arrays_.counters = memory.attention_counters();
    arrays_.attended = memory.buffer(op.output);
    workspace_ = memory.workspace();
  }

  void enqueue(const CudaRun& run) const override {
    cuda::HeadNorms norms = norms_;
    norms.tokens = run.shape.tokens;
    cuda::enqueue(norms, run.stream);
    cuda::PagedAttentionSizes sizes = sizes_;
    sizes.tokens = run.shape.tokens;
    sizes.sequences = run.shape.sequences;
    sizes.max_blocks = run.shape.blocks_per_sequence;
    cuda::PagedAttentionArrays arrays = arrays_;
    arrays.kv_pool = pool_;
    arrays.block_tables = run.block_tables;
    arrays.sequence_offsets = run.sequence_offsets;
    arrays.positions = run.positions;
    kernel_.enqueue(sizes, arrays, workspace_, run.stream);
  }

 private:
  cuda::HeadNorms norms_;
  cuda::PagedAttentionKernel kernel_;
  /// Set after the op was made, with the number of blocks.
  std::byte* const& pool_;
  cuda::PagedAttentionSizes sizes_;
  cuda::PagedAttentionArrays arrays_;
  void* workspace_ = nullptr;
};

}  // namespace

std::unique_ptr<const CudaOp> make_attention(const AttentionOp& op, const Program& program,
                                             const CudaMemory& memory, const KvPoolAddresses& pools,
                                             DeviceWeights& weights, bool hopper_prefill) {
  return std::make_unique<AttentionLaunches>(op, program, memory, pools, weights, hopper_prefill);
}

}  // namespace adaptrt
