#include "adaptrt/engine/microbatches.h"

namespace adaptrt {

std::vector<SequenceRun> runs_of_whole_sequences(std::span<const std::int32_t> offsets) {
  std::vector<SequenceRun> runs;
  const std::size_t count = offsets.size() - 1;
  std::size_t first = 0;
  for (std::size_t last = 1; last <= count; ++last) {
    if (offsets[last] - offsets[first] < kMinMicrobatchTokens) continue;
    runs.push_back({first, last});
    first = last;
  }
  if (runs.empty()) runs.push_back({0, 0});
  runs.back().last = count;  // with what is too short for a run of its own
  return runs;
}

}  // namespace adaptrt
