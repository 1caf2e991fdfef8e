#include "kv_pool.h"

#include <new>
#include <string>

#include "adaptrt/core/error.h"

namespace adaptrt {

void KvPool::allocate(std::int32_t num_blocks) {
  if (num_blocks_ != 0) throw ConfigError("the KV pool was allocated before");
  if (num_blocks < 1)
    throw ConfigError("the KV pool needs at least one block, not " + std::to_string(num_blocks));
  std::size_t bytes = 0;
  const bool overflow = __builtin_mul_overflow(block_bytes_, static_cast<std::size_t>(num_blocks), &bytes);
  try {
    if (overflow) throw std::bad_alloc();
    memory_ = HugeArray(bytes);
  } catch (const std::bad_alloc&) {
    throw ConfigError("no memory for a KV pool of " + std::to_string(num_blocks) + " blocks of " +
                      std::to_string(block_bytes_) + " bytes");
  }
  num_blocks_ = num_blocks;
}

}  // namespace adaptrt
