#pragma once

#include <cstdint>
#include <memory>
#include <mutex>

#include "adaptrt/guide/grammar.h"
#include "adaptrt/guide/token_guide.h"

namespace adaptrt {

/// Starts the guides of requests, on the threads that queue them. It has no thread and no grammar before a
/// compiler is set.
class Guides {
 public:
  explicit Guides(std::int64_t vocab_size) : vocab_size_(vocab_size) {}

  /// See Executor::set_grammar_compiler.
  void set_compiler(std::shared_ptr<GrammarCompiler> compiler);
  [[nodiscard]] bool are_there() const;
  /// Valid as long as this object. Throws RequestError if the guide cannot be compiled, or if there is no
  /// compiler.
  [[nodiscard]] std::shared_ptr<TokenGuide> begin(const GuidedDecodingParams& params);
  /// Throws the errors of begin().
  void check(const GuidedDecodingParams& params);
  /// See GrammarCompiler::has_compiled; false without a compiler.
  [[nodiscard]] bool has_compiled(const GuidedDecodingParams& params);

 private:
  GrammarCompiler& compiler();

  std::int64_t vocab_size_;
  mutable std::mutex mutex_;
  std::shared_ptr<GrammarCompiler> compiler_;
  std::unique_ptr<MaskThread> thread_;
};

}  // namespace adaptrt
