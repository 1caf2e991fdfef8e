#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/core/fields.h"

namespace adaptrt {

/// TensorRT-LLM's Request::kBatchedPostProcessorName: the name that selects
/// LogitsPostProcessorConfig::processor_batched.
inline constexpr const char* kBatchedPostProcessorName = "batched";

/// The row of logits that a request's next token is chosen from.
struct PostProcessedRow {
  std::uint64_t request_id = 0;
  std::optional<std::uint64_t> client_id;
  /// The prompt and the tokens generated so far.
  std::span<const std::int32_t> tokens;
  /// Logits [vocabulary size of the request], to be changed in place. Bias, penalties and all later stages
  /// are applied afterwards.
  std::shared_ptr<std::vector<float>> logits;
  /// Error message; if not empty, the request fails with it.
  std::string error;
};

/// Changes logits. It runs on the executor's thread, which waits for it.
class LogitsPostProcessor {
 public:
  LogitsPostProcessor() = default;
  virtual ~LogitsPostProcessor() = default;
  LogitsPostProcessor(const LogitsPostProcessor&) = delete;
  LogitsPostProcessor& operator=(const LogitsPostProcessor&) = delete;

  /// Acquires a resource that all calls of a step need, such as an interpreter's lock. It is held until the
  /// last call has returned.
  [[nodiscard]] virtual std::shared_ptr<void> enter() = 0;
  /// process() and process_batch() must not throw.
  virtual void process(PostProcessedRow& row) = 0;
  virtual void process_batch(std::span<PostProcessedRow> rows) = 0;
  /// True if both call the same function.
  [[nodiscard]] virtual bool equals(const LogitsPostProcessor& other) const = 0;
};

/// A post-processor as a field of a struct.
struct PostProcessorFunction {
  std::shared_ptr<LogitsPostProcessor> processor;

  bool operator==(const PostProcessorFunction& other) const { return processor->equals(*other.processor); }
};

/// TensorRT-LLM's LogitsPostProcessorConfig.
struct LogitsPostProcessorConfig {
  /// Requests that name a missing function are refused.
  std::optional<std::map<std::string, std::optional<PostProcessorFunction>>> processor_map = std::nullopt;
  std::optional<PostProcessorFunction> processor_batched = std::nullopt;
  bool replicate = true;

  /// Refuses the name of processor_batched in the map.
  [[nodiscard]] Problems validate() const;
  bool operator==(const LogitsPostProcessorConfig&) const = default;
};

constexpr auto fields_of(const LogitsPostProcessorConfig* /*type*/) {
  using C = LogitsPostProcessorConfig;
  return FieldList{
      Field{"processor_map", &C::processor_map, "Map from the names that requests use to functions."},
      Field{"processor_batched", &C::processor_batched,
            "The function of all requests that ask for Request.BATCHED_POST_PROCESSOR_NAME, once a step."},
      Field{"replicate", &C::replicate, "No effect: only rank 0 has the executor and calls the functions."}};
}

}  // namespace adaptrt
