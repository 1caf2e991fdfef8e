#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "adaptrt/core/dtype.h"

namespace adaptrt {

/// Returns the smallest float32 magnitude, as bits without the sign, that rounds to infinity in `target` or
/// is not finite.
[[nodiscard]] std::uint32_t float32_limit(DType target);

/// Returns the index of the first of `count` elements that is NaN or infinite, also after rounding to
/// `target`.
[[nodiscard]] std::optional<std::size_t> find_not_finite(const std::byte* data, DType dtype,
                                                         std::size_t count, DType target);

/// Returns the index of the first of `count` elements that is neither +0 nor -0.
[[nodiscard]] std::optional<std::size_t> find_not_zero(const std::byte* data, DType dtype, std::size_t count);

}  // namespace adaptrt
