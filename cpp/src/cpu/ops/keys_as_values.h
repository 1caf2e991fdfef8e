#pragma once

#include <cstdint>
#include <span>

#include "adaptrt/cpu/attention_tile.h"
#include "kv_pool.h"

namespace adaptrt {

/// Sets the `values` of a tile's groups to their keys, rearranged in `scratch` into the layout of values. The
/// pool stores such keys only once. Elements that are not finite become 0, as in stored values.
///
/// scratch: tile_scratch_floats(head_dim) floats, aligned to 64 bytes.
void make_values_of_keys(const KvPool& pool, std::int64_t head_dim, std::span<KeyGroup> groups,
                         float* scratch);

}  // namespace adaptrt
