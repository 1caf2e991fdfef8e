#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "active_request.h"
#include "active_sequence.h"
#include "adaptrt/exec/logits_post_processor.h"

namespace adaptrt {

/// The rows of one step that go through post-processors before tokens are chosen from them. They are kept
/// until all of the step's rows are there, so that what the processors need is taken once.
class PostProcessing {
 public:
  void begin();
  /// Keeps the row that a sequence of a request with a post-processor chooses its next token from.
  void add(ActiveSequence& sequence, const float* logits);
  /// Calls the post-processors. Afterwards there are size() rows, in another order.
  void run();

  [[nodiscard]] std::size_t size() const { return rows_.size(); }
  [[nodiscard]] ActiveSequence& sequence(std::size_t index) const { return *kept_[index].sequence; }
  /// As the engine made them.
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
