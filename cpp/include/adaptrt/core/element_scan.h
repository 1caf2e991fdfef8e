#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "adaptrt/core/dtype.h"

namespace adaptrt {

/// The least float32 magnitude, as bits without the sign, that is not finite in `target` or becomes infinite
/// when it is rounded to it.
[[nodiscard]] std::uint32_t float32_limit(DType target);

/// Index of the first of `count` elements that is NaN, infinite, or becomes infinite when it is rounded to
/// `target`.
[[nodiscard]] std::optional<std::size_t> find_not_finite(const std::byte* data, DType dtype,
                                                         std::size_t count, DType target);

/// Index of the first of `count` elements that is not zero; both zeros pass.
[[nodiscard]] std::optional<std::size_t> find_not_zero(const std::byte* data, DType dtype, std::size_t count);

}  // namespace adaptrt
