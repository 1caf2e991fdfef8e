#include "adaptrt/weight_file/parallel_reader.h"

#include <utility>

#include "adaptrt/core/error.h"

namespace adaptrt {

ParallelReader::ParallelReader(std::shared_ptr<WeightFile> file, int num_threads) : file_(std::move(file)) {
  for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { run(); });
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
  take_reads();
  std::unique_lock lock(mutex_);
  --at_work_;
  changed_.wait(lock, [&] { return at_work_ == 0; });
  reads_ = {};
  if (!error_.empty()) throw StepError(error_);
}

void ParallelReader::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stop_ || has_reads(); });
    if (stop_) return;
    ++at_work_;
    lock.unlock();
    take_reads();
    lock.lock();
    if (--at_work_ == 0) changed_.notify_all();
  }
}

void ParallelReader::take_reads() {
  for (std::size_t at = next_++; at < reads_.size(); at = next_++) {
    const Read& read = reads_[at];
    try {
      file_->read_spread(read.offset, places_.subspan(read.first_place, read.num_places));
    } catch (const std::exception& reason) {
      const std::lock_guard lock(mutex_);
      if (error_.empty()) error_ = reason.what();
      next_ = reads_.size();
    }
  }
}

}  // namespace adaptrt
