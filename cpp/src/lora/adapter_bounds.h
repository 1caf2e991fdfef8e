#pragma once

#include <cstddef>
#include <cstdint>

#include "adaptrt/lora/layout.h"

namespace adaptrt {

// Sizes of the largest adapters that a layout accepts: every enabled module of every layer at one rank, with
// magnitudes if DoRA is enabled, and at each site the larger one of the fused module and its parts. Shifts,
// lm_head and the embedding, which few adapters have, count only for the size of one image.

/// Bytes of the largest image that an adapter of this rank has at any site; 0 without LoRA.
[[nodiscard]] std::size_t largest_image_bytes(const LoraLayout& layout, std::int32_t rank);

/// Bytes of all images of the largest adapter of this rank.
[[nodiscard]] std::size_t device_adapter_bytes(const LoraLayout& layout, std::int32_t rank);

/// Pages of the largest adapter of this rank; page_bytes is at least its largest image.
[[nodiscard]] std::int64_t device_adapter_pages(const LoraLayout& layout, std::int32_t rank,
                                                std::size_t page_bytes);

/// Bytes of the largest adapter of this rank on the host: packed or, if a rank has only parts of layers, as
/// sent in the engine's type.
[[nodiscard]] std::size_t host_adapter_bytes(const LoraLayout& layout, std::int32_t rank);

/// Bytes of A[1, in] and B[out, 1] of the widest enabled module, in the engine's type.
[[nodiscard]] std::size_t widest_module_bytes(const LoraLayout& layout);

}  // namespace adaptrt
