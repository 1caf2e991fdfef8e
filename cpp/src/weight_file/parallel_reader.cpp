#include "adaptrt/weight_file/parallel_reader.h"

#include <utility>

#include "adaptrt/core/error.h"

namespace adaptrt {

ParallelReader::ParallelReader(std::shared_ptr<WeightFile> file, int num_threads,
                               std::size_t passed_over_bytes)
    : file_(std::move(file)),
      passed_over_bytes_(passed_over_bytes),
      passed_over_((static_cast<std::size_t>(num_threads) + 1) * passed_over_bytes),
      own_places_(static_cast<std::size_t>(num_threads) + 1) {
  // The caller is thread 0.
  for (std::size_t thread = 1; thread < own_places_.size(); ++thread) {
    threads_.emplace_back([this, thread] { run(thread); });
  }
}

ParallelReader::~ParallelReader() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ParallelReader::read(std::span<const Read> reads, std::span<const MemoryPiece> places) {
  if (reads.empty()) return;
  {
    const std::lock_guard lock(mutex_);
    reads_ = reads;
    places_ = places;
    next_ = 0;
    error_.clear();
    ++at_work_;
  }
  if (reads.size() > 1) changed_.notify_all();
  take_reads(0);
  std::unique_lock lock(mutex_);
  --at_work_;
  changed_.wait(lock, [&] { return at_work_ == 0; });
  reads_ = {};
  if (!error_.empty()) throw StepError(error_);
}

void ParallelReader::run(std::size_t thread) {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stop_ || has_reads(); });
    if (stop_) return;
    ++at_work_;
    lock.unlock();
    take_reads(thread);
    lock.lock();
    if (--at_work_ == 0) changed_.notify_all();
  }
}

void ParallelReader::take_reads(std::size_t thread) {
  for (std::size_t at = next_++; at < reads_.size(); at = next_++) {
    const Read& read = reads_[at];
    try {
      file_->read_spread(read.offset, places_of(read, thread));
    } catch (const std::exception& reason) {
      const std::lock_guard lock(mutex_);
      if (error_.empty()) error_ = reason.what();
      next_ = reads_.size();
    }
  }
}

std::span<const MemoryPiece> ParallelReader::places_of(const Read& read, std::size_t thread) {
  const auto places = places_.subspan(read.first_place, read.num_places);
  std::vector<MemoryPiece>& own = own_places_[thread];
  own.assign(places.begin(), places.end());
  for (MemoryPiece& place : own) {
    if (place.data == nullptr) place.data = passed_over_.data() + thread * passed_over_bytes_;
  }
  return own;
}

}  // namespace adaptrt
