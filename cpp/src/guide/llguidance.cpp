#include "adaptrt/guide/llguidance.h"

#include <array>
#include <list>
#include <mutex>
#include <utility>

#include "adaptrt/core/error.h"

namespace adaptrt {
namespace {

/// Argument of llg_new_tokenizer_v2 in the C interface. The structure contains its size, so later versions
/// treat the fields that they add as zero.
struct TokenizerInit {
  std::size_t struct_size = sizeof(TokenizerInit);
  std::uint32_t vocab_size = 0;
  std::uint32_t tok_eos = 0;
  const std::uint32_t* token_lens = nullptr;
  const std::uint8_t* token_bytes = nullptr;
  const char* tokenizer_json = nullptr;
  bool tokenize_assumes_string = false;
  std::size_t (*tokenize_fn)(const void*, const std::uint8_t*, std::size_t, std::uint32_t*,
                             std::size_t) = nullptr;
  /// No tokenizer is needed: all tokens that spell an allowed text are allowed.
  bool use_approximate_greedy_tokenize_fn = true;
  const void* tokenize_user_data = nullptr;
  const char* const* slices = nullptr;
  const std::uint32_t* tok_eos_extra = nullptr;
  std::uint32_t tok_eos_extra_count = 0;
};

/// Argument of llg_new_matcher in the C interface, up to the last field that we change after set_defaults.
/// The structure does not contain its size, so there is room after it for the fields of later versions.
struct MatcherInit {
  const LlgTokenizer* tokenizer;
  std::uint32_t log_buffer_level;
  std::uint32_t log_stderr_level;
};
struct alignas(MatcherInit) MatcherInitStorage {
  MatcherInit known;
  std::array<std::byte, 1024> rest;
};

struct FreeTokenizer {
  void (*function)(LlgTokenizer*);
  void operator()(LlgTokenizer* tokenizer) const { function(tokenizer); }
};
struct FreeMatcher {
  void (*function)(LlgMatcher*);
  void operator()(LlgMatcher* matcher) const { function(matcher); }
};
using TokenizerPtr = std::unique_ptr<LlgTokenizer, FreeTokenizer>;
using MatcherPtr = std::unique_ptr<LlgMatcher, FreeMatcher>;

std::string error_of(const LlguidanceFunctions& functions, LlgMatcher* matcher) {
  const char* error = functions.get_error(matcher);
  return error == nullptr ? "llguidance gives no reason" : error;
}

class LlguidanceState final : public GrammarState {
 public:
  LlguidanceState(const LlguidanceFunctions& functions, std::shared_ptr<LlgTokenizer> tokenizer,
                  MatcherPtr matcher)
      : functions_(functions), tokenizer_(std::move(tokenizer)), matcher_(std::move(matcher)) {}

  void fill_mask(std::span<std::uint32_t> mask) override {
    if (functions_.compute_mask_into(matcher_.get(), mask.data(), mask.size_bytes()) != 0) fail();
  }
  void accept(std::int32_t token) override {
    if (functions_.consume_token(matcher_.get(), static_cast<std::uint32_t>(token)) != 0) fail();
  }

 private:
  [[noreturn]] void fail() { throw StepError(error_of(functions_, matcher_.get())); }

  LlguidanceFunctions functions_;
  std::shared_ptr<LlgTokenizer> tokenizer_;  // must outlive the matcher
  MatcherPtr matcher_;
};

class LlguidanceCompiler final : public GrammarCompiler {
 public:
  LlguidanceCompiler(const LlguidanceFunctions& functions, LlguidanceOptions options)
      : functions_(functions), options_(std::move(options)), tokenizer_(make_tokenizer()) {}

  std::unique_ptr<GrammarState> compile(const GuidedDecodingParams& params) override {
    MatcherPtr matcher = clone_of_kept(params);
    if (!matcher) {
      const LlguidanceGrammar grammar = options_.translate(params);
      MatcherPtr compiled = make_matcher(grammar);
      matcher = clone(compiled.get());
      keep({params, std::move(compiled), grammar.num_bytes});
    }
    return std::make_unique<LlguidanceState>(functions_, tokenizer_, std::move(matcher));
  }

  bool has_compiled(const GuidedDecodingParams& params) override {
    const std::lock_guard lock(mutex_);
    return find_kept(params) != nullptr;
  }

  [[nodiscard]] std::span<const std::int32_t> stop_token_ids() const override {
    return options_.stop_token_ids;
  }

 private:
  struct Kept {
    GuidedDecodingParams params;
    MatcherPtr matcher;  // at the start of an output
    std::size_t num_bytes;
  };

  std::shared_ptr<LlgTokenizer> make_tokenizer() {
    std::vector<std::uint32_t> lengths;
    std::string bytes;
    for (const auto& token : options_.tokens) {
      lengths.push_back(static_cast<std::uint32_t>(token.size()));
      bytes += token;
    }
    const std::vector<std::uint32_t> stops(options_.stop_token_ids.begin(), options_.stop_token_ids.end());
    TokenizerInit init;
    init.vocab_size = static_cast<std::uint32_t>(lengths.size());
    init.tok_eos = stops.at(0);
    init.token_lens = lengths.data();
    init.token_bytes = reinterpret_cast<const std::uint8_t*>(bytes.data());
    init.tok_eos_extra = stops.data() + 1;
    init.tok_eos_extra_count = static_cast<std::uint32_t>(stops.size() - 1);
    std::array<char, 1024> error{};
    LlgTokenizer* tokenizer = functions_.new_tokenizer(&init, error.data(), error.size());
    if (tokenizer == nullptr) throw ConfigError(std::string("llguidance: ") + error.data());
    return {tokenizer, FreeTokenizer{functions_.free_tokenizer}};
  }

  /// Makes a matcher and its first mask, so that its clones share the lexer states that this computes.
  MatcherPtr make_matcher(const LlguidanceGrammar& grammar) {
    MatcherInitStorage init{};
    functions_.set_defaults(&init, tokenizer_.get());
    init.known.log_buffer_level = 0;
    init.known.log_stderr_level = 0;
    MatcherPtr matcher(functions_.new_matcher(&init, grammar.kind.c_str(), grammar.text.c_str()),
                       FreeMatcher{functions_.free_matcher});
    std::vector<std::uint32_t> mask((options_.tokens.size() + 31) / 32);
    if (functions_.get_error(matcher.get()) != nullptr ||
        functions_.compute_mask_into(matcher.get(), mask.data(), mask.size() * sizeof(std::uint32_t)) != 0) {
      throw RequestError("the guide cannot be compiled: " + error_of(functions_, matcher.get()));
    }
    return matcher;
  }

  MatcherPtr clone(const LlgMatcher* matcher) {
    return {functions_.clone_matcher(matcher), FreeMatcher{functions_.free_matcher}};
  }

  MatcherPtr clone_of_kept(const GuidedDecodingParams& params) {
    const std::lock_guard lock(mutex_);
    const LlgMatcher* kept = find_kept(params);
    if (kept == nullptr) return {nullptr, FreeMatcher{functions_.free_matcher}};
    return clone(kept);
  }

  /// Call it with mutex_ held. Makes the grammar the most recently used one; returns nullptr if it is not
  /// cached.
  const LlgMatcher* find_kept(const GuidedDecodingParams& params) {
    for (auto kept = kept_.begin(); kept != kept_.end(); ++kept) {
      if (kept->params != params) continue;
      kept_.splice(kept_.begin(), kept_, kept);
      return kept->matcher.get();
    }
    return nullptr;
  }

  void keep(Kept grammar) {
    const std::lock_guard lock(mutex_);
    kept_bytes_ += grammar.num_bytes;
    kept_.push_front(std::move(grammar));
    while (kept_.size() > 1 &&
           (kept_.size() > options_.num_kept_grammars || kept_bytes_ > options_.max_kept_bytes)) {
      kept_bytes_ -= kept_.back().num_bytes;
      kept_.pop_back();
    }
  }

  LlguidanceFunctions functions_;
  LlguidanceOptions options_;
  std::shared_ptr<LlgTokenizer> tokenizer_;
  std::mutex mutex_;
  std::list<Kept> kept_;  // most recently used first
  std::size_t kept_bytes_ = 0;
};

}  // namespace

std::unique_ptr<GrammarCompiler> make_llguidance_compiler(const LlguidanceFunctions& functions,
                                                          LlguidanceOptions options) {
  return std::make_unique<LlguidanceCompiler>(functions, std::move(options));
}

}  // namespace adaptrt
