#include "adaptrt/draft/draft_pace.h"

#include <algorithm>

namespace adaptrt {

DraftPace::DraftPace(std::int32_t most) : most_(most), length_(std::min(kFirstLength, most)) {}

std::int32_t DraftPace::next() {
  if (pause_ == 0) return length_;
  --pause_;
  return 0;
}

void DraftPace::record(std::int32_t num_computed, std::int32_t num_right) {
  if (num_right == 0) {
    length_ = std::max(length_ / 2, 1);
    misses_ = std::min(misses_ + 1, kMostMisses);
    pause_ = (1 << (2 * misses_ - 1)) - 1;
    return;
  }
  misses_ /= 2;
  // With fewer than length_ computed drafts, their result does not justify more.
  if (num_right == num_computed && num_computed == length_) length_ += std::min(length_, most_ - length_);
}

}  // namespace adaptrt
