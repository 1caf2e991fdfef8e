#include <memory>

#include "lowered_op.h"
#include "ops/kv_writer.h"

namespace adaptrt {
namespace {

class LoweredCrossKeys final : public LoweredOp {
 public:
  LoweredCrossKeys(const CrossKeysOp& op, const OpPlace& place)
      : op_(op),
        context_(place.context),
        kv_(place.context.rows_of(op.kv)),
        layer_(place.context.cross_pool.layer(op.layer)) {}

  void run(Step& step) override {
    constexpr std::int64_t kTokensPerChunk = 8;
    const KvPool& pool = context_.cross_pool;
    const StepInput& input = step.input;
    const auto store = [&](std::int64_t begin, std::int64_t end, int thread) {
      const KvWriter writer(pool, layer_, context_.kernels, context_.scratch(thread));
      for (std::int64_t token = begin; token < end; ++token) {
        const auto sequence =
            static_cast<std::size_t>(step.sequence_of_token[static_cast<std::size_t>(token)]);
        const std::int64_t place = token - input.sequence_offsets[sequence];
        const std::size_t table = sequence * static_cast<std::size_t>(input.max_blocks_per_sequence);
        const auto block = static_cast<std::size_t>(place / pool.tokens_per_block());
        const KvSlot where{.block = input.block_tables[table + block],
                           .slot = place % pool.tokens_per_block()};
        const float* keys = kv_.float_row(token);
        writer.store_keys(
            where, {.x = keys, .heads = op_.shape.num_key_value_heads, .head_dim = op_.shape.head_dim});
        writer.store_values(where, keys + op_.shape.key_value_size());
      }
    };
    context_.threads.parallel_for(step.rows, kTokensPerChunk, store);
  }

 private:
  const CrossKeysOp& op_;
  const CpuContext& context_;
  Rows kv_;
  const KvLayer& layer_;
};

}  // namespace

LoweredOpPtr lower(const CrossKeysOp& op, const OpPlace& place) {
  return std::make_unique<LoweredCrossKeys>(op, place);
}

}  // namespace adaptrt
