#include "post_processing.h"

#include <algorithm>
#include <memory>
#include <span>
#include <utility>

namespace adaptrt {

void PostProcessing::begin() {
  kept_.clear();
  logits_.clear();
  rows_.clear();
}

void PostProcessing::add(ActiveSequence& sequence, const float* logits) {
  kept_.push_back({&sequence, logits_.size()});
  logits_.insert(logits_.end(), logits, logits + sequence.request().vocab_size());
}

void PostProcessing::run() {
  if (kept_.empty()) return;
  const auto is_batched = [](const Kept& kept) {
    return kept.sequence->request().post_processor().is_batched;
  };
  // Keeps the order of arrival in both parts; std::stable_partition would allocate.
  std::ranges::sort(kept_, {}, [&](const Kept& kept) { return std::pair(is_batched(kept), kept.offset); });
  const auto batch = std::ranges::find_if(kept_, is_batched);
  for (std::size_t i = 0; i < kept_.size(); ++i) {
    const ActiveSequence& sequence = *kept_[i].sequence;
    rows_.push_back({.request_id = sequence.id,
                     .client_id = sequence.request().client_id(),
                     .tokens = sequence.tokens,
                     .logits = std::make_shared<std::vector<float>>(
                         logits(i), logits(i) + sequence.request().vocab_size()),
                     .error = {}});
  }
  const auto processor_of = [&](std::size_t i) -> LogitsPostProcessor& {
    return *sequence(i).request().post_processor().processor;
  };
  const auto held = processor_of(0).enter();
  const auto num_alone = static_cast<std::size_t>(batch - kept_.begin());
  for (std::size_t i = 0; i < num_alone; ++i) processor_of(i).process(rows_[i]);
  // All requests of a batch have the same post-processor.
  if (batch != kept_.end()) {
    processor_of(num_alone).process_batch(std::span(rows_).subspan(num_alone));
  }
}

}  // namespace adaptrt
