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

/// Reads small parts of a file in several threads, because a disk is fast at small reads only if it has many
/// at a time. Only one thread may call it; that thread reads too.
class ParallelReader {
 public:
  /// Whole pages from `offset` on, into the next `num_places` places. The data for a place without memory is
  /// discarded.
  struct Read {
    std::size_t offset = 0;
    std::size_t first_place = 0;
    std::size_t num_places = 0;
  };

  /// `passed_over_bytes`: maximum size of a place without memory, in whole pages.
  ParallelReader(std::shared_ptr<WeightFile> file, int num_threads, std::size_t passed_over_bytes);
  ~ParallelReader();
  ParallelReader(const ParallelReader&) = delete;
  ParallelReader& operator=(const ParallelReader&) = delete;

  /// Returns when all reads are done. Throws StepError like WeightFile if one fails; the content of the
  /// places is then undefined.
  void read(std::span<const Read> reads, std::span<const MemoryPiece> places);

 private:
  void run(std::size_t thread);
  void take_reads(std::size_t thread);
  [[nodiscard]] std::span<const MemoryPiece> places_of(const Read& read, std::size_t thread);
  [[nodiscard]] bool has_reads() const { return next_ < reads_.size(); }

  std::shared_ptr<WeightFile> file_;
  std::size_t passed_over_bytes_;
  HugeArray passed_over_;  ///< scratch of each thread
  /// Memory places of each thread's current read.
  std::vector<std::vector<MemoryPiece>> own_places_;
  std::mutex mutex_;
  std::condition_variable changed_;
  // Changed under the mutex, while no thread works.
  std::span<const Read> reads_;
  std::span<const MemoryPiece> places_;
  std::atomic<std::size_t> next_ = 0;  ///< first of reads_ that no thread has claimed
  int at_work_ = 0;                    ///< threads that may claim one
  std::string error_;                  ///< empty if none
  bool stop_ = false;
  std::vector<std::thread> threads_;  // last member: everything that they use exists when they start
};

}  // namespace adaptrt
