#include "kernel_configs.h"

#include <algorithm>

#include "adaptrt/gpu/adapter_entries.h"

namespace adaptrt {

std::int64_t product_width(const LinearOp& op) {
  std::int64_t width = 0;
  for (const LinearPart& part : op.parts) width += part.weight.n;
  return width;
}

std::int64_t padded_rows(std::int64_t rows) {
  constexpr std::int64_t kMultiple = 8;
  return (rows + kMultiple - 1) / kMultiple * kMultiple;
}

bool stores_float32(const LinearOp& op, const Program& program) {
  return op.epilogue == LinearEpilogue::kStore &&
         program.buffers[static_cast<std::size_t>(op.output)].dtype == DType::kFloat32;
}

bool has_padded_output(const LinearOp& op, const Program& program) {
  const std::int64_t width = product_width(op);
  const std::int64_t stride = program.buffers[static_cast<std::size_t>(op.output)].width;
  return stores_float32(op, program) && (padded_rows(width) != width || stride != width);
}

std::int32_t bits_of(const Quantization& how) {
  constexpr std::int32_t kBitsOfByte = 8;
  return has_few_bits(how.algo) ? how.bits : kBitsOfByte;
}

std::int32_t group_size_of(const PanelMatrix& matrix) {
  return static_cast<std::int32_t>(std::min<std::int64_t>(matrix.quantization.group_size, matrix.k));
}

bool is_adapted(LoraModule module, const Program& program) {
  return std::ranges::find(program.lora.target_modules, module) != program.lora.target_modules.end();
}

std::optional<cuda::LoraKernel::Config> lora_config(const LinearOp& op, const Program& program) {
  if (op.lora_site < 0) return std::nullopt;
  cuda::LoraKernel::Config config{
      .dtype = program.dtype, .max_rank = program.lora.max_rank, .dora = program.lora.dora_enabled};
  const AdapterEntries entries(program.lora);
  const auto add_parts = [&](std::size_t index) {
    const LoraSite& site = program.lora.sites[index];
    for (std::size_t part = 0; part < site.parts.size(); ++part) {
      config.entries.push_back(entries.entry(index, part));
      config.module_ids.push_back(static_cast<std::int32_t>(site.parts[part].module));
      config.out_sizes.push_back(static_cast<std::int32_t>(site.parts[part].out_size));
    }
  };
  if (stores_float32(op, program)) {
    config.logits_stride = static_cast<std::int32_t>(padded_rows(product_width(op)));
  }
  if (!program.lora_site(op.lora_site).is_lm_head()) {
    add_parts(static_cast<std::size_t>(op.lora_site));
    return config;
  }
  if (!is_adapted(LoraModule::kLmHead, program)) return std::nullopt;
  for (std::size_t site = 0; site < program.lora.sites.size(); ++site) {
    if (program.lora.sites[site].is_lm_head()) add_parts(site);
  }
  return config;
}

std::optional<cuda::LoraKernel::Config> slot_lora_config(std::int32_t first_site, const Program& program) {
  if (first_site < 0) return std::nullopt;
  cuda::LoraKernel::Config config{
      .dtype = program.dtype,
      .max_rank = program.lora.max_rank,
      .dora = program.lora.dora_enabled,
      .expert_entry = AdapterEntries(program.lora).entry(static_cast<std::size_t>(first_site), 0)};
  for (const LoraPart& part : program.lora_site(first_site).parts) {
    config.module_ids.push_back(static_cast<std::int32_t>(part.module));
    config.out_sizes.push_back(static_cast<std::int32_t>(part.out_size));
  }
  return config;
}

std::array<std::optional<cuda::LoraKernel::Config>, 2> lora_configs(const ExpertsOp& op,
                                                                    const Program& program) {
  return {slot_lora_config(op.gate_up_site, program), slot_lora_config(op.down_site, program)};
}

cuda::PagedAttentionConfig attention_config(const AttentionOp& op, const Program& program) {
  return {.dtype = program.dtype,
          .num_heads = static_cast<std::int32_t>(op.shape.num_attention_heads),
          .num_kv_heads = static_cast<std::int32_t>(op.shape.num_key_value_heads),
          .head_dim = static_cast<std::int32_t>(op.shape.head_dim),
          .scale = op.scale,
          .sliding_window = op.sliding_window,
          .softcap = op.softcap,
          .interleaved = op.interleaved,
          .int8_pool = program.int8_kv_cache,
          .chunk = op.chunk,
          .query_scaling_beta = op.query_scaling_beta,
          .query_scaling_length = op.query_scaling_length,
          .query_scaling_offset = op.query_scaling_offset};
}

}  // namespace adaptrt
