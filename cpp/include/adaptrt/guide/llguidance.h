#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "adaptrt/guide/grammar.h"

// llguidance's handles, with the names of its C interface.
struct LlgMatcher;
struct LlgTokenizer;

namespace adaptrt {

/// Functions of llguidance's C interface (llguidance.h, version 1.9 or later), exported by the library of its
/// Python package. The caller loads that library and finds them, so nothing is linked.
struct LlguidanceFunctions {
  LlgTokenizer* (*new_tokenizer)(const void* init, char* error, std::size_t error_size) = nullptr;
  void (*free_tokenizer)(LlgTokenizer* tokenizer) = nullptr;
  void (*set_defaults)(void* init, const LlgTokenizer* tokenizer) = nullptr;
  LlgMatcher* (*new_matcher)(const void* init, const char* kind, const char* text) = nullptr;
  LlgMatcher* (*clone_matcher)(const LlgMatcher* matcher) = nullptr;
  void (*free_matcher)(LlgMatcher* matcher) = nullptr;
  const char* (*get_error)(LlgMatcher* matcher) = nullptr;
  std::int32_t (*compute_mask_into)(LlgMatcher* matcher, std::uint32_t* mask, std::size_t bytes) = nullptr;
  std::int32_t (*consume_token)(LlgMatcher* matcher, std::uint32_t token) = nullptr;
};

/// Calls set(name in C, address of the function pointer) for each function.
template <class Set>
void for_each_function(LlguidanceFunctions& functions, Set set) {
  set("llg_new_tokenizer_v2", functions.new_tokenizer);
  set("llg_free_tokenizer", functions.free_tokenizer);
  set("llg_constraint_init_set_defaults", functions.set_defaults);
  set("llg_new_matcher", functions.new_matcher);
  set("llg_clone_matcher", functions.clone_matcher);
  set("llg_free_matcher", functions.free_matcher);
  set("llg_matcher_get_error", functions.get_error);
  set("llg_matcher_compute_mask_into", functions.compute_mask_into);
  set("llg_matcher_consume_token", functions.consume_token);
}

/// A grammar in one of llguidance's languages.
struct LlguidanceGrammar {
  /// llg_new_matcher's constraint_type: "json_schema", "regex", "lark" or "llguidance".
  std::string kind;
  std::string text;
  /// Approximate memory of the compiled grammar.
  std::size_t num_bytes = 0;
};

struct LlguidanceOptions {
  /// The bytes of each token of the vocabulary. Special tokens begin with 0xFF; tokens that never occur in
  /// text are empty.
  std::vector<std::string> tokens;
  /// At least one; each must be in the vocabulary.
  std::vector<std::int32_t> stop_token_ids;
  /// Translates a valid guide to one of llguidance's languages. Throws RequestError. It must be thread-safe.
  std::function<LlguidanceGrammar(const GuidedDecodingParams& params)> translate;
  /// Maximum number and total bytes of grammars that are cached for later requests with the same guides. The
  /// least recently used ones are evicted; the newest one stays, whatever its size.
  std::size_t num_kept_grammars = 64;
  std::size_t max_kept_bytes = std::size_t{256} << 20;
};

/// Throws ConfigError with llguidance's reason if it does not accept the vocabulary.
[[nodiscard]] std::unique_ptr<GrammarCompiler> make_llguidance_compiler(const LlguidanceFunctions& functions,
                                                                        LlguidanceOptions options);

}  // namespace adaptrt
