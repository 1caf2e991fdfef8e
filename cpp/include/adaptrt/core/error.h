#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace adaptrt {

/// Base class of all errors that this library throws on purpose. Python sees it as adaptrt.AdaptrtError.
class AdaptrtError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The table of error types: name, base class, and Python docstring. The classes and bindings are generated
// from it.
#define ADAPTRT_ERROR_TABLE(X)                                                                         \
  X(ConfigError, AdaptrtError, "A configuration field or a flag has a value that cannot be used.")     \
  X(CheckpointError, AdaptrtError, "A checkpoint directory or one of its files cannot be used.")       \
  X(EngineError, AdaptrtError, "An engine directory is of another version, damaged, or inconsistent.") \
  X(AdapterError, AdaptrtError, "An adapter was refused; nothing of it was stored.")                   \
  X(PeftTaskNotCachedError, AdapterError, "A task_id came without weights and is not in the cache.")   \
  X(LoraCacheFullError, AdapterError, "An adapter does not fit in the LoRA cache.")                    \
  X(RequestError, AdaptrtError, "A request was refused before it was queued.")                         \
  X(QueueFullError, RequestError, "The queue already holds max_queue_size requests.")                  \
  X(ExecutorClosedError, AdaptrtError, "The executor was shut down, or died of the reason given.")     \
  X(StepError, AdaptrtError, "An engine step failed; its requests end with this reason.")

#define ADAPTRT_DECLARE_ERROR(name, base, doc) \
  class name : public base {                   \
   public:                                     \
    using base::base;                          \
  };
ADAPTRT_ERROR_TABLE(ADAPTRT_DECLARE_ERROR)
#undef ADAPTRT_DECLARE_ERROR

/// The text of a size for a message.
[[nodiscard]] inline std::string text(std::int64_t value) {
  return std::to_string(value);
}

/// Collects all problems of one input, so that one error reports them together.
class Problems {
 public:
  void add(std::string problem) { problems_.push_back(std::move(problem)); }
  /// Adds the problems of a nested struct, each with `prefix` before it ("sampling_config.").
  void add_all(std::string_view prefix, const Problems& nested) {
    for (const auto& problem : nested.problems_) problems_.push_back(std::string(prefix) + problem);
  }
  [[nodiscard]] bool empty() const { return problems_.empty(); }
  [[nodiscard]] const std::vector<std::string>& list() const { return problems_; }

  /// Throws Error("<subject>: <problem>; <problem>") if there are problems.
  template <class Error>
  void throw_if_any(std::string_view subject) const {
    if (problems_.empty()) return;
    std::string message(subject);
    const char* separator = ": ";
    for (const auto& problem : problems_) {
      message.append(separator).append(problem);
      separator = "; ";
    }
    throw Error(message);
  }

 private:
  std::vector<std::string> problems_;
};

}  // namespace adaptrt
