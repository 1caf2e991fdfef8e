// A stand-in for llguidance's C interface: who frees what, and how errors are reported.

#include "adaptrt/guide/llguidance.h"

#include <boost/test/unit_test.hpp>
#include <cstring>
#include <string>
#include <vector>

#include "adaptrt/core/error.h"

/// A text that may be generated once, one letter per token.
struct LlgMatcher {
  std::string text;
  std::size_t place = 0;
  std::string error;
};
struct LlgTokenizer {
  std::vector<std::uint32_t> lengths;
};

namespace adaptrt::llguidance_test {
namespace {

int num_tokenizers = 0;
int num_matchers = 0;
int num_compiled = 0;

/// Same layout as in llguidance.h.
struct Init {
  std::size_t struct_size;
  std::uint32_t vocab_size;
  std::uint32_t tok_eos;
  const std::uint32_t* token_lens;
  const std::uint8_t* token_bytes;
};

LlguidanceFunctions fake_functions() {
  LlguidanceFunctions functions;
  functions.new_tokenizer = [](const void* given, char* error, std::size_t size) -> LlgTokenizer* {
    Init init;
    std::memcpy(&init, given, sizeof(init));
    if (init.tok_eos >= init.vocab_size) {
      std::strncpy(error, "no such end", size - 1);
      return nullptr;
    }
    ++num_tokenizers;
    return new LlgTokenizer{{init.token_lens, init.token_lens + init.vocab_size}};
  };
  functions.free_tokenizer = [](LlgTokenizer* tokenizer) {
    --num_tokenizers;
    delete tokenizer;
  };
  functions.set_defaults = [](void* init, const LlgTokenizer* tokenizer) {
    std::memcpy(init, static_cast<const void*>(&tokenizer), sizeof(tokenizer));
  };
  functions.new_matcher = [](const void* /*init*/, const char* kind, const char* text) {
    ++num_matchers;
    ++num_compiled;
    auto* matcher = new LlgMatcher{text, 0, {}};
    if (std::string(kind) != "regex") matcher->error = "no regex";
    return matcher;
  };
  functions.clone_matcher = [](const LlgMatcher* matcher) {
    ++num_matchers;
    return new LlgMatcher(*matcher);
  };
  functions.free_matcher = [](LlgMatcher* matcher) {
    --num_matchers;
    delete matcher;
  };
  functions.get_error = [](LlgMatcher* matcher) -> const char* {
    return matcher->error.empty() ? nullptr : matcher->error.c_str();
  };
  functions.compute_mask_into = [](LlgMatcher* matcher, std::uint32_t* mask, std::size_t bytes) {
    if (bytes != 16) matcher->error = "no room";
    if (!matcher->error.empty()) return -1;
    std::memset(mask, 0, bytes);
    const auto next = matcher->place < matcher->text.size() ? matcher->text[matcher->place] : '\0';
    mask[next / 32] = 1U << next % 32;
    return 0;
  };
  functions.consume_token = [](LlgMatcher* matcher, std::uint32_t token) {
    if (matcher->text.at(matcher->place) != static_cast<char>(token)) matcher->error = "another letter";
    ++matcher->place;
    return matcher->error.empty() ? 0 : -1;
  };
  return functions;
}

LlguidanceOptions options(std::size_t num_kept_grammars = 64) {
  LlguidanceOptions options;
  options.tokens.resize(128);
  for (std::size_t i = 1; i < 128; ++i) options.tokens[i] = static_cast<char>(i);
  options.stop_token_ids = {0};
  options.num_kept_grammars = num_kept_grammars;
  options.translate = [](const GuidedDecodingParams& params) {
    return LlguidanceGrammar{params.guide_type == GuideType::kRegex ? "regex" : "lark", *params.guide};
  };
  return options;
}

GuidedDecodingParams regex(const std::string& text) {
  return {.guide_type = GuideType::kRegex, .guide = text};
}

/// Compiles a guide and returns the total number of grammars that llguidance has compiled.
int num_compiled_after(GrammarCompiler& compiler, const std::string& text) {
  static_cast<void>(compiler.compile(regex(text)));
  return num_compiled;
}

std::int32_t only_token(GrammarState& state) {
  std::vector<std::uint32_t> mask(4);
  state.fill_mask(mask);
  std::int32_t found = -1;
  for (std::int32_t token = 0; token < 128; ++token) {
    if ((mask[static_cast<std::size_t>(token / 32)] >> token % 32 & 1U) == 0) continue;
    BOOST_TEST(found == -1);
    found = token;
  }
  return found;
}

BOOST_AUTO_TEST_SUITE(llguidance)

BOOST_AUTO_TEST_CASE(states_are_apart_and_everything_is_freed) {
  num_compiled = 0;
  std::unique_ptr<GrammarState> survivor;
  {
    const auto compiler = make_llguidance_compiler(fake_functions(), options());
    BOOST_TEST(compiler->stop_token_ids().size() == 1U);
    const auto first = compiler->compile(regex("ab"));
    const auto second = compiler->compile(regex("ab"));
    BOOST_TEST(num_compiled == 1);
    BOOST_TEST(only_token(*first) == 'a');
    first->accept('a');
    BOOST_TEST(only_token(*first) == 'b');
    BOOST_TEST(only_token(*second) == 'a');
    first->accept('b');
    BOOST_TEST(only_token(*first) == 0);
    survivor = compiler->compile(regex("x"));
    BOOST_TEST(num_tokenizers == 1);
  }
  BOOST_TEST(num_tokenizers == 1);  // a running one needs it
  BOOST_TEST(only_token(*survivor) == 'x');
  survivor.reset();
  BOOST_TEST(num_tokenizers == 0);
  BOOST_TEST(num_matchers == 0);
}

BOOST_AUTO_TEST_CASE(errors_have_llguidance_s_words) {
  const auto compiler = make_llguidance_compiler(fake_functions(), options());
  const auto says = [](const std::string& text) {
    return [text](const AdaptrtError& error) { return error.what() == text; };
  };
  BOOST_CHECK_EXCEPTION((void)compiler->compile({GuideType::kEbnfGrammar, "x"}), RequestError,
                        says("the guide cannot be compiled: no regex"));
  const auto state = compiler->compile(regex("ab"));
  BOOST_CHECK_EXCEPTION(state->accept('c'), StepError, says("another letter"));
  std::vector<std::uint32_t> mask(4);
  BOOST_CHECK_EXCEPTION(state->fill_mask(mask), StepError, says("another letter"));
  auto wrong = options();
  wrong.stop_token_ids = {128};
  BOOST_CHECK_EXCEPTION((void)make_llguidance_compiler(fake_functions(), wrong), ConfigError,
                        says("llguidance: no such end"));
  BOOST_TEST(num_tokenizers == 1);
}

BOOST_AUTO_TEST_CASE(the_least_recently_used_grammar_is_compiled_again) {
  const auto compiler = make_llguidance_compiler(fake_functions(), options(2));
  num_compiled = 0;
  const auto compile = [&](const std::string& text) { return num_compiled_after(*compiler, text); };
  BOOST_TEST(compile("a") == 1);
  BOOST_TEST(compile("b") == 2);
  BOOST_TEST(compile("a") == 2);
  BOOST_TEST(compile("c") == 3);
  BOOST_TEST(compile("a") == 3);
  BOOST_TEST(compile("b") == 4);
  BOOST_TEST(num_matchers == 2);
}

BOOST_AUTO_TEST_CASE(asking_for_a_grammar_counts_as_a_use_and_compiles_nothing) {
  const auto compiler = make_llguidance_compiler(fake_functions(), options(2));
  num_compiled = 0;
  BOOST_TEST(!compiler->has_compiled(regex("a")));
  BOOST_TEST(num_compiled == 0);
  static_cast<void>(compiler->compile(regex("a")));
  static_cast<void>(compiler->compile(regex("b")));
  BOOST_TEST(compiler->has_compiled(regex("a")));
  static_cast<void>(compiler->compile(regex("c")));  // evicts b
  BOOST_TEST(compiler->has_compiled(regex("a")));
  BOOST_TEST(!compiler->has_compiled(regex("b")));
  BOOST_TEST(num_compiled == 3);
  BOOST_TEST(num_matchers == 2);
}

BOOST_AUTO_TEST_CASE(grammars_that_hold_too_much_memory_go) {
  auto limited = options();
  limited.max_kept_bytes = 100;
  limited.translate = [](const GuidedDecodingParams& params) {
    return LlguidanceGrammar{"regex", *params.guide, params.guide == "large" ? 101U : 50U};
  };
  const auto compiler = make_llguidance_compiler(fake_functions(), limited);
  num_compiled = 0;
  const auto compile = [&](const std::string& text) { return num_compiled_after(*compiler, text); };
  BOOST_TEST(compile("a") == 1);
  BOOST_TEST(compile("b") == 2);
  BOOST_TEST(compile("a") == 2);
  BOOST_TEST(num_matchers == 2);
  BOOST_TEST(compile("c") == 3);  // evicts b
  BOOST_TEST(compile("a") == 3);
  BOOST_TEST(num_matchers == 2);
  BOOST_TEST(compile("large") == 4);  // evicts all others, but stays itself
  BOOST_TEST(compile("large") == 4);
  BOOST_TEST(num_matchers == 1);
  BOOST_TEST(compile("a") == 5);
  BOOST_TEST(compile("c") == 6);
  BOOST_TEST(num_matchers == 2);
}

BOOST_AUTO_TEST_SUITE_END()

BOOST_AUTO_TEST_SUITE(guided_decoding)

BOOST_AUTO_TEST_CASE(errors_of_grammars_are_named) {
  BOOST_TEST(GuidedDecodingParams{}.validate().empty());
  BOOST_TEST(regex("a").validate().empty());
  for (const auto& params : {GuidedDecodingParams{GuideType::kRegex, std::nullopt},
                             GuidedDecodingParams{GuideType::kJson, "{}"}, regex(std::string("a\0b", 3))}) {
    const auto problems = params.validate().list();
    BOOST_TEST_REQUIRE(problems.size() == 1U);
    BOOST_TEST(problems[0].starts_with("guide "));
  }
  BOOST_TEST(GuidedDecodingConfig{}.validate().empty());
  GuidedDecodingConfig config;
  config.backend = GuidedDecodingBackend::kXgrammar;
  config.encoded_vocab.emplace();
  config.stop_token_ids.emplace();
  BOOST_TEST(config.validate().list().size() == 3U);
  config = {.encoded_vocab = {{"a"}}, .tokenizer_str = "{}", .stop_token_ids = {{1}}};
  BOOST_TEST(config.validate().empty());
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::llguidance_test
