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

/// Page size in bytes: reads begin and end at multiples of it, and the memory that they fill is aligned to
/// it.
inline constexpr std::size_t kFilePage = 4096;

/// The whole pages of a file around a range.
[[nodiscard]] constexpr FileRange pages_of(FileRange range) {
  const std::size_t begin = range.offset / kFilePage * kFilePage;
  return {begin, (range.end() + kFilePage - 1) / kFilePage * kFilePage - begin};
}

/// Ranges of a file in memory, each with the whole pages around it; those that share a page are in one piece.
class FilePages {
 public:
  FilePages() = default;
  explicit FilePages(std::vector<FileRange> ranges);

  /// Bytes of the memory that holds the pages.
  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  /// Whole pages, in ascending order.
  [[nodiscard]] const std::vector<FileRange>& pieces() const { return pieces_; }
  /// Where in the memory a piece begins.
  [[nodiscard]] std::size_t place_of_piece(std::size_t piece) const { return places_[piece]; }
  /// Where in the memory a byte of one of the ranges lies.
  [[nodiscard]] std::size_t place_of(std::size_t offset) const;

 private:
  std::vector<FileRange> pieces_;
  std::vector<std::size_t> places_;
  std::size_t bytes_ = 0;
};

/// Bytes of memory that a part of a read goes to.
struct MemoryPiece {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};

/// An engine file whose weights are read while the engine runs. Reads go past the system's cache of files
/// where the file system can do that, so that what is read once a step drives nothing else out of memory. Any
/// number of threads.
class WeightFile {
 public:
  /// Throws EngineError with the path and the reason when it cannot be opened.
  explicit WeightFile(std::string path);
  ~WeightFile();
  WeightFile(const WeightFile&) = delete;
  WeightFile& operator=(const WeightFile&) = delete;

  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] bool is_direct() const { return direct_ >= 0; }
  /// Number of bytes that all reads have read so far.
  [[nodiscard]] std::uint64_t bytes_read() const { return bytes_read_; }

  /// Fills `memory`, which begins at a page, with all of `pages`. Throws StepError with the path and the
  /// reason: an error of the disk, or a file that ends before.
  void read(const FilePages& pages, std::byte* memory);
  /// Whole pages of the file from `offset` on, one request for all of them: spread over these places, which
  /// begin at pages and have whole ones. Throws as read.
  void read_spread(std::size_t offset, std::span<const MemoryPiece> places);

 private:
  void read_piece(FileRange piece, std::byte* memory);

  std::string path_;
  int cached_ = -1;
  int direct_ = -1;  ///< negative: the file system has no such reads
  std::size_t size_ = 0;
  std::atomic<std::uint64_t> bytes_read_ = 0;
};

}  // namespace adaptrt
