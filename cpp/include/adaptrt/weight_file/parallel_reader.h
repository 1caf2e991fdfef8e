#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "adaptrt/core/huge_array.h"
#include "adaptrt/weight_file/weight_file.h"

namespace adaptrt {

/// Threads that read small parts of a file side by side, which is what makes a disk fast at them. For one
/// caller at a time, which reads as well.
class ParallelReader {
 public:
  /// Whole pages from `offset` on, to `num_places` places. What comes to one without memory is not kept.
  struct Read {
    std::size_t offset = 0;
    std::size_t first_place = 0;
    std::size_t num_places = 0;
  };

  /// `passed_over_bytes`: whole pages, the most that a place without memory has.
  ParallelReader(std::shared_ptr<WeightFile> file, int num_threads, std::size_t passed_over_bytes);
  ~ParallelReader();
  ParallelReader(const ParallelReader&) = delete;
  ParallelReader& operator=(const ParallelReader&) = delete;

  /// Returns when all are read. Throws StepError as WeightFile when one of them cannot be; what the places
  /// hold is not said then.
  void read(std::span<const Read> reads, std::span<const MemoryPiece> places);

 private:
  void run(std::size_t thread);
  void take_reads(std::size_t thread);
  [[nodiscard]] std::span<const MemoryPiece> places_of(const Read& read, std::size_t thread);
  [[nodiscard]] bool has_reads() const { return next_ < reads_.size(); }

  std::shared_ptr<WeightFile> file_;
  std::size_t passed_over_bytes_;
  HugeArray passed_over_;  ///< of each thread
  /// Places of each thread's read.
  std::vector<std::vector<MemoryPiece>> own_places_;
  std::mutex mutex_;
  std::condition_variable changed_;
  // These change under the mutex, while no thread is at work.
  std::span<const Read> reads_;
  std::span<const MemoryPiece> places_;
  std::atomic<std::size_t> next_ = 0;  ///< the first of reads_ that no thread has taken
  int at_work_ = 0;                    ///< threads that may take one
  std::string error_;                  ///< empty: none so far
  bool stop_ = false;
  std::vector<std::thread> threads_;  // the last member: everything they use is there when they start
};

}  // namespace adaptrt
