#include "ops/kv_writer.h"

#include <cmath>
#include <cstring>
#include <limits>
namespace adaptrt {
namespace {

/// All ones are NaN in every floating-point type.
constexpr int kNanByte = 0xff;

template <std::size_t kBytes>
void scatter(const std::byte* from, std::int64_t n, std::byte* to, std::size_t stride) {
  for (std::int64_t i = 0; i < n; ++i, from += kBytes, to += stride) std::memcpy(to, from, kBytes);
}

/// Copies n consecutive pieces of `bytes` bytes to places `stride` bytes apart.
void scatter(const std::byte* from, std::int64_t n, std::size_t bytes, std::byte* to, std::size_t stride) {
  if (bytes == 1) {
    scatter<1>(from, n, to, stride);
  } else if (bytes == 2) {
    scatter<2>(from, n, to, stride);
  } else {
    scatter<4>(from, n, to, stride);
  }
}

}  // namespace

KvWriter::KvWriter(const KvPool& pool, const KvLayer& layer, const KernelTable& kernels, float* scratch)
    : pool_(pool), layer_(layer), kernels_(kernels), row_(reinterpret_cast<std::byte*>(scratch)) {}

void KvWriter::store_keys(const KvSlot& where, HeadRotation rotation) const {
  rotation.out = row_;
  rotation.out_type = pool_.is_int8() ? DType::kFloat32 : pool_.dtype();
  kernels_.rotate_heads(rotation);
  const auto head_bytes = static_cast<std::size_t>(layer_.head_dim) * size_of(rotation.out_type);
  for (std::int64_t head = 0; head < layer_.heads; ++head) {
    const KvPart keys = pool_.keys(where.block, layer_, head);
    std::byte* key = row_ + static_cast<std::size_t>(head) * head_bytes;
    // The integers may overwrite the floats from which they are rounded.
    if (pool_.is_int8()) keys.scales[where.slot] = quantize(reinterpret_cast<const float*>(key), key);
    write_key(keys, where.slot, key);
  }
}

void KvWriter::store_keys_as_values(const KvSlot& where, const HeadRotation& rotation) const {
  store_keys(where, rotation);
  if (!is_finite(rotation.x)) poison_key(where, 0);
}

void KvWriter::store_values(const KvSlot& where, const float* values) const {
  for (std::int64_t head = 0; head < layer_.heads; ++head) {
    store_value(where, head, values + head * layer_.head_dim);
  }
}

void KvWriter::store_values_of_two(const KvSlot& where, const float* first, const float* second) const {
  const bool as_pairs = !pool_.is_int8() && pool_.interleave() == 2;
  for (std::int64_t head = 0; head < layer_.heads;
       ++head, first += layer_.head_dim, second += layer_.head_dim) {
    const KvPart part = pool_.values(where.block, layer_, head);
    if (as_pairs &&
        kernels_.store_bfloat16_pairs(first, second, layer_.head_dim, value_row(part, where.slot))) {
      continue;
    }
    store_value(where, head, first);
    store_value({where.block, where.slot + 1}, head, second);
  }
}

bool KvWriter::is_finite(const float* row) const {
  return kernels_.are_finite(row, layer_.head_dim, pool_.dtype());
}

void KvWriter::store_value(const KvSlot& where, std::int64_t head, const float* value) const {
  const KvPart part = pool_.values(where.block, layer_, head);
  bool finite = false;
  if (pool_.is_int8()) {
    const float scale = quantize(value, row_);
    finite = std::isfinite(scale);
    part.scales[where.slot] = finite ? scale : 0.0F;
  } else {
    finite = is_finite(value);
    if (finite) {
      kernels_.scale_and_store(value, 1.0F, layer_.head_dim, row_, pool_.dtype());
    } else {
      std::memset(row_, 0, static_cast<std::size_t>(layer_.head_dim) * pool_.element_bytes());
    }
  }
  const std::size_t size = pool_.element_bytes();
  scatter(row_, layer_.head_dim, size,
          value_row(part, where.slot) + static_cast<std::size_t>(where.slot % pool_.interleave()) * size,
          static_cast<std::size_t>(pool_.interleave()) * size);
  if (!finite) poison_key(where, head);
}

void KvWriter::poison_key(const KvSlot& where, std::int64_t head) const {
  const KvPart keys = pool_.keys(where.block, layer_, head);
  if (pool_.is_int8()) {
    keys.scales[where.slot] = std::numeric_limits<float>::quiet_NaN();
  } else {
    std::memset(row_, kNanByte, static_cast<std::size_t>(layer_.head_dim) * pool_.element_bytes());
    write_key(keys, where.slot, row_);
  }
}

float KvWriter::quantize(const float* x, std::byte* out) const {
  constexpr std::byte kSign{0x80};
  float scale = 0.0F;
  kernels_.quantize_row(reinterpret_cast<const std::byte*>(x), DType::kFloat32, layer_.head_dim,
                        reinterpret_cast<std::uint8_t*>(out), &scale);
  for (std::int64_t i = 0; i < layer_.head_dim; ++i) out[i] ^= kSign;
  return scale;
}

void KvWriter::write_key(const KvPart& keys, std::int64_t slot, const std::byte* key) const {
  const auto group = static_cast<std::size_t>(pool_.interleave()) * pool_.element_bytes();
  scatter(key, layer_.head_dim / pool_.interleave(), group,
          keys.elements + static_cast<std::size_t>(slot) * group,
          static_cast<std::size_t>(pool_.slots()) * group);
}

std::byte* KvWriter::value_row(const KvPart& values, std::int64_t slot) const {
  const std::int64_t first = slot / pool_.interleave() * pool_.interleave() * whole_groups(layer_.head_dim);
  return values.elements + static_cast<std::size_t>(first) * pool_.element_bytes();
}

}  // namespace adaptrt
