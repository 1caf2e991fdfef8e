#include "live_ranges.h"

#include <algorithm>

namespace adaptrt {

void LiveRanges::write(BufferId id) {
  values_[static_cast<std::size_t>(id)].push_back({now_, now_});
}

bool LiveRanges::read(BufferId id) {
  auto& values = values_[static_cast<std::size_t>(id)];
  if (values.empty()) return false;
  values.back().last = now_;
  return true;
}

void LiveRanges::finish() {
  if (head_ == 0) return;
  for (auto& values : values_) {
    for (auto& value : values) {
      if (value.first < head_ && value.last >= head_) value.last = now_;
    }
  }
}

std::vector<std::pair<std::size_t, std::size_t>> LiveRanges::simultaneous() const {
  struct Entry {
    Value value;
    std::size_t buffer;
  };
  std::vector<Entry> entries;
  for (std::size_t buffer = 0; buffer < values_.size(); ++buffer) {
    for (const auto& value : values_[buffer]) entries.push_back({value, buffer});
  }
  std::sort(entries.begin(), entries.end(),
            [](const Entry& a, const Entry& b) { return a.value.first < b.value.first; });
  std::vector<std::pair<std::size_t, std::size_t>> pairs;
  std::vector<Entry> alive;
  for (const auto& entry : entries) {
    std::erase_if(alive, [&](const Entry& other) { return other.value.last < entry.value.first; });
    for (const auto& other : alive) {
      if (other.buffer != entry.buffer) pairs.push_back(std::minmax(other.buffer, entry.buffer));
    }
    alive.push_back(entry);
  }
  std::sort(pairs.begin(), pairs.end());
  pairs.erase(std::unique(pairs.begin(), pairs.end()), pairs.end());
  return pairs;
}

}  // namespace adaptrt
