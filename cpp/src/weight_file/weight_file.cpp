#include "adaptrt/weight_file/weight_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "adaptrt/core/error.h"

namespace adaptrt {
namespace {

/// Bytes of one system call: large enough to keep the disk busy.
constexpr std::size_t kBytesAtOnce = std::size_t{4} << 20;

/// Maximum number of memory places of one vectored read.
constexpr std::size_t kMostPlacesAtOnce = 64;

std::string text_of(int number) {
  return std::strerror(number);  // NOLINT(concurrency-mt-unsafe): glibc's is safe
}

/// Returns a negative number if the file system has no direct reads.
int open_direct(const std::string& path) {
#ifdef O_DIRECT
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
  if (file < 0) return -1;
  // The page is on the stack: an allocation could throw and leak the open file.
  alignas(kFilePage) std::array<std::byte, kFilePage> page;
  if (pread(file, page.data(), page.size(), 0) >= 0) return file;
  ::close(file);
#endif
  return -1;
}

}  // namespace

FilePages::FilePages(std::vector<FileRange> ranges) {
  std::ranges::sort(ranges, {}, &FileRange::offset);
  for (const FileRange& range : ranges) {
    if (range.bytes == 0) continue;
    const FileRange pages = pages_of(range);
    if (!pieces_.empty() && pages.offset <= pieces_.back().end()) {
      pieces_.back().bytes = std::max(pieces_.back().end(), pages.end()) - pieces_.back().offset;
    } else {
      pieces_.push_back(pages);
    }
  }
  for (const FileRange& piece : pieces_) {
    places_.push_back(bytes_);
    bytes_ += piece.bytes;
  }
}

std::size_t FilePages::place_of(std::size_t offset) const {
  const auto behind = std::ranges::upper_bound(pieces_, offset, {}, &FileRange::offset);
  const auto piece = static_cast<std::size_t>(behind - pieces_.begin()) - 1;
  return places_[piece] + offset - pieces_[piece].offset;
}

WeightFile::WeightFile(std::string path)
    : path_(std::move(path)), cached_(open(path_.c_str(), O_RDONLY | O_CLOEXEC)) {
  struct stat status{};
  if (cached_ < 0 || fstat(cached_, &status) != 0) {
    const int number = errno;
    if (cached_ >= 0) ::close(cached_);
    throw EngineError(path_ + ": cannot be read: " + text_of(number));
  }
  size_ = static_cast<std::size_t>(status.st_size);
  direct_ = open_direct(path_);
}

WeightFile::~WeightFile() {
  if (direct_ >= 0) ::close(direct_);
  ::close(cached_);
}

void WeightFile::read(const FilePages& pages, std::byte* memory) {
  for (std::size_t i = 0; i < pages.pieces().size(); ++i) {
    read_piece(pages.pieces()[i], memory + pages.place_of_piece(i));
  }
}

void WeightFile::read_spread(std::size_t offset, std::span<const MemoryPiece> places) {
  static_assert(kMostPlacesAtOnce <= 1024, "the system's own limit");
  std::array<iovec, kMostPlacesAtOnce> pieces;
  while (!places.empty()) {
    const auto now = places.first(std::min(places.size(), kMostPlacesAtOnce));
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < now.size(); ++i) {
      pieces[i] = {now[i].data, now[i].bytes};
      bytes += now[i].bytes;
    }
    const auto got = preadv(is_direct() ? direct_ : cached_, pieces.data(), static_cast<int>(now.size()),
                            static_cast<off_t>(offset));
    if (got >= 0 && static_cast<std::size_t>(got) == bytes) {
      bytes_read_ += bytes;
      offset += bytes;
    } else {  // interrupted or failed: these calls continue or throw
      for (const MemoryPiece& place : now) {
        read_piece({offset, place.bytes}, place.data);
        offset += place.bytes;
      }
    }
    places = places.subspan(now.size());
  }
}

void WeightFile::read_piece(FileRange piece, std::byte* memory) {
  const std::size_t end = std::min(piece.end(), size_);
  std::size_t at = piece.offset;
  int file = is_direct() ? direct_ : cached_;
  while (at < end) {
    const std::size_t wanted = std::min(piece.end() - at, kBytesAtOnce);
    const auto got = pread(file, memory + (at - piece.offset), wanted, static_cast<off_t>(at));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw StepError(path_ + ": weights cannot be read: " + text_of(errno));
    if (got == 0) {
      throw StepError(path_ + ": ends at byte " + std::to_string(at) + ", before weights that go to byte " +
                      std::to_string(end) + "; it was cut short while the engine runs");
    }
    at += static_cast<std::size_t>(got);
    bytes_read_ += static_cast<std::uint64_t>(got);
    // A read that continues within a page, after a signal or because the end of the file moved, cannot be a
    // direct read.
    if (at % kFilePage != 0) file = cached_;
  }
}

}  // namespace adaptrt
