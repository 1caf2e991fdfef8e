#include "kv_pool.h"

#include <new>
#include <string>

#include "adaptrt/core/error.h"

namespace adaptrt {

KvPool::KvPool(const Program& program)
    : dtype_(program.dtype),
      is_int8_(program.int8_kv_cache),
      heads_(program.shape.num_key_value_heads),
      head_dim_(program.shape.head_dim),
      tokens_per_block_(program.tokens_per_block),
      slots_(whole_groups(tokens_per_block_)),
      key_bytes_(static_cast<std::size_t>(head_dim_ * slots_) * element_bytes()),
      value_bytes_(static_cast<std::size_t>(whole_groups(head_dim_) * slots_) * element_bytes()),
      key_part_bytes_(key_bytes_ + scale_bytes(slots_)),
      head_bytes_(key_part_bytes_ + value_bytes_ + scale_bytes(slots_)),
      block_bytes_(static_cast<std::size_t>(program.num_layers * heads_) * head_bytes_),
      token_bytes_(static_cast<std::size_t>(2 * heads_) *
                   (static_cast<std::size_t>(head_dim_) * element_bytes() + scale_bytes(1))) {}

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
