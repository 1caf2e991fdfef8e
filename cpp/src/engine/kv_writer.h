#pragma once

#include <cstddef>
#include <cstdint>

#include "adaptrt/kernels/kernel_table.h"
#include "kv_pool.h"

namespace adaptrt {

/// Where a token's keys and values of one head go.
struct KvSlot {
  std::int32_t block = 0;
  std::int64_t layer = 0;
  std::int64_t head = 0;
  std::int64_t slot = 0;
};

/// Rounds a token's key and value [head_dim] of one head to the pool's type, int8 with a scale of their own
/// each, and stores them. A value that is not finite is stored as 0 and its key as NaN: the queries that see
/// the token get NaN, and no others. `scratch` has room for head_dim floats.
void store_key_and_value(const KvPool& pool, const KernelTable& kernels, const KvSlot& where,
                         const float* key, const float* value, float* scratch);

}  // namespace adaptrt
