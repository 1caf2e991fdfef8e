#include "adaptrt/gpu/adapter_arrivals.h"

#include <algorithm>
#include <utility>

namespace adaptrt {

void AdapterArrival::add(std::int32_t position, std::unique_ptr<Event> copied, Stream& stream) {
  stream.record(*copied);
  parts_.push_back({position, std::move(copied)});
}

void AdapterArrival::synchronize() const {
  {
    const std::lock_guard lock(mutex_);
    if (failure_) std::rethrow_exception(failure_);
  }
  try {
    if (!parts_.empty()) parts_.back().copied->synchronize();
  } catch (...) {
    const std::lock_guard lock(mutex_);
    failure_ = std::current_exception();
    throw;
  }
}

bool AdapterArrival::has_failed() const {
  const std::lock_guard lock(mutex_);
  return failure_ != nullptr;
}

void AdapterArrivals::add(std::uint64_t load_id, std::shared_ptr<const AdapterArrival> arrival) {
  const std::lock_guard lock(mutex_);
  arrivals_[load_id] = std::move(arrival);
}

void AdapterArrivals::remove(std::uint64_t load_id) noexcept {
  const std::lock_guard lock(mutex_);
  arrivals_.erase(load_id);
}

bool AdapterArrivals::is_empty() const {
  const std::lock_guard lock(mutex_);
  return arrivals_.empty();
}

std::shared_ptr<const AdapterArrival> AdapterArrivals::find(std::uint64_t load_id) const {
  const std::lock_guard lock(mutex_);
  const auto found = arrivals_.find(load_id);
  return found == arrivals_.end() ? nullptr : found->second;
}

void ArrivalWaits::await(std::int32_t position) {
  for (std::size_t i = 0; i < arrivals_.size(); ++i) {
    const auto parts = arrivals_[i]->parts();
    const auto after = std::ranges::upper_bound(parts, position, {}, &AdapterArrival::Part::position);
    await_parts(i, static_cast<std::size_t>(after - parts.begin()));
  }
}

void ArrivalWaits::await_all() {
  for (std::size_t i = 0; i < arrivals_.size(); ++i) await_parts(i, arrivals_[i]->parts().size());
}

void ArrivalWaits::await_parts(std::size_t arrival, std::size_t parts) {
  if (parts <= awaited_[arrival]) return;
  stream_.wait(*arrivals_[arrival]->parts()[parts - 1].copied);
  awaited_[arrival] = parts;
}

}  // namespace adaptrt
