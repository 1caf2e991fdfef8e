#pragma once

#include <sys/stat.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <span>
#include <string>

namespace adaptrt {

/// A mapped file that another process may change while its pages are read. If the file is truncated, reading
/// a lost page would end this process with SIGBUS. Instead, lost pages read as zeros, and check() throws.
///
/// It installs a SIGBUS handler for the process. Faults outside these mappings go to the previous handler.
/// Any thread may read and check.
class MappedFile {
 public:
  /// `mapping`: whole pages that the caller has mapped from the file at `path`, and that outlive this object.
  /// `interval`: minimum time between two checks of the file's size and modification time. Throws EngineError
  /// if the file cannot be opened, ConfigError if there are too many mappings.
  MappedFile(std::span<const std::byte> mapping, std::string path,
             std::chrono::nanoseconds interval = std::chrono::seconds(1));
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  MappedFile(MappedFile&&) = delete;
  MappedFile& operator=(MappedFile&&) = delete;

  /// Throws EngineError if pages were lost, or if the file was written since it was opened here. The latter
  /// is checked at most once per interval.
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
