#include "adaptrt/weight_file/weight_stream.h"

#include <utility>

#include "adaptrt/core/error.h"

namespace adaptrt {

WeightStream::WeightStream(std::shared_ptr<WeightFile> file, std::vector<Unit> units, std::size_t ring_bytes,
                           std::size_t first_again)
    : file_(std::move(file)), first_again_(first_again), ring_(ring_bytes) {
  place_units(std::move(units));
  if (!units_[next_].is_expected) next_ = after(next_);
  thread_ = std::thread([this] { run(); });
}

/// Places units one after another; expected units are placed as if there were no others.
void WeightStream::place_units(std::vector<Unit> units) {
  std::size_t place = 0;
  std::size_t place_of_unexpected = 0;
  for (Unit& unit : units) {
    std::size_t& at = unit.is_unexpected ? place_of_unexpected : place;
    const std::size_t bytes = unit.pages.bytes();
    if (at + bytes > ring_.bytes()) at = 0;
    units_.push_back({std::move(unit.pages), at, !unit.is_unexpected});
    at += bytes;
  }
}

WeightStream::~WeightStream() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

const std::byte* WeightStream::address_of(std::size_t unit, std::size_t offset) const {
  return ring_.data() + units_[unit].place + units_[unit].pages.place_of(offset);
}

WeightStream::Held WeightStream::hold(std::size_t unit) {
  std::unique_lock lock(mutex_);
  while (!there_.empty() && there_.front() != unit) there_.pop_front();
  if (there_.empty() && next_ != unit) {
    ++turn_;
    next_ = unit;
  }
  error_.clear();
  changed_.notify_all();
  changed_.wait(lock, [&] { return !there_.empty() || !error_.empty(); });
  if (there_.empty()) throw StepError(error_);
  return Held(this);
}

void WeightStream::expect(std::size_t unit, bool is_expected) {
  const std::lock_guard lock(mutex_);
  units_[unit].is_expected = is_expected;
}

void WeightStream::release() {
  {
    const std::lock_guard lock(mutex_);
    there_.pop_front();
  }
  changed_.notify_all();
}

std::size_t WeightStream::after(std::size_t unit) const {
  std::size_t next = unit;
  for (std::size_t passed = 0; passed < units_.size(); ++passed) {
    next = next + 1 == units_.size() ? first_again_ : next + 1;
    if (units_[next].is_expected) return next;
  }
  return unit;
}

bool WeightStream::has_room() const {
  const Placed& wanted = units_[next_];
  for (const std::size_t unit : there_) {
    const Placed& there = units_[unit];
    if (there.place < wanted.place + wanted.pages.bytes() &&
        wanted.place < there.place + there.pages.bytes()) {
      return false;
    }
  }
  return true;
}

void WeightStream::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stop_ || (error_.empty() && has_room()); });
    if (stop_) return;
    read(lock);
  }
}

void WeightStream::read(std::unique_lock<std::mutex>& lock) {
  const std::size_t unit = next_;
  const std::uint64_t turn = turn_;
  std::string error;
  lock.unlock();
  try {
    file_->read(units_[unit].pages, ring_.data() + units_[unit].place);
  } catch (const std::exception& reason) {
    error = reason.what();
  }
  lock.lock();
  if (turn != turn_) return;
  if (!error.empty()) {
    error_ = std::move(error);
  } else {
    there_.push_back(unit);
    next_ = after(unit);
  }
  changed_.notify_all();
}

}  // namespace adaptrt
