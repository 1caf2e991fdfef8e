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

void PostProcessing::add(ActiveRequest& request, const float* logits) {
  kept_.push_back({&request, logits_.size()});
  logits_.insert(logits_.end(), logits, logits + vocab_size_);
}

void PostProcessing::run() {
  if (kept_.empty()) return;
  const auto is_batched = [](const Kept& kept) { return kept.request->post_processor().is_batched; };
  // In the order of arrival on both sides; std::stable_partition would allocate.
  std::ranges::sort(kept_, {}, [&](const Kept& kept) { return std::pair(is_batched(kept), kept.offset); });
  const auto batch = std::ranges::find_if(kept_, is_batched);
  for (std::size_t i = 0; i < kept_.size(); ++i) {
    const ActiveRequest& request = *kept_[i].request;
    rows_.push_back({.request_id = request.id,
                     .client_id = request.client_id(),
                     .tokens = request.tokens,
                     .logits = std::make_shared<std::vector<float>>(logits(i), logits(i) + vocab_size_),
                     .error = {}});
  }
  const auto held = request(0).post_processor().processor->enter();
  const auto num_alone = static_cast<std::size_t>(batch - kept_.begin());
  for (std::size_t i = 0; i < num_alone; ++i) request(i).post_processor().processor->process(rows_[i]);
  // All requests of a batch have the same one.
  if (batch != kept_.end()) {
    request(num_alone).post_processor().processor->process_batch(std::span(rows_).subspan(num_alone));
  }
}

}  // namespace adaptrt
