#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "active_request.h"
#include "active_sequence.h"
#include "adaptrt/exec/logits_post_processor.h"

namespace adaptrt {

/// The rows of one step that go through post-processors before tokens are chosen. They are collected first,
/// so that the resource of LogitsPostProcessor::enter() is acquired once per step.
class PostProcessing {
 public:
  void begin();
  /// Stores the row for the next token of a sequence whose request has a post-processor.
  void add(ActiveSequence& sequence, const float* logits);
  /// Calls the post-processors. Afterwards there are size() rows, in a different order.
  void run();

  [[nodiscard]] std::size_t size() const { return rows_.size(); }
  [[nodiscard]] ActiveSequence& sequence(std::size_t index) const { return *kept_[index].sequence; }
  /// Unchanged logits from the engine.
  [[nodiscard]] const float* logits(std::size_t index) const { return logits_.data() + kept_[index].offset; }
  [[nodiscard]] const PostProcessedRow& row(std::size_t index) const { return rows_[index]; }

 private:
  struct Kept {
    ActiveSequence* sequence = nullptr;
    std::size_t offset = 0;  // in logits_
  };

  std::vector<Kept> kept_;
  std::vector<float> logits_;
  std::vector<PostProcessedRow> rows_;  // one for each of kept_
};

}  // namespace adaptrt
