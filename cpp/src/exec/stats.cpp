#include "adaptrt/exec/stats.h"

#include "json_writer.h"

namespace adaptrt {
namespace {

template <class Stats>
std::string to_json(const Stats& stats) {
  std::string text;
  json::write(text, stats);
  return text;
}

}  // namespace

std::string_view name_of(RequestStage stage) {
  switch (stage) {
    case RequestStage::kQueued:
      return "QUEUED";
    case RequestStage::kContextInProgress:
      return "CONTEXT_IN_PROGRESS";
    case RequestStage::kGenerationInProgress:
      return "GENERATION_IN_PROGRESS";
    case RequestStage::kGenerationComplete:
      return "GENERATION_COMPLETE";
    case RequestStage::kEncoderInProgress:
      return "ENCODER_IN_PROGRESS";
  }
  return "";
}

std::string to_json_str(const IterationStats& stats) {
  return to_json(stats);
}
std::string to_json_str(const RequestStats& stats) {
  return to_json(stats);
}
std::string to_json_str(const RequestStatsPerIteration& stats) {
  return to_json(stats);
}

}  // namespace adaptrt
