#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "adaptrt/cuda/lora_kernel.h"
#include "adaptrt/cuda/paged_attention_kernel.h"
#include "adaptrt/program/program.h"

namespace adaptrt {

/// Returns the number of a linear layer's outputs before its activation, over all parts.
[[nodiscard]] std::int64_t product_width(const LinearOp& op);
/// Returns `rows` of a matrix with the rows of zeros that follow them on the device: products have a multiple
/// of 8 outputs.
[[nodiscard]] std::int64_t padded_rows(std::int64_t rows);
/// True if a linear layer's output is float32, and not a residual stream: logits, of tokens or of experts, or
/// the gate of a GatedAddOp.
[[nodiscard]] bool stores_float32(const LinearOp& op, const Program& program);
/// True if a linear layer stores float32, and its output's rows are not as wide as its product's. The product
/// has rows of zeros, or the logits have columns of adapters' new tokens.
[[nodiscard]] bool has_padded_output(const LinearOp& op, const Program& program);

/// Number of bits of a quantised weight.
[[nodiscard]] std::int32_t bits_of(const Quantization& how);
/// Number of inputs of a group of a quantised matrix, at most all of them.
[[nodiscard]] std::int32_t group_size_of(const PanelMatrix& matrix);

/// True if the engine's adapters may change a module of the vocabulary: lm_head or the embedding.
[[nodiscard]] bool is_adapted(LoraModule module, const Program& program);
/// Returns the kernel of a linear layer's adapters; nullopt if adapters do not apply.
[[nodiscard]] std::optional<cuda::LoraKernel::Config> lora_config(const LinearOp& op, const Program& program);

/// The same for experts, or for heads of latent attention, whose sites follow one another from first_site on.
[[nodiscard]] std::optional<cuda::LoraKernel::Config> slot_lora_config(std::int32_t first_site,
                                                                       const Program& program);
/// The same for the two layers of experts: gate and up, and down.
[[nodiscard]] std::array<std::optional<cuda::LoraKernel::Config>, 2> lora_configs(const ExpertsOp& op,
                                                                                  const Program& program);

[[nodiscard]] cuda::PagedAttentionConfig attention_config(const AttentionOp& op, const Program& program);

}  // namespace adaptrt
