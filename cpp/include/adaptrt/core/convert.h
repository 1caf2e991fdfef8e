#pragma once

#include <cstddef>

#include "adaptrt/core/dtype.h"

namespace adaptrt {

/// Writes `count` elements to `out`, rounded to nearest even where `to` is narrower; a plain copy where the
/// types are the same. Any alignment; the arrays do not overlap.
void convert_elements(std::byte* out, DType to, const std::byte* source, DType from, std::size_t count);

/// Does the same, but first widens each element to float32 and multiplies it by `scale`.
void scale_elements(std::byte* out, DType to, const std::byte* source, DType from, float scale,
                    std::size_t count);

}  // namespace adaptrt
