#pragma once

#include <cstdint>
#include <memory>
#include <mutex>

#include "adaptrt/guide/grammar.h"
#include "adaptrt/guide/token_guide.h"

namespace adaptrt {

/// Begins the guides of requests, on the threads that queue them. Has no thread and no grammar until a
/// compiler is there.
class Guides {
 public:
  explicit Guides(std::int64_t vocab_size) : vocab_size_(vocab_size) {}

  /// See Executor::set_grammar_compiler.
  void set_compiler(std::shared_ptr<GrammarCompiler> compiler);
  [[nodiscard]] bool are_there() const;
  /// Valid as long as this. Throws RequestError when the guide cannot be compiled, or when there is no
  /// compiler.
  [[nodiscard]] std::shared_ptr<TokenGuide> begin(const GuidedDecodingParams& params);
  /// Throws as begin() does.
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
