#include "kv_writer.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "adaptrt/core/element_scan.h"

namespace adaptrt {
namespace {

/// All ones are NaN in every floating-point type.
constexpr int kNanByte = 0xff;

bool all_finite(const std::byte* elements, DType dtype, std::int64_t n) {
  return !find_not_finite(elements, dtype, static_cast<std::size_t>(n), dtype);
}

template <std::size_t kBytes>
void scatter(const std::byte* from, std::int64_t n, std::byte* to, std::size_t stride) {
  for (std::int64_t i = 0; i < n; ++i, from += kBytes, to += stride) std::memcpy(to, from, kBytes);
}

/// Copies n pieces of `bytes`, one after another, to places `stride` bytes apart.
void scatter(const std::byte* from, std::int64_t n, std::size_t bytes, std::byte* to, std::size_t stride) {
  if (bytes == 1) {
    scatter<1>(from, n, to, stride);
  } else if (bytes == 2) {
    scatter<2>(from, n, to, stride);
  } else {
    scatter<4>(from, n, to, stride);
  }
}

class Writer {
 public:
  Writer(const KvPool& pool, const KernelTable& kernels, const KvSlot& where, std::byte* scratch)
      : pool_(pool),
        kernels_(kernels),
        slot_(where.slot),
        keys_(pool.keys(where.block, where.layer, where.head)),
        values_(pool.values(where.block, where.layer, where.head)),
        row_(scratch) {}

  void store_rounded(const float* key, const float* value) const {
    const auto bytes = static_cast<std::size_t>(pool_.head_dim()) * pool_.element_bytes();
    kernels_.scale_and_store(value, 1.0F, pool_.head_dim(), row_, pool_.dtype());
    const bool finite = all_finite(row_, pool_.dtype(), pool_.head_dim());
    if (!finite) std::memset(row_, 0, bytes);
    write_value();
    kernels_.scale_and_store(key, 1.0F, pool_.head_dim(), row_, pool_.dtype());
    if (!finite) std::memset(row_, kNanByte, bytes);
    write_key();
  }

  void store_quantized(const float* key, const float* value) const {
    float scale = quantize(value);
    const bool finite = std::isfinite(scale);
    values_.scales[slot_] = finite ? scale : 0.0F;
    write_value();
    scale = quantize(key);
    keys_.scales[slot_] = finite ? scale : std::numeric_limits<float>::quiet_NaN();
    write_key();
  }

 private:
  /// Fills row_ with int8 and returns their scale; NaN for a row that is not finite.
  [[nodiscard]] float quantize(const float* x) const {
    constexpr std::byte kSign{0x80};
    float scale = 0.0F;
    kernels_.quantize_row(reinterpret_cast<const std::byte*>(x), DType::kFloat32, pool_.head_dim(),
                          reinterpret_cast<std::uint8_t*>(row_), &scale);
    for (std::int64_t i = 0; i < pool_.head_dim(); ++i) row_[i] ^= kSign;
    return scale;
  }

  void write_key() const {
    const auto group = static_cast<std::size_t>(pool_.interleave()) * pool_.element_bytes();
    scatter(row_, pool_.head_dim() / pool_.interleave(), group,
            keys_.elements + static_cast<std::size_t>(slot_) * group,
            static_cast<std::size_t>(pool_.slots()) * group);
  }

  void write_value() const {
    const std::size_t size = pool_.element_bytes();
    const std::int64_t row = slot_ / pool_.interleave() * whole_groups(pool_.head_dim());
    const std::int64_t first = row * pool_.interleave() + slot_ % pool_.interleave();
    scatter(row_, pool_.head_dim(), size, values_.elements + static_cast<std::size_t>(first) * size,
            static_cast<std::size_t>(pool_.interleave()) * size);
  }

  const KvPool& pool_;
  const KernelTable& kernels_;
  std::int64_t slot_;
  KvPart keys_;
  KvPart values_;
  std::byte* row_;
};

}  // namespace

void store_key_and_value(const KvPool& pool, const KernelTable& kernels, const KvSlot& where,
                         const float* key, const float* value, float* scratch) {
  const Writer writer(pool, kernels, where, reinterpret_cast<std::byte*>(scratch));
  if (pool.is_int8()) {
    writer.store_quantized(key, value);
  } else {
    writer.store_rounded(key, value);
  }
}

}  // namespace adaptrt
