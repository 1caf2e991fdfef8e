#pragma once

#include <cstddef>
#include <cstdint>

#include "adaptrt/cpu/kernel_table.h"
#include "kv_pool.h"

namespace adaptrt {

/// Place of a token's keys and values.
struct KvSlot {
  std::int32_t block = 0;
  std::int64_t slot = 0;
};

/// Stores the keys and values of a layer's tokens. In int8 each head of a token has a scale.
///
/// A value that is not finite is stored as 0, and its key as NaN. So only queries that attend to the token
/// get NaN.
class KvWriter {
 public:
  /// `scratch` must have room for the keys of a token.
  KvWriter(const KvPool& pool, const KvLayer& layer, const KernelTable& kernels, float* scratch);

  /// Stores the keys that `rotation` computes. Its `out` and `out_type` are ignored.
  void store_keys(const KvSlot& where, HeadRotation rotation) const;
  /// Stores keys that are also values. A key that is not finite is stored as NaN.
  void store_keys_as_values(const KvSlot& where, const HeadRotation& rotation) const;
  /// Stores values [heads, head_dim]. Call it after the keys of that slot are stored.
  void store_values(const KvSlot& where, const float* values) const;
  /// The same for two slots of a block; the first has an even number.
  void store_values_of_two(const KvSlot& where, const float* first, const float* second) const;

 private:
  [[nodiscard]] bool is_finite(const float* row) const;
  void store_value(const KvSlot& where, std::int64_t head, const float* value) const;
  /// Makes a stored key NaN.
  void poison_key(const KvSlot& where, std::int64_t head) const;
  /// Fills `out`, which may be x, with int8 and returns their scale; NaN for a row that is not finite.
  [[nodiscard]] float quantize(const float* x, std::byte* out) const;
  void write_key(const KvPart& keys, std::int64_t slot, const std::byte* key) const;
  /// Address of the values of a slot, or of the pair of slots that contains it.
  [[nodiscard]] std::byte* value_row(const KvPart& values, std::int64_t slot) const;

  const KvPool& pool_;
  const KvLayer& layer_;
  const KernelTable& kernels_;
  std::byte* row_;
};

}  // namespace adaptrt
