#include "engine_info.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <variant>
#include <vector>

namespace adaptrt {

EngineInfo info_of(const Program& program, const KernelTable& kernels, const KvPool& kv_pool,
                   const KvPool& cross_pool, const StateMemory& state_memory) {
  const std::int64_t hidden_size =
      program.hidden == kNoBuffer ? 0 : program.buffers[static_cast<std::size_t>(program.hidden)].width;
  EngineInfo info{.dtype = program.dtype,
                  .vocab_size = program.vocab_size,
                  .num_layers = program.num_layers,
                  .max_batch_size = program.max_batch_size,
                  .max_num_tokens = program.max_num_tokens,
                  .max_input_len = program.max_input_len,
                  .max_seq_len = program.max_seq_len,
                  .max_beam_width = program.max_beam_width,
                  .tokens_per_block = program.tokens_per_block,
                  .kv_block_bytes = kv_pool.block_bytes(),
                  .max_reusable_prompt_len = program.max_seq_len,
                  .lora = program.lora,
                  .num_stages = program.num_stages,
                  .kernels = std::string(kernels.name),
                  .kv_identity = program.identity,
                  .attention_windows =
                      std::vector<std::int32_t>(static_cast<std::size_t>(std::max(1, program.num_layers))),
                  .has_adapter_start_positions = !program.has_encoder(),
                  .hidden_size = hidden_size,
                  .has_logits = program.logits != kNoBuffer || !program.is_last_stage(),
                  .has_kv_cache = kv_pool.block_bytes() > 0 || state_memory.slot_bytes() > 0,
                  .state_bytes = state_memory.slot_bytes()};
  if (!info.has_kv_cache) {
    info.max_reusable_prompt_len = 0;
    info.kv_identity.clear();
    info.has_adapter_start_positions = false;  // rows before that position attend to rows after it
  }
  if (program.has_encoder()) {
    info.max_encoder_input_len = program.max_encoder_input_len;
    info.encoder_hidden_size = program.buffers[static_cast<std::size_t>(program.encoder_output)].width;
    info.cross_kv_block_bytes = cross_pool.block_bytes();
    // A token's keys and values depend on the encoder input, which is not part of a prefix.
    info.max_reusable_prompt_len = 0;
  }
  std::int32_t num_embeddings = 0;
  for (const auto& op : program.body) {
    if (const auto* attention = std::get_if<AttentionOp>(&op)) info.joint_column = attention->joint_column;
    const auto* embedding = std::get_if<EmbeddingOp>(&op);
    if (embedding != nullptr && program.num_ranks == 1 && !program.has_encoder()) {
      // Only the first of several embeddings could take rows in place of tokens.
      const bool is_first = num_embeddings++ == 0;
      info.prompt_embedding_size = is_first ? embedding->given_size() : 0;
      info.num_coordinates = is_first ? embedding->num_coordinates : 0;
    }
    if (embedding != nullptr && !info.has_kv_cache) {
      info.num_token_types = std::max<std::int64_t>(1, embedding->types.n);
    }
    if (const auto* attention = std::get_if<AttentionOp>(&op)) {
      // No token of a chunk attends to more keys than the chunk has.
      const std::int32_t window = std::max(attention->sliding_window, attention->chunk);
      info.attention_windows[static_cast<std::size_t>(attention->layer)] = window;
    }
    const auto* rope = std::get_if<RopeTableOp>(&op);
    if (rope != nullptr && rope->kind != RopeKind::kStatic) {
      // Longer prompts rotate all their positions by angles that depend on their length.
      info.max_reusable_prompt_len = std::min(info.max_reusable_prompt_len, rope->original_max_position);
    }
  }
  return info;
}

}  // namespace adaptrt
