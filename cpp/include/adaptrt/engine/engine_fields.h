#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "adaptrt/core/fields.h"
#include "adaptrt/engine/engine.h"
#include "adaptrt/lora/layout_fields.h"

namespace adaptrt {

/// Fields that are sent to another process.
constexpr auto sent_fields_of(const EngineInfo* /*type*/) {
  using C = EngineInfo;
  return FieldList{
      Field{"dtype", &C::dtype, "Type of the weights."},
      Field{"vocab_size", &C::vocab_size, "Number of tokens in the base model's vocabulary."},
      Field{"num_layers", &C::num_layers, "Layers of the decoder, or of an encoder-only model."},
      Field{"max_batch_size", &C::max_batch_size, "Largest number of sequences in a step."},
      Field{"max_num_tokens", &C::max_num_tokens, "Largest number of tokens in a step."},
      Field{"max_input_len", &C::max_input_len, "Largest number of tokens in a prompt."},
      Field{"max_seq_len", &C::max_seq_len, "Largest number of tokens in a sequence, new ones included."},
      Field{"max_beam_width", &C::max_beam_width, "Largest beam width of a request."},
      Field{"tokens_per_block", &C::tokens_per_block, "Tokens in a KV block."},
      Field{"kv_block_bytes", &C::kv_block_bytes, "Bytes of a KV block over all layers."},
      Field{"max_reusable_prompt_len", &C::max_reusable_prompt_len,
            "Longest prompt whose KV blocks other requests may reuse."},
      Field{"num_stages", &C::num_stages, "Stages of the pipeline."},
      Field{"has_adapter_start_positions", &C::has_adapter_start_positions,
            "True if requests may say at which position their adapter begins to act."},
      Field{"max_encoder_input_len", &C::max_encoder_input_len,
            "Largest number of tokens in an encoder input; 0: the engine has no encoder."},
      Field{"encoder_hidden_size", &C::encoder_hidden_size, "Width of encoder outputs."},
      Field{"cross_kv_block_bytes", &C::cross_kv_block_bytes,
            "Bytes of a block of encoder inputs' keys and values over all layers."},
      Field{"hidden_size", &C::hidden_size, "Width of hidden states; 0: the engine does not return them."},
      Field{"has_logits", &C::has_logits, "False: the model has no lm_head, and generates nothing."},
      Field{"has_kv_cache", &C::has_kv_cache,
            "False for encoder-only models, which compute every sequence whole and have no KV blocks."},
      Field{"state_bytes", &C::state_bytes,
            "Bytes of the states that a sequence keeps, over all layers; 0: the network keeps none."},
      Field{"num_token_types", &C::num_token_types,
            "Number of token types; Request.token_type_ids are below it."},
      Field{"kernels", &C::kernels, "Name of the CPU kernels; empty: the engine runs on a device."},
      Field{"attention_windows", &C::attention_windows,
            "Sliding window of each layer, 0 if it has none; [] if not known."},
      Field{"lora", &C::lora, "Adapters that the engine accepts."}};
}

/// All fields. Those that are not sent have an effect only in the engine's own process: an engine of another
/// process has no second level of the KV cache, takes no embeddings, and finds no best tokens or highest
/// logits.
constexpr auto fields_of(const EngineInfo* type) {
  using C = EngineInfo;
  return sent_fields_of(type).followed_by(
      FieldList{Field{"kv_identity", &C::kv_identity,
                      "Digest of everything that KV blocks depend on; empty: not known, or KV blocks cannot "
                      "be read."},
                Field{"prompt_embedding_size", &C::prompt_embedding_size,
                      "Width of PromptTuningConfig.embedding_table; 0: the engine takes none."},
                Field{"num_coordinates", &C::num_coordinates,
                      "Number of coordinates at the end of each row of PromptTuningConfig.embedding_table: "
                      "whole numbers from -1 on. The last one is the rotary position of a text token after "
                      "the row, the others are the row's own; -1: as without coordinates."},
                Field{"joint_column", &C::joint_column,
                      "Column of PromptTuningConfig.embedding_table with numbers: neighbours with equal "
                      "numbers from 0 on attend to each other in both directions. -1: there is none."},
                Field{"finds_best_tokens", &C::finds_best_tokens,
                      "True if the engine finds the most likely tokens on its device, so that their rows of "
                      "logits need not be copied to the host."},
                Field{"finds_highest_logits", &C::finds_highest_logits,
                      "True if the engine finds the highest logits of rows on its device, for top_k and log "
                      "probs."}});
}
static_assert(lists_every_member<EngineInfo>());

/// Number of elements of an array of a step.
enum class StepAxis : std::uint8_t {
  kTokens,       ///< one per token
  kSequences,    ///< one per sequence
  kOffsets,      ///< one per sequence, and one more
  kBlocks,       ///< max_blocks_per_sequence per sequence
  kCrossBlocks,  ///< max_cross_blocks per sequence
  kRows,         ///< ascending indices of some tokens
  kCopies,       ///< one per copied KV block or state
};

/// An int32 array of StepInput. It may be empty if StepInput says so.
struct StepInputArray {
  std::span<const std::int32_t> StepInput::* member;
  StepAxis axis;
};

/// All int32 arrays except prompt_embedding_rows, best_token_rows, best_tokens and those of highest, which
/// only an engine of one process takes.
inline constexpr std::array kStepInputArrays = {
    StepInputArray{&StepInput::token_ids, StepAxis::kTokens},
    StepInputArray{&StepInput::positions, StepAxis::kTokens},
    StepInputArray{&StepInput::token_types, StepAxis::kTokens},
    StepInputArray{&StepInput::rotary_positions, StepAxis::kTokens},
    StepInputArray{&StepInput::sequence_offsets, StepAxis::kOffsets},
    StepInputArray{&StepInput::prompt_lengths, StepAxis::kSequences},
    StepInputArray{&StepInput::block_tables, StepAxis::kBlocks},
    StepInputArray{&StepInput::adapter_start_positions, StepAxis::kSequences},
    StepInputArray{&StepInput::logit_rows, StepAxis::kRows},
    StepInputArray{&StepInput::copies_from, StepAxis::kCopies},
    StepInputArray{&StepInput::copies_to, StepAxis::kCopies},
    StepInputArray{&StepInput::hidden_rows, StepAxis::kRows},
    StepInputArray{&StepInput::state_slots, StepAxis::kSequences},
    StepInputArray{&StepInput::state_copies_from, StepAxis::kCopies},
    StepInputArray{&StepInput::state_copies_to, StepAxis::kCopies},
    StepInputArray{&StepInput::encoder_lengths, StepAxis::kSequences},
    StepInputArray{&StepInput::cross_block_tables, StepAxis::kCrossBlocks}};
/// Number of the other members of StepInput: two widths of tables, adapters, encoder inputs,
/// prompt_embedding_rows, prompt_embeddings, best_token_rows, best_tokens and highest.
inline constexpr std::size_t kOtherStepMembers = 9;
static_assert(has_num_members<StepInput, kStepInputArrays.size() + kOtherStepMembers>());

/// The int32 arrays of encoder inputs.
inline constexpr std::array kEncoderArrays = {&EncoderInputs::token_ids, &EncoderInputs::offsets,
                                              &EncoderInputs::block_tables};
/// Number of the other members of EncoderInputs: adapters and outputs.
inline constexpr std::size_t kOtherEncoderMembers = 2;
static_assert(has_num_members<EncoderInputs, kEncoderArrays.size() + kOtherEncoderMembers>());

}  // namespace adaptrt
