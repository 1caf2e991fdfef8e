#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "adaptrt/guide/guided_decoding.h"

namespace adaptrt {

/// Position of one output in its grammar. Only one thread at a time may use it.
class GrammarState {
 public:
  GrammarState() = default;
  virtual ~GrammarState() = default;
  GrammarState(const GrammarState&) = delete;
  GrammarState& operator=(const GrammarState&) = delete;

  /// Sets bit i % 32 of word i / 32 if token i may come next, and clears it otherwise. `mask` has the words
  /// for the whole vocabulary. Throws StepError.
  virtual void fill_mask(std::span<std::uint32_t> mask) = 0;
  /// Advances by a token that the mask allowed. Throws StepError.
  virtual void accept(std::int32_t token) = 0;
};

/// Compiles guides to grammars. Thread-safe.
class GrammarCompiler {
 public:
  GrammarCompiler() = default;
  virtual ~GrammarCompiler() = default;
  GrammarCompiler(const GrammarCompiler&) = delete;
  GrammarCompiler& operator=(const GrammarCompiler&) = delete;

  /// Returns the state at the start of an output. Throws RequestError with the reason if the guide cannot be
  /// compiled.
  [[nodiscard]] virtual std::unique_ptr<GrammarState> compile(const GuidedDecodingParams& params) = 0;
  /// True if the compiled grammar is kept, so that compile() copies it. The call counts as a use: the grammar
  /// becomes the most recently used one.
  [[nodiscard]] virtual bool has_compiled(const GuidedDecodingParams& params) = 0;
  /// Returns the tokens that end an output; masks allow them only where the grammar is complete.
  [[nodiscard]] virtual std::span<const std::int32_t> stop_token_ids() const = 0;
};

}  // namespace adaptrt
