#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace adaptrt {

/// Bytes [offset, offset + bytes) of a file.
struct FileRange {
  std::size_t offset = 0;
  std::size_t bytes = 0;

  [[nodiscard]] constexpr std::size_t end() const { return offset + bytes; }
  bool operator==(const FileRange&) const = default;
};

/// Page size in bytes. Reads begin and end at multiples of it, and their memory is aligned to it.
inline constexpr std::size_t kFilePage = 4096;

/// Returns the smallest range of whole pages that contains `range`.
[[nodiscard]] constexpr FileRange pages_of(FileRange range) {
  const std::size_t begin = range.offset / kFilePage * kFilePage;
  return {begin, (range.end() + kFilePage - 1) / kFilePage * kFilePage - begin};
}

/// File ranges in memory, each extended to whole pages; ranges that share a page are merged into one piece.
class FilePages {
 public:
  FilePages() = default;
  explicit FilePages(std::vector<FileRange> ranges);

  /// Bytes of the memory that holds the pages.
  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  /// Whole pages, in ascending order.
  [[nodiscard]] const std::vector<FileRange>& pieces() const { return pieces_; }
  /// Offset in the memory at which a piece begins.
  [[nodiscard]] std::size_t place_of_piece(std::size_t piece) const { return places_[piece]; }
  /// Offset in the memory of a byte of one of the ranges.
  [[nodiscard]] std::size_t place_of(std::size_t offset) const;

 private:
  std::vector<FileRange> pieces_;
  std::vector<std::size_t> places_;
  std::size_t bytes_ = 0;
};

/// Memory for a part of a read.
struct MemoryPiece {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};

/// An engine file whose weights are read while the engine runs. Reads bypass the system's page cache if the
/// file system allows it, so that weights read once per step evict nothing else. Thread-safe.
class WeightFile {
 public:
  /// Throws EngineError with the path and the reason if it cannot be opened.
  explicit WeightFile(std::string path);
  ~WeightFile();
  WeightFile(const WeightFile&) = delete;
  WeightFile& operator=(const WeightFile&) = delete;

  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] bool is_direct() const { return direct_ >= 0; }
  /// Number of bytes that all reads have read so far.
  [[nodiscard]] std::uint64_t bytes_read() const { return bytes_read_; }

  /// Reads all of `pages` into `memory`, which is page-aligned. Throws StepError with the path and the
  /// reason: a disk error, or a file that is too short.
  void read(const FilePages& pages, std::byte* memory);
  /// Reads whole pages from `offset` on with one request, spread over `places`, which are page-aligned and
  /// whole pages. Throws the errors of read().
  void read_spread(std::size_t offset, std::span<const MemoryPiece> places);

 private:
  void read_piece(FileRange piece, std::byte* memory);

  std::string path_;
  int cached_ = -1;
  int direct_ = -1;  ///< negative if the file system has no direct reads
  std::size_t size_ = 0;
  std::atomic<std::uint64_t> bytes_read_ = 0;
};

}  // namespace adaptrt
