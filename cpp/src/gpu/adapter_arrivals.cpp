#include "adaptrt/gpu/adapter_arrivals.h"

#include <algorithm>
#include <utility>

namespace adaptrt {

void AdapterArrival::add(std::int32_t position, std::unique_ptr<Event> copied, Stream& stream) {
  stream.record(*copied);
  parts_.push_back({position, std::move(copied)});
}

void AdapterArrival::await(std::int32_t position, Stream& stream) const {
  const auto after = std::ranges::upper_bound(parts_, position, {}, &Part::position);
  if (after != parts_.begin()) stream.wait(*std::prev(after)->copied);
}

void AdapterArrival::await_all(Stream& stream) const {
  stream.wait(*parts_.back().copied);
}

void AdapterArrival::synchronize() const {
  parts_.back().copied->synchronize();
}

void AdapterArrivals::add(std::uint64_t load_id, std::shared_ptr<const AdapterArrival> arrival) {
  const std::lock_guard lock(mutex_);
  arrivals_[load_id] = std::move(arrival);
}

void AdapterArrivals::remove(std::uint64_t load_id) noexcept {
  const std::lock_guard lock(mutex_);
  arrivals_.erase(load_id);
}

std::shared_ptr<const AdapterArrival> AdapterArrivals::find(std::uint64_t load_id) const {
  const std::lock_guard lock(mutex_);
  const auto found = arrivals_.find(load_id);
  return found == arrivals_.end() ? nullptr : found->second;
}

}  // namespace adaptrt
