#include "adaptrt/lora/shared_matrices.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "adaptrt/core/checksum.h"
#include "image_sizes.h"

namespace adaptrt {

SharedMatrix::SharedMatrix(std::shared_ptr<SharedMatrices> matrices, std::shared_ptr<PackedMemory> memory,
                           std::span<const std::byte> bytes, std::uint64_t checksum)
    : matrices_(std::move(matrices)), memory_(std::move(memory)), bytes_(bytes), checksum_(checksum) {}

SharedMatrix::~SharedMatrix() {
  matrices_->forget(*this);
  // Other matrices may keep the memory. Without them it is freed as a whole, which is faster.
  if (memory_->is_lent) {
    memory_->array.discard(static_cast<std::size_t>(bytes_.data() - memory_->array.data()), bytes_.size());
  }
}

std::size_t SharedMatrix::memory_bytes() const {
  return aligned_bytes(bytes_.size());
}

std::shared_ptr<SharedMatrix> SharedMatrices::find_or_add(const std::shared_ptr<PackedMemory>& memory,
                                                          std::span<const std::byte> bytes) {
  const std::uint64_t checksum = checksum_of(bytes);
  // Destroyed after the lock is released: the destructor of the last reference takes it.
  std::vector<std::shared_ptr<SharedMatrix>> others;
  const std::lock_guard lock(mutex_);
  const auto [first, last] = by_checksum_.equal_range(checksum);
  for (auto known = first; known != last; ++known) {
    std::shared_ptr<SharedMatrix> matrix = known->second.lock();
    if (matrix == nullptr) continue;
    if (matrix->bytes_.size() == bytes.size() &&
        std::memcmp(matrix->bytes_.data(), bytes.data(), bytes.size()) == 0) {
      if (matrix->memory_ != memory) matrix->memory_->is_lent = true;
      return matrix;
    }
    others.push_back(std::move(matrix));
  }
  auto added = std::make_shared<SharedMatrix>(shared_from_this(), memory, bytes, checksum);
  try {
    by_checksum_.emplace(checksum, added);
  } catch (...) {
    others.push_back(std::move(added));
    throw;
  }
  return added;
}

std::size_t SharedMatrices::count() const {
  const std::lock_guard lock(mutex_);
  return by_checksum_.size();
}

void SharedMatrices::forget(const SharedMatrix& matrix) noexcept {
  const std::lock_guard lock(mutex_);
  const auto [first, last] = by_checksum_.equal_range(matrix.checksum_);
  const auto found = std::find_if(first, last, [](const auto& known) { return known.second.expired(); });
  // Any expired one may go: each has a destructor that removes one.
  if (found != last) by_checksum_.erase(found);
}

}  // namespace adaptrt
