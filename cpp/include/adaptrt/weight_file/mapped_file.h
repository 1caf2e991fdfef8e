#pragma once

#include <sys/stat.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <span>
#include <string>

namespace adaptrt {

/// A mapped file that another process may change while its pages are read. Where the file is cut, a read of a
/// lost page would end this process by SIGBUS: instead, lost pages read as zero, and check() throws.
///
/// It installs a handler of SIGBUS for the process. Faults outside of these mappings go to the handler that
/// was there before. Any thread may read, and check.
class MappedFile {
 public:
  /// `mapping`: whole pages that the caller has mapped from the file at `path`, and keeps mapped for longer.
  /// `interval`: time between two looks at the file's size and time. Throws EngineError where the file cannot
  /// be opened, ConfigError where there are too many mappings.
  MappedFile(std::span<const std::byte> mapping, std::string path,
             std::chrono::nanoseconds interval = std::chrono::seconds(1));
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  MappedFile(MappedFile&&) = delete;
  MappedFile& operator=(MappedFile&&) = delete;

  /// Throws EngineError if pages were lost, and if the file was written since it was opened here. The latter
  /// is looked at once in an interval.
  void check();

 private:
  [[nodiscard]] struct stat status() const;

  std::string path_;
  std::chrono::nanoseconds interval_;
  int descriptor_;
  struct stat first_{};
  std::atomic<std::chrono::steady_clock::time_point> next_look_;
  std::size_t slot_;
};

}  // namespace adaptrt
