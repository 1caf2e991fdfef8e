#include "ops/kv_writer.h"
#include "step.h"

namespace adaptrt {

void run_op(const CrossKeysOp& op, const Step& step) {
  constexpr std::int64_t kTokensPerChunk = 8;
  const KvPool& pool = step.cross_pool;
  const StepInput& input = step.input;
  const auto store = [&](std::int64_t begin, std::int64_t end, int thread) {
    const KvWriter writer(pool, pool.layer(op.layer), step.kernels,
                          step.scratch[static_cast<std::size_t>(thread)].data());
    for (std::int64_t token = begin; token < end; ++token) {
      const auto sequence = static_cast<std::size_t>(step.sequence_of_token[static_cast<std::size_t>(token)]);
      const std::int64_t place = token - input.sequence_offsets[sequence];
      const std::size_t table = sequence * static_cast<std::size_t>(input.max_blocks_per_sequence);
      const auto block = static_cast<std::size_t>(place / pool.tokens_per_block());
      const KvSlot where{.block = input.block_tables[table + block], .slot = place % pool.tokens_per_block()};
      const float* keys = step.float_row(op.kv, token);
      writer.store_keys(where,
                        {.x = keys, .heads = op.shape.num_key_value_heads, .head_dim = op.shape.head_dim});
      writer.store_values(where, keys + op.shape.key_value_size());
    }
  };
  step.threads.parallel_for(step.rows, kTokensPerChunk, store);
}

}  // namespace adaptrt
