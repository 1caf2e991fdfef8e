#include "adaptrt/core/huge_array.h"

#include <sys/mman.h>

#include <new>

namespace adaptrt {

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

}  // namespace adaptrt
