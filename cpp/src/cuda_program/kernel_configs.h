#pragma once

#include <cstdint>
#include <optional>

#include "adaptrt/cuda/lora_kernel.h"
#include "adaptrt/cuda/paged_attention_kernel.h"
#include "adaptrt/program/program.h"

namespace adaptrt {

/// Returns the number of a linear layer's outputs before its activation, over all parts.
[[nodiscard]] std::int64_t product_width(const LinearOp& op);

/// Returns the kernel of a linear layer's adapters; nullopt if adapters do not apply.
[[nodiscard]] std::optional<cuda::LoraKernel::Config> lora_config(const LinearOp& op, const Program& program);

[[nodiscard]] cuda::PagedAttentionConfig attention_config(const AttentionOp& op, const Program& program);

}  // namespace adaptrt
