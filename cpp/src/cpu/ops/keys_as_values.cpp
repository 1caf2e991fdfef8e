#include "ops/keys_as_values.h"

#include <cstring>

namespace adaptrt {
namespace {

/// Rearranges a group of keys [head_dim / ki][slots][ki] to values [kKeyGroup / ki][columns][ki]. Elements of
/// which all bits of `exponent` are set are not finite.
template <class Element, std::int64_t kInterleave>
void rearrange(const Element* keys, std::int64_t slots, std::int64_t head_dim, Element exponent,
               Element* values) {
  const std::int64_t columns = whole_groups(head_dim);
  for (std::int64_t slot = 0; slot < kKeyGroup; slot += kInterleave) {
    Element* out = values + slot * columns;
    for (std::int64_t column = 0; column < head_dim; column += kInterleave) {
      const Element* from = keys + column * slots + slot * kInterleave;
      for (std::int64_t i = 0; i < kInterleave; ++i) {
        for (std::int64_t j = 0; j < kInterleave; ++j) {
          const Element element = from[j * kInterleave + i];
          const bool is_finite = (element & exponent) != exponent;
          out[(column + i) * kInterleave + j] = is_finite ? element : Element{0};
        }
      }
    }
    std::memset(out + head_dim * kInterleave, 0,
                static_cast<std::size_t>((columns - head_dim) * kInterleave) * sizeof(Element));
  }
}

template <class Element, std::int64_t kInterleave>
void rearrange_groups(std::int64_t slots, std::int64_t head_dim, Element exponent, std::span<KeyGroup> groups,
                      float* scratch) {
  auto* values = reinterpret_cast<Element*>(scratch);
  for (KeyGroup& group : groups) {
    rearrange<Element, kInterleave>(reinterpret_cast<const Element*>(group.keys), slots, head_dim, exponent,
                                    values);
    group.values = reinterpret_cast<const std::byte*>(values);
    values += kKeyGroup * whole_groups(head_dim);
  }
}

}  // namespace

void make_values_of_keys(const KvPool& pool, std::int64_t head_dim, std::span<KeyGroup> groups,
                         float* scratch) {
  constexpr std::uint32_t kFloat32Exponent = 0x7f800000;
  constexpr std::uint16_t kBFloat16Exponent = 0x7f80;
  constexpr std::uint16_t kFloat16Exponent = 0x7c00;
  switch (pool.dtype()) {
    case DType::kFloat32:
      return rearrange_groups<std::uint32_t, 1>(pool.slots(), head_dim, kFloat32Exponent, groups, scratch);
    case DType::kBFloat16:
      return rearrange_groups<std::uint16_t, 2>(pool.slots(), head_dim, kBFloat16Exponent, groups, scratch);
    case DType::kFloat16:
      return rearrange_groups<std::uint16_t, 1>(pool.slots(), head_dim, kFloat16Exponent, groups, scratch);
  }
}

}  // namespace adaptrt
