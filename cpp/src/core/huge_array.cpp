#include "adaptrt/core/huge_array.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <limits>
#include <new>

namespace adaptrt {
namespace {

/// Huge pages of x86-64, and of AArch64 with pages of 4 KiB.
constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

std::size_t page_bytes() {
  static const auto bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

std::size_t rounded_up(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

/// Maps memory that begins at a huge page, if it is as large as one. Otherwise up to 2 MiB at its begin would
/// be small pages, which are several percent of an adapter. Throws std::bad_alloc.
std::byte* map_aligned(std::size_t bytes) {
  const std::size_t spare = bytes < kHugePageBytes ? 0 : kHugePageBytes;
  if (bytes > std::numeric_limits<std::size_t>::max() - spare - page_bytes()) throw std::bad_alloc();
  void* mapped = mmap(nullptr, bytes + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  auto* const begin = static_cast<std::byte*>(mapped);
  if (spare == 0) return begin;
  const std::size_t address = reinterpret_cast<std::uintptr_t>(begin);
  const std::size_t before = rounded_up(address, kHugePageBytes) - address;
  if (before > 0) munmap(begin, before);
  const std::size_t kept = before + rounded_up(bytes, page_bytes());
  const std::size_t end = rounded_up(bytes + spare, page_bytes());
  if (kept < end) munmap(begin + kept, end - kept);
  return begin + before;
}

}  // namespace

HugeArray::HugeArray(std::size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  data_ = map_aligned(bytes);
#ifdef MADV_HUGEPAGE
  madvise(data_, bytes, MADV_HUGEPAGE);  // only a hint: small pages work too
#endif
}

HugeArray::~HugeArray() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

void HugeArray::truncate(std::size_t bytes) noexcept {
  const std::size_t kept = rounded_up(bytes, page_bytes());
  if (kept >= bytes_) return;
  munmap(data_ + kept, bytes_ - kept);
  bytes_ = kept;
  if (kept == 0) data_ = nullptr;
}

void HugeArray::discard(std::size_t offset, std::size_t bytes) noexcept {
  const std::size_t begin = rounded_up(offset, page_bytes());
  const std::size_t end = (offset + bytes) / page_bytes() * page_bytes();
  if (begin >= end) return;
#ifdef MADV_NOHUGEPAGE
  // The system would otherwise fill the gap again when it makes huge pages. A part of the array would become
  // a mapping of its own, and a process may have only some 65,000 of them.
  madvise(data_, bytes_, MADV_NOHUGEPAGE);
#endif
  madvise(data_ + begin, end - begin, MADV_DONTNEED);
}

}  // namespace adaptrt
