#include "adaptrt/core/huge_array.h"

#include <sys/mman.h>
#include <unistd.h>

#include <new>

namespace adaptrt {
namespace {

std::size_t page_bytes() {
  static const auto bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

}  // namespace

HugeArray::HugeArray(std::size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  madvise(pages, bytes, MADV_HUGEPAGE);  // only a hint: small pages work too
#endif
  data_ = static_cast<std::byte*>(pages);
}

HugeArray::~HugeArray() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

void HugeArray::truncate(std::size_t bytes) noexcept {
  const std::size_t kept = (bytes + page_bytes() - 1) / page_bytes() * page_bytes();
  if (kept >= bytes_) return;
  munmap(data_ + kept, bytes_ - kept);
  bytes_ = kept;
  if (kept == 0) data_ = nullptr;
}

void HugeArray::discard(std::size_t offset, std::size_t bytes) noexcept {
  const std::size_t begin = (offset + page_bytes() - 1) / page_bytes() * page_bytes();
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
