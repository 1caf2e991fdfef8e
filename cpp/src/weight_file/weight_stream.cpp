#include "adaptrt/weight_file/weight_stream.h"

#include <utility>

#include "adaptrt/core/error.h"

namespace adaptrt {

WeightStream::WeightStream(std::shared_ptr<WeightFile> file, std::vector<FilePages> units,
                           std::size_t ring_bytes, std::size_t first_again)
    : file_(std::move(file)), first_again_(first_again), ring_(ring_bytes) {
  std::size_t place = 0;
  for (FilePages& pages : units) {
    if (place + pages.bytes() > ring_bytes) place = 0;
    const std::size_t bytes = pages.bytes();
    units_.push_back({std::move(pages), place});
    place += bytes;
  }
  thread_ = std::thread([this] { run(); });
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
  if ((count_ > 0 ? first_ : next_) != unit) {
    ++turn_;
    count_ = 0;
    next_ = unit;
  }
  error_.clear();
  changed_.notify_all();
  changed_.wait(lock, [&] { return count_ > 0 || !error_.empty(); });
  if (count_ == 0) throw StepError(error_);
  return Held(this);
}

void WeightStream::release() {
  {
    const std::lock_guard lock(mutex_);
    first_ = after(first_);
    --count_;
  }
  changed_.notify_all();
}

bool WeightStream::has_room() const {
  const Unit& wanted = units_[next_];
  std::size_t unit = first_;
  for (std::size_t i = 0; i < count_; ++i, unit = after(unit)) {
    const Unit& there = units_[unit];
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
    if (count_ == 0) first_ = unit;
    ++count_;
    next_ = after(unit);
  }
  changed_.notify_all();
}

}  // namespace adaptrt
