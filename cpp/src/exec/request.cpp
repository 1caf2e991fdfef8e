#include "adaptrt/exec/request.h"

#include <cmath>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "adaptrt/sample/sampler.h"

namespace adaptrt {
namespace {

void require_none(Problems& problems, std::string_view name, bool is_set, std::string_view reason) {
  if (is_set) problems.add(std::string(name) + " is given; accepted: None, because " + std::string(reason));
}

/// The tokens that a request may contain.
struct Vocabulary {
  std::int64_t of_engine = 0;
  std::int64_t size = 0;         ///< with the tokens that its adapter adds, without those that the adapter
                                 ///< lacks
  bool has_room = false;         ///< adapters may add tokens
  std::int64_t num_virtual = 0;  ///< rows of an embedding table; their ids come after the vocabulary

  [[nodiscard]] bool has(TokenId token) const { return token >= 0 && token < size + num_virtual; }
  [[nodiscard]] std::string text() const {
    const std::int64_t more = size - of_engine;
    const std::string others =
        more < 0
            ? ", without the engine's last " + std::to_string(-more) + ", which the adapter does not have"
        : more > 0 ? ", the last " + std::to_string(more) + " of which the adapter adds"
        : has_room ? ", and the request's adapter brings no more"
                   : "";
    const std::string rows = num_virtual == 0
                                 ? ""
                                 : ", and the rows of prompt_tuning_config.embedding_table are " +
                                       std::to_string(size) + " to " + std::to_string(size + num_virtual - 1);
    return "the vocabulary is 0 to " + std::to_string(size - 1) + others + rows;
  }
};

/// Reports the first token outside the vocabulary and the number of such tokens.
void check_tokens(Problems& problems, const std::string& name, std::span<const TokenId> tokens,
                  const Vocabulary& vocabulary) {
  std::size_t first = tokens.size();
  std::size_t count = 0;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (vocabulary.has(tokens[i])) continue;
    if (count++ == 0) first = i;
  }
  if (count == 0) return;
  std::string problem = name + "[" + std::to_string(first) + "] is " + std::to_string(tokens[first]);
  if (count > 1) problem += " (and " + std::to_string(count - 1) + " more)";
  problems.add(problem + "; " + vocabulary.text());
}

void check_optional_token(Problems& problems, const char* name, std::optional<TokenId> token,
                          const Vocabulary& vocabulary) {
  if (!token || *token == -1 || vocabulary.has(*token)) return;
  problems.add(std::string(name) + " is " + std::to_string(*token) + "; " + vocabulary.text() +
               ", -1 is none");
}

/// Describes the limit on a sequence's length for an adapter with this rotary factor.
std::string longest_sequence(const EngineInfo& engine, std::int32_t rotary_factor) {
  const std::int32_t longest = engine.max_seq_len_of(rotary_factor);
  if (longest == engine.max_seq_len) return "the engine's max_seq_len is " + std::to_string(longest);
  return "the model has " + std::to_string(longest) + " positions" +
         (rotary_factor == 1 ? ", and more with an adapter that divides them"
                             : " under an adapter that divides them by " + std::to_string(rotary_factor));
}

void check_lengths(Problems& problems, const Request& request, const EngineInfo& engine,
                   std::int32_t rotary_factor) {
  const auto prompt = static_cast<std::int64_t>(request.input_token_ids.size());
  const std::int32_t longest = engine.max_seq_len_of(rotary_factor);
  if (prompt == 0) problems.add("input_token_ids is empty; accepted: one token or more");
  if (prompt > engine.max_input_len) {
    problems.add("input_token_ids has " + std::to_string(prompt) + " tokens; the engine's max_input_len is " +
                 std::to_string(engine.max_input_len));
  }
  if (request.pooling_params || !engine.has_kv_cache) {
    if (prompt > longest) {
      problems.add("input_token_ids has " + std::to_string(prompt) + " tokens; " +
                   longest_sequence(engine, rotary_factor));
    }
    return;
  }
  if (request.max_tokens < 1) {
    problems.add("max_tokens is " + std::to_string(request.max_tokens) + "; accepted: 1 or more");
  } else if (prompt + request.max_tokens > longest) {
    problems.add("a prompt of " + std::to_string(prompt) + " tokens and max_tokens " +
                 std::to_string(request.max_tokens) + " make " + std::to_string(prompt + request.max_tokens) +
                 " tokens; " + longest_sequence(engine, rotary_factor));
  }
}

void check_stop_words(Problems& problems, const Request& request, const Vocabulary& vocabulary) {
  if (!request.stop_words) return;
  for (std::size_t i = 0; i < request.stop_words->size(); ++i) {
    const auto& word = (*request.stop_words)[i];
    const std::string name = "stop_words[" + std::to_string(i) + "]";
    if (word.empty()) problems.add(name + " is empty");
    check_tokens(problems, name, word, vocabulary);
  }
}

bool has_bias_shape(const FloatTensor& bias, std::int64_t vocab_size) {
  return bias.shape == std::vector<std::int64_t>{vocab_size};
}

void check_encoder_input(Problems& problems, const Request& request, const EngineInfo& engine) {
  if (!engine.has_encoder()) {
    require_none(
        problems, "encoder_input_token_ids", request.encoder_input_token_ids.has_value(),
        engine.has_kv_cache ? "the engine is a decoder" : "an encoder-only engine reads input_token_ids");
    if (request.output_config.return_encoder_output && engine.has_kv_cache) {
      problems.add("output_config.return_encoder_output is True; accepted: False, the engine is a decoder");
    }
    return;
  }
  if (request.encoder_length() == 0) {
    problems.add(std::string("encoder_input_token_ids is ") +
                 (request.encoder_input_token_ids ? "empty" : "None") +
                 "; accepted: one token or more, the engine has an encoder");
    return;
  }
  if (request.encoder_length() > engine.max_encoder_input_len) {
    problems.add("encoder_input_token_ids has " + std::to_string(request.encoder_length()) +
                 " tokens; the engine's max_encoder_input_len is " +
                 std::to_string(engine.max_encoder_input_len));
  }
  check_tokens(problems, "encoder_input_token_ids", *request.encoder_input_token_ids,
               {engine.vocab_size, engine.vocab_size, false});
}

void check_unsupported(Problems& problems, const Request& request) {
  require_none(problems, "position_ids", request.position_ids.has_value(), "positions count from 0");
  if (request.logits_post_processor_name && request.logits_post_processor) {
    problems.add(
        "logits_post_processor and logits_post_processor_name are both given; accepted: one of them");
  }
  require_none(problems, "eagle_config", request.eagle_config.is_set(), "engines have no such heads");
  if (request.request_type != RequestType::kContextAndGeneration) {
    problems.add(
        "request_type is not REQUEST_TYPE_CONTEXT_AND_GENERATION, the only one accepted: one executor runs "
        "both "
        "phases");
  }
  require_none(problems, "multimodal_embedding", request.multimodal_embedding.is_set(),
               "engines read text; prompt_tuning_config takes embeddings");
  require_none(problems, "multimodal_input", request.multimodal_input.is_set(), "engines read text");
  require_none(problems, "mrope_config", request.mrope_config.is_set(), "positions count from 0");
  require_none(problems, "context_phase_params", request.context_phase_params.is_set(),
               "prompts are computed where their tokens are generated");
  require_none(problems, "output_config.additional_model_outputs",
               request.output_config.additional_model_outputs.is_set(),
               "the engine has no outputs but the logits");
}

/// Returns the vocabulary allowed in the prompt.
Vocabulary check_prompt_tuning(Problems& problems, const Request& request, const EngineInfo& engine,
                               Vocabulary vocabulary) {
  if (!request.prompt_tuning_config) return vocabulary;
  if (engine.prompt_embedding_size == 0) {
    require_none(
        problems, "prompt_tuning_config", true,
        "encoder-decoders, engines with embeddings of each layer, of several ranks and of TensorRT take no "
        "embeddings");
    return vocabulary;
  }
  const PromptTuningConfig& config = *request.prompt_tuning_config;
  problems.add_all("prompt_tuning_config.",
                   config.validate(engine, static_cast<std::int64_t>(request.input_token_ids.size())));
  vocabulary.num_virtual = config.embedding_table.num_rows();
  return vocabulary;
}

void check_token_types(Problems& problems, const Request& request, const EngineInfo& engine) {
  if (!request.token_type_ids) return;
  const std::vector<std::int32_t>& types = *request.token_type_ids;
  if (engine.num_token_types == 1) {
    require_none(problems, "token_type_ids", true, "the model has one kind of tokens");
    return;
  }
  if (types.size() != request.input_token_ids.size()) {
    problems.add("token_type_ids has " + std::to_string(types.size()) + " elements; accepted: " +
                 std::to_string(request.input_token_ids.size()) + ", one for each of input_token_ids");
  }
  const auto is_unknown = [&](std::int64_t type) { return type < 0 || type >= engine.num_token_types; };
  const auto unknown = std::ranges::find_if(types, is_unknown);
  if (unknown == types.end()) return;
  problems.add("token_type_ids[" + std::to_string(unknown - types.begin()) + "] is " +
               std::to_string(*unknown) + "; accepted: 0 to " + std::to_string(engine.num_token_types - 1));
}

void check_active_from(Problems& problems, const Request& request, const EngineInfo& engine) {
  if (!request.lora_config || request.lora_config->active_from == 0) return;
  const std::int32_t from = request.lora_config->active_from;
  const std::string given = "lora_config.active_from is " + std::to_string(from);
  if (!engine.has_adapter_start_positions) {
    problems.add(given + "; accepted: 0, the engine's adapters act on whole sequences");
  } else if (from < 0 || std::cmp_greater(from, request.input_token_ids.size())) {
    problems.add(given + "; accepted: 0 to " + std::to_string(request.input_token_ids.size()) +
                 ", the length of the prompt");
  }
}

/// A request for rows must not set sampling options. Any other request needs an engine with logits and a KV
/// cache.
void check_pooling(Problems& problems, const Request& request, const EngineInfo& engine) {
  const bool wants_encoder_output = !engine.has_kv_cache && request.output_config.return_encoder_output;
  if (!request.pooling_params && !wants_encoder_output) {
    if (!engine.has_kv_cache) {
      problems.add(
          "pooling_params is None; accepted: PoolingParams, or output_config.return_encoder_output, because "
          "the engine is an encoder and generates nothing");
    } else if (!engine.has_logits) {
      problems.add("pooling_params is None; accepted: PoolingParams, because the model has no lm_head");
    }
    return;
  }
  if (engine.hidden_size == 0) {
    problems.add("pooling_params is given; accepted: None, because the engine does not tell hidden states");
    return;
  }
  if (request.pooling_params) {
    problems.add_all("pooling_params.", request.pooling_params->validate(engine.hidden_size));
    if (wants_encoder_output) {
      problems.add(
          "output_config.return_encoder_output is True with pooling_params; accepted: one of them, "
          "PoolingType.ALL gives the same rows");
    }
  }
  const std::string with = request.pooling_params ? "pooling_params" : "output_config.return_encoder_output";
  const auto refuse = [&](bool is_given, const std::string& name, const char* accepted) {
    if (!is_given) return;
    problems.add(name + " is given with " + with + ", which end without a token; accepted: " + accepted);
  };
  // TensorRT-LLM requires at least one token.
  const std::int32_t most_tokens = request.pooling_params ? 0 : 1;
  refuse(request.max_tokens < 0 || request.max_tokens > most_tokens,
         "max_tokens " + std::to_string(request.max_tokens), most_tokens == 0 ? "0" : "0 and 1");
  refuse(request.streaming, "streaming", "False");
  refuse(request.sampling_config != SamplingConfig{}, "sampling_config", "SamplingConfig()");
  refuse(request.end_id.has_value(), "end_id", "None");
  refuse(request.bad_words.has_value(), "bad_words", "None");
  refuse(request.stop_words.has_value(), "stop_words", "None");
  refuse(request.embedding_bias.has_value(), "embedding_bias", "None");
  refuse(request.external_draft_tokens_config.has_value(), "external_draft_tokens_config", "None");
  refuse(request.lookahead_config.has_value(), "lookahead_config", "None");
  refuse(request.logits_post_processor_name.has_value(), "logits_post_processor_name", "None");
  refuse(request.logits_post_processor.has_value(), "logits_post_processor", "None");
  refuse(request.return_all_generated_tokens, "return_all_generated_tokens", "False");
  refuse(request.num_return_sequences != 1, "num_return_sequences", "1");
  refuse(request.guided_decoding_params.has_value(), "guided_decoding_params", "None");
  refuse(request.draft_lora_config.has_value(), "draft_lora_config", "None");
  const OutputConfig& output = request.output_config;
  refuse(output.return_log_probs, "output_config.return_log_probs", "False");
  refuse(output.return_context_logits, "output_config.return_context_logits", "False");
  refuse(output.return_generation_logits, "output_config.return_generation_logits", "False");
  refuse(output.top_log_probs != 0, "output_config.top_log_probs", "0");
  refuse(output.return_prompt_log_probs, "output_config.return_prompt_log_probs", "False");
}

void check_num_sequences(Problems& problems, const Request& request) {
  if (request.num_return_sequences < 1) {
    problems.add("num_return_sequences is " + std::to_string(request.num_return_sequences) +
                 "; accepted: 1 or more");
  }
  const auto& of_sampling = request.sampling_config.num_return_sequences;
  if (of_sampling && request.num_return_sequences != 1 && *of_sampling != request.num_return_sequences) {
    problems.add("num_return_sequences is " + std::to_string(request.num_return_sequences) +
                 ", and that of sampling_config is " + std::to_string(*of_sampling) +
                 "; accepted: one number, in either or both");
  }
}

void check_beams(Problems& problems, const Request& request, const EngineInfo& engine) {
  if (!request.has_beams()) return;
  const std::string width = std::to_string(request.sampling_config.beam_width);
  if (request.sampling_config.beam_width > engine.max_beam_width) {
    problems.add("sampling_config.beam_width is " + width + "; the engine was built for max_beam_width " +
                 std::to_string(engine.max_beam_width));
  }
  if (request.num_return_sequences > request.sampling_config.beam_width) {
    problems.add("num_return_sequences is " + std::to_string(request.num_return_sequences) +
                 "; accepted: at most sampling_config.beam_width, which is " + width);
  }
  const auto refuse = [&](bool is_given, const char* name, const char* accepted, const char* reason) {
    if (!is_given) return;
    problems.add(std::string(name) + " is given with sampling_config.beam_width " + width +
                 "; accepted: " + accepted + ", because " + reason);
  };
  refuse(request.guided_decoding_params.has_value(), "guided_decoding_params", "None",
         "the state of a guide cannot be copied between beams");
  refuse(request.logits_post_processor.has_value(), "logits_post_processor", "None",
         "beams are compared by the model's logits");
  refuse(request.logits_post_processor_name.has_value(), "logits_post_processor_name", "None",
         "beams are compared by the model's logits");
  const bool drafts = request.lookahead_config && request.lookahead_config->drafts();
  refuse(drafts, "lookahead_config", "None or LookaheadDecodingConfig(1, 1, 0)", "beams have no drafts");
  refuse(request.external_draft_tokens_config.has_value(), "external_draft_tokens_config", "None",
         "beams have no drafts");
  refuse(request.output_config.return_generation_logits, "output_config.return_generation_logits", "False",
         "logits of beams are not kept");
}

}  // namespace

Problems Request::validate(const EngineInfo& engine, const AdapterTerms& terms) const {
  Problems problems;
  const std::int64_t vocab_size = engine.vocab_size + terms.vocabulary_change;
  if (vocab_size < 1) {
    problems.add("lora_config leaves out " + std::to_string(-std::int64_t{terms.vocabulary_change}) +
                 " tokens; the vocabulary has " + std::to_string(engine.vocab_size));
    return problems;
  }
  const Vocabulary vocabulary{engine.vocab_size, vocab_size, engine.lora.max_extra_tokens > 0};
  check_lengths(problems, *this, engine, terms.rotary_factor);
  check_tokens(problems, "input_token_ids", input_token_ids,
               check_prompt_tuning(problems, *this, engine, vocabulary));
  check_encoder_input(problems, *this, engine);
  check_optional_token(problems, "end_id", end_id, vocabulary);
  check_optional_token(problems, "pad_id", pad_id, vocabulary);
  check_stop_words(problems, *this, vocabulary);
  problems.add_all("sampling_config.", sampling_config.validate());
  TokenConstraints constraints;
  if (bad_words) constraints.bad_words = *bad_words;
  if (embedding_bias && has_bias_shape(*embedding_bias, vocab_size)) {
    constraints.embedding_bias = embedding_bias->values;
  }
  problems.add_all("", constraints.validate(vocab_size));
  if (guided_decoding_params) {
    problems.add_all("guided_decoding_params.", guided_decoding_params->validate());
  }
  if (!std::isfinite(priority) || priority < 0.0F || priority > 1.0F) {
    problems.add("priority is " + std::to_string(priority) + "; accepted: 0 to 1");
  }
  if (allotted_time_ms && allotted_time_ms->count() <= 0) {
    problems.add("allotted_time_ms is " + std::to_string(allotted_time_ms->count()) +
                 "; accepted: 1 or more");
  }
  if (output_config.top_log_probs < 0 || output_config.top_log_probs > kMaxTopLogProbs) {
    problems.add("output_config.top_log_probs is " + std::to_string(output_config.top_log_probs) +
                 "; accepted: 0 to " + std::to_string(kMaxTopLogProbs));
  }
  if (kv_cache_retention_config) {
    problems.add_all("kv_cache_retention_config.", kv_cache_retention_config->validate());
  }
  if (external_draft_tokens_config) {
    problems.add_all("external_draft_tokens_config.", external_draft_tokens_config->validate(vocab_size));
  }
  if (lookahead_config) problems.add_all("lookahead_config.", lookahead_config->validate());
  check_token_types(problems, *this, engine);
  check_active_from(problems, *this, engine);
  if (vocab_size > engine.vocab_size && lora_config && lora_config->active_from != 0) {
    problems.add("lora_config.active_from is " + std::to_string(lora_config->active_from) +
                 "; accepted: 0, the adapter brings tokens, which the base model does not have");
  }
  if (terms.rotary_factor != 1 && lora_config && lora_config->active_from != 0) {
    problems.add("lora_config.active_from is " + std::to_string(lora_config->active_from) +
                 "; accepted: 0, the adapter divides rotary positions, which the base model does not");
  }
  check_num_sequences(problems, *this);
  check_beams(problems, *this, engine);
  check_pooling(problems, *this, engine);
  check_unsupported(problems, *this);
  return problems;
}

std::string Request::error_to_answer(std::int64_t vocab_size) const {
  if (!embedding_bias || has_bias_shape(*embedding_bias, vocab_size)) return {};
  std::string shape;
  for (const std::int64_t size : embedding_bias->shape) {
    shape += (shape.empty() ? "" : ", ") + std::to_string(size);
  }
  // TensorRT-LLM's clients look for the words before the colon.
  return "embedding bias shape is not as expected: embedding_bias is [" + shape + "]; accepted: [" +
         std::to_string(vocab_size) + "], one value for each token of the vocabulary";
}

}  // namespace adaptrt
