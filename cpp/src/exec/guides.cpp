#include "guides.h"

#include <utility>

#include "adaptrt/core/error.h"

namespace adaptrt {

void Guides::set_compiler(std::shared_ptr<GrammarCompiler> compiler) {
  auto thread = std::make_unique<MaskThread>();
  const std::lock_guard lock(mutex_);
  if (compiler_) throw ConfigError("the executor has a GrammarCompiler");
  compiler_ = std::move(compiler);
  thread_ = std::move(thread);
}

bool Guides::are_there() const {
  const std::lock_guard lock(mutex_);
  return compiler_ != nullptr;
}

std::shared_ptr<TokenGuide> Guides::begin(const GuidedDecodingParams& params) {
  GrammarCompiler& grammars = compiler();
  return TokenGuide::begin(grammars.compile(params), vocab_size_, grammars.stop_token_ids(), *thread_);
}

void Guides::check(const GuidedDecodingParams& params) {
  static_cast<void>(compiler().compile(params));
}

bool Guides::has_compiled(const GuidedDecodingParams& params) {
  return are_there() && compiler().has_compiled(params);
}

GrammarCompiler& Guides::compiler() {
  const std::lock_guard lock(mutex_);
  if (!compiler_) throw RequestError("the executor has no GrammarCompiler");
  return *compiler_;
}

}  // namespace adaptrt
