#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "adaptrt/guide/grammar.h"

// llguidance's handles, as its C interface names them.
struct LlgMatcher;
struct LlgTokenizer;

namespace adaptrt {

/// Functions of llguidance's C interface (its llguidance.h, from version 1.9 on), which its Python package's
/// library exports: found by whoever has loaded that, so that nothing is linked.
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

/// The functions by their names in C; calls set(name, place of a function pointer) for each.
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
  /// The constraint_type of llg_new_matcher: "json_schema", "regex", "lark", "llguidance".
  std::string kind;
  std::string text;
  /// Memory that the compiled grammar holds, about.
  std::size_t num_bytes = 0;
};

struct LlguidanceOptions {
  /// The bytes of each token of the vocabulary; those of special ones begin with 0xFF, and those that texts
  /// never have are empty.
  std::vector<std::string> tokens;
  /// One or more; the vocabulary has them.
  std::vector<std::int32_t> stop_token_ids;
  /// Translates a valid guide to one of llguidance's languages. Throws RequestError. For any number of
  /// threads at a time.
  std::function<LlguidanceGrammar(const GuidedDecodingParams& params)> translate;
  /// Grammars that are kept for the next requests with the same guides; the least recently used ones go when
  /// there are more, or when they hold more memory. The last one stays, however large it is.
  std::size_t num_kept_grammars = 64;
  std::size_t max_kept_bytes = std::size_t{256} << 20;
};

/// Throws ConfigError with llguidance's reason when it cannot take the vocabulary.
[[nodiscard]] std::unique_ptr<GrammarCompiler> make_llguidance_compiler(const LlguidanceFunctions& functions,
                                                                        LlguidanceOptions options);

}  // namespace adaptrt
