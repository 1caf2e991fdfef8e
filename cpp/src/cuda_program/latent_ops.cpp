#include "latent_ops.h"

#include <cstdint>
#include <optional>
#include <vector>

#include "adaptrt/cuda/expert_kernels.h"
#include "adaptrt/cuda/latent_kernels.h"
#include "buffers.h"
#include "kernel_configs.h"
#include "single_launch.h"
#include "slot_adapters.h"

namespace adaptrt {
namespace {

std::int64_t tiles_of_head(const CudaRun& run, std::int32_t heads) {
  const std::int64_t tokens = run.shape.tokens;
  return cuda::most_head_tiles(tokens, adapter_ranges(run), tile_slots(tokens * heads));
}

/// Inputs of heads: columns of the rows of tokens.
struct HeadInputs {
  const std::byte* data;
  std::int64_t stride;      ///< from head to head
  std::int64_t row_stride;  ///< from token to token
};

/// y = x W^T for the slots of each head, with its own W and its own adapters. x are the heads' inputs, which
/// it copies so that those of a head follow each other.
class HeadProducts {
 public:
  HeadProducts(const HeadInputs& inputs, const std::vector<LinearPart>& heads, std::int32_t first_site,
               const Program& program, const CudaMemory& memory, DeviceWeights& weights)
      : tiles_(memory.latent().tiles) {
    const PanelMatrix& first = heads.front().weight;
    const LatentMemory& shared = memory.latent();
    copy_ = {.heads = static_cast<std::int32_t>(heads.size()),
             .width = first.k,
             .x_of_token = inputs.row_stride,
             .x_of_head = inputs.stride,
             .x = inputs.data,
             .y_of_token = first.k,
             .y = shared.inputs};
    product_ = {.dtype = program.dtype,
                .experts = static_cast<std::int32_t>(heads.size()),
                .in_size = static_cast<std::int32_t>(first.k),
                .out_size = static_cast<std::int32_t>(first.n),
                .offsets = shared.offsets,
                .x = shared.inputs,
                .weights = weights.matrices(heads),
                .y = shared.outputs};
    if (const auto config = slot_lora_config(first_site, program)) {
      adapters_.emplace(*config, memory, shared.inputs, first.k, shared.outputs);
    }
  }

  void enqueue(const CudaRun& run) const {
    cuda::CopyHeads copy = copy_;
    copy.tokens = run.shape.tokens;
    copy.y_of_head = run.shape.tokens * copy.y_of_token;
    cuda::enqueue(copy, run.stream);
    cuda::ExpertProduct product = product_;
    product.slots = run.shape.tokens * std::int64_t{product.experts};
    cuda::enqueue(product, run.stream);
    if (!adapters_ || !run.shape.has_adapters) return;
    adapters_->enqueue(run, product.slots, product.experts * tiles_of_head(run, product.experts), tiles_);
  }

 private:
  cuda::CopyHeads copy_;
  cuda::ExpertProduct product_;
  const cuda::SlotTile* tiles_;
  std::optional<SlotAdapters> adapters_;
};

class LatentQueriesLaunches final : public CudaOp {
 public:
  LatentQueriesLaunches(const LatentQueriesOp& op, const Program& program, const CudaMemory& memory,
                        DeviceWeights& weights)
      : products_(inputs(op, memory), op.keys, op.lora_site, program, memory, weights) {
    const LatentShape& shape = op.shape;
    join_ = {.dtype = program.dtype,
             .heads = static_cast<std::int32_t>(shape.num_heads),
             .latent_dim = shape.latent_dim,
             .rotary_dim = shape.rotary_dim,
             .plain_dim = shape.plain_dim,
             .queries = memory.buffer(op.queries),
             .products = memory.latent().outputs,
             .rows = memory.buffer(op.rows),
             .norm = weights.vector(op.norm),
             .epsilon = op.epsilon,
             .qk = memory.buffer(op.output)};
  }

  void enqueue(const CudaRun& run) const override {
    products_.enqueue(run);
    cuda::JoinQueries join = join_;
    join.tokens = run.shape.tokens;
    cuda::enqueue(join, run.stream);
  }

 private:
  /// The part of each query that is not rotated.
  static HeadInputs inputs(const LatentQueriesOp& op, const CudaMemory& memory) {
    const std::int64_t query = op.shape.plain_dim + op.shape.rotary_dim;
    return {memory.buffer(op.queries), query, op.shape.num_heads * query};
  }

  HeadProducts products_;
  cuda::JoinQueries join_;
};

class LatentValuesLaunches final : public CudaOp {
 public:
  LatentValuesLaunches(const LatentValuesOp& op, const Program& program, const CudaMemory& memory,
                       DeviceWeights& weights)
      : products_(inputs(op, program, memory), op.values, op.lora_site, program, memory, weights) {
    const LatentShape& shape = op.shape;
    join_ = {.heads = static_cast<std::int32_t>(shape.num_heads),
             .width = shape.value_dim,
             .x_of_token = shape.value_dim,
             .x = memory.latent().outputs,
             .y_of_token = shape.num_heads * shape.value_dim,
             .y_of_head = shape.value_dim,
             .y = memory.buffer(op.output)};
  }

  void enqueue(const CudaRun& run) const override {
    products_.enqueue(run);
    cuda::CopyHeads join = join_;
    join.tokens = run.shape.tokens;
    join.x_of_head = run.shape.tokens * join.x_of_token;
    cuda::enqueue(join, run.stream);
  }

 private:
  /// A head's first columns are the rotated ones, which are no values.
  static HeadInputs inputs(const LatentValuesOp& op, const Program& program, const CudaMemory& memory) {
    const std::int64_t first = op.shape.rotary_dim * static_cast<std::int64_t>(size_of(program.dtype));
    return {memory.buffer(op.input) + first, op.shape.key_dim(), op.shape.num_heads * op.shape.key_dim()};
  }

  HeadProducts products_;
  cuda::CopyHeads join_;
};

}  // namespace

std::unique_ptr<const CudaOp> make_head_numbers(const LatentShape& shape, const CudaMemory& memory) {
  const cuda::NumberHeads kernel{.heads = static_cast<std::int32_t>(shape.num_heads),
                                 .offsets = memory.latent().offsets};
  return make_launch(kernel, [tiles = memory.latent().tiles](cuda::NumberHeads& work, const CudaRun& run) {
    work.tokens = run.shape.tokens;
    if (!run.shape.has_adapters || run.token_adapter_slots == nullptr) return;
    work.tile_tokens = tile_slots(work.tokens * work.heads);
    work.tiles_of_head = tiles_of_head(run, work.heads);
    work.token_slots = run.token_adapter_slots;
    work.tiles = tiles;
  });
}

std::unique_ptr<const CudaOp> make_latent_queries(const LatentQueriesOp& op, const Program& program,
                                                  const CudaMemory& memory, DeviceWeights& weights) {
  return std::make_unique<LatentQueriesLaunches>(op, program, memory, weights);
}

std::unique_ptr<const CudaOp> make_latent_values(const LatentValuesOp& op, const Program& program,
                                                 const CudaMemory& memory, DeviceWeights& weights) {
  return std::make_unique<LatentValuesLaunches>(op, program, memory, weights);
}

std::unique_ptr<const CudaOp> make_latent_attention(const AttentionOp& op, const Program& program,
                                                    const CudaMemory& memory, const KvPoolAddresses& pools) {
  const cuda::LatentAttention kernel{
      .dtype = program.dtype,
      .tokens_per_block = program.tokens_per_block,
      .num_heads = static_cast<std::int32_t>(op.shape.num_attention_heads),
      .key_dim = static_cast<std::int32_t>(op.shape.head_dim),
      .rotary_dim = static_cast<std::int32_t>(2 * width_of(program, op.cosine)),
      .interleaved = op.interleaved,
      .sliding_window = op.sliding_window,
      .scale = op.scale,
      .qk = memory.buffer(op.qkv),
      .cosine = floats(memory.buffer(op.cosine)),
      .sine = floats(memory.buffer(op.sine)),
      .attended = memory.buffer(op.output)};
  std::byte* const& pool = pools[static_cast<std::size_t>(op.layer)];
  return make_launch(kernel, [&pool](cuda::LatentAttention& work, const CudaRun& run) {
    work.tokens = run.shape.tokens;
    work.sequences = run.shape.sequences;
    work.max_blocks = run.shape.blocks_per_sequence;
    work.kv_pool = pool;
    work.block_tables = run.block_tables;
    work.sequence_offsets = run.sequence_offsets;
    work.positions = run.positions;
  });
}

}  // namespace adaptrt
