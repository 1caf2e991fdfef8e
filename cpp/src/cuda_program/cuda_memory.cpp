#include "cuda_memory.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "adaptrt/cuda/sparse_kernels.h"
#include "kernel_configs.h"

namespace adaptrt {
namespace {

/// Bytes of the memory that ops share, for the largest run.
struct SharedBytes {
  std::size_t addend = 0;
  std::size_t product = 0;
  std::size_t padded_output = 0;
  std::size_t workspace = 0;
  std::size_t attention_counters = 0;
  std::size_t neuron_masks = 0;
};

/// Sizes of all mixtures of experts, for the largest run.
struct ExpertSizes {
  std::size_t slots = 0;
  std::size_t experts = 0;
  std::size_t inner = 0;   ///< elements of all slots between the layers
  std::size_t hidden = 0;  ///< elements of all slots after the layers
};

/// Sizes of all ops of latent attention, for the largest run.
struct LatentSizes {
  std::size_t slots = 0;
  std::size_t heads = 0;
  std::size_t inputs = 0;  ///< elements of all slots
  std::size_t outputs = 0;
};

void require(std::size_t* bytes, std::int64_t needed) {
  *bytes = std::max(*bytes, static_cast<std::size_t>(needed));
}

ExpertSizes expert_sizes(const Program& program) {
  ExpertSizes sizes;
  for (const Op& op : program.body) {
    const auto* experts = std::get_if<ExpertsOp>(&op);
    if (experts == nullptr) continue;
    const std::int64_t slots = std::int64_t{program.max_num_tokens} * experts->routing.top_k;
    require(&sizes.slots, slots);
    require(&sizes.experts, experts->num_experts());
    require(&sizes.inner, slots * experts->down.front().weight.k);
    require(&sizes.hidden, slots * experts->down.front().weight.n);
  }
  return sizes;
}

LatentSizes latent_sizes(const Program& program) {
  LatentSizes sizes;
  const auto add = [&](const std::vector<LinearPart>& heads) {
    const std::int64_t slots = std::int64_t{program.max_num_tokens} * std::ssize(heads);
    require(&sizes.slots, slots);
    require(&sizes.heads, std::ssize(heads));
    require(&sizes.inputs, slots * heads.front().weight.k);
    require(&sizes.outputs, slots * heads.front().weight.n);
  };
  for (const Op& op : program.body) {
    if (const auto* queries = std::get_if<LatentQueriesOp>(&op)) add(queries->keys);
    if (const auto* values = std::get_if<LatentValuesOp>(&op)) add(values->values);
  }
  return sizes;
}

SharedBytes shared_bytes(const Program& program) {
  SharedBytes bytes;
  const auto element = static_cast<std::int64_t>(size_of(program.dtype));
  const std::int64_t tokens = program.max_num_tokens;
  const auto require_head_workspace = [&](std::int32_t first_site, std::int64_t heads) {
    const auto lora = slot_lora_config(first_site, program);
    if (lora) require(&bytes.workspace, cuda::LoraKernel(*lora).workspace_bytes(tokens * heads));
  };
  for (const std::vector<Op>* section : program.sections()) {
    for (const Op& op : *section) {
      if (const auto* linear = std::get_if<LinearOp>(&op)) {
        const std::int64_t needed = tokens * product_width(*linear) * element;
        if (linear->epilogue == LinearEpilogue::kAdd) require(&bytes.addend, needed);
        if (is_activated(linear->epilogue)) require(&bytes.product, needed);
        if (linear->has_sparse_input) {
          const std::int64_t groups = cuda::neuron_groups(linear->parts.front().weight.k);
          require(&bytes.neuron_masks, groups * static_cast<std::int64_t>(sizeof(std::uint16_t)));
        }
        const std::int64_t rows = linear->output == program.logits ? program.max_batch_size : tokens;
        if (has_padded_output(*linear, program)) {
          require(&bytes.padded_output,
                  rows * padded_rows(product_width(*linear)) * static_cast<std::int64_t>(sizeof(float)));
        }
        if (const auto lora = lora_config(*linear, program)) {
          require(&bytes.workspace, cuda::LoraKernel(*lora).workspace_bytes(rows));
        }
      } else if (const auto* experts = std::get_if<ExpertsOp>(&op)) {
        for (const auto& lora : lora_configs(*experts, program)) {
          const std::int64_t slots = tokens * experts->routing.top_k;
          if (lora) require(&bytes.workspace, cuda::LoraKernel(*lora).workspace_bytes(slots));
        }
      } else if (const auto* queries = std::get_if<LatentQueriesOp>(&op)) {
        require_head_workspace(queries->lora_site, queries->shape.num_heads);
      } else if (const auto* values = std::get_if<LatentValuesOp>(&op)) {
        require_head_workspace(values->lora_site, values->shape.num_heads);
      } else if (const auto* attention = std::get_if<AttentionOp>(&op)) {
        if (attention->shape.values_are_keys) continue;  // its kernels need none
        if (attention->values_from_keys) {
          const std::int64_t width = program.buffers[static_cast<std::size_t>(attention->qkv)].width;
          require(&bytes.product, tokens * width * element);
        }
        const cuda::PagedAttentionKernel kernel(attention_config(*attention, program));
        require(&bytes.workspace, static_cast<std::int64_t>(kernel.workspace_bytes(program.max_num_tokens,
                                                                                   program.max_batch_size)));
        require(&bytes.attention_counters,
                static_cast<std::int64_t>(kernel.counter_bytes(program.max_batch_size)));
      }
    }
  }
  return bytes;
}

Allocation allocate(Device& device, std::size_t bytes) {
  return bytes == 0 ? Allocation() : device.allocate(bytes);
}

/// Returns the place of an array behind others, and moves their end.
std::size_t place_behind(std::size_t* end, std::size_t bytes) {
  constexpr std::size_t kAlignment = 256;
  return std::exchange(*end, *end + (bytes + kAlignment - 1) / kAlignment * kAlignment);
}

}  // namespace

CudaMemory::CudaMemory(const Program& program, const GpuModelArrays& arrays, Device& device, Stream& stream)
    : logits_(arrays.logits), adapters_(arrays.adapters), arena_(device.allocate(program.arena_bytes)) {
  for (const Buffer& buffer : program.buffers) buffers_.push_back(arena_.data() + buffer.offset);
  buffers_[static_cast<std::size_t>(program.logits)] = logits_;
  const SharedBytes bytes = shared_bytes(program);
  addend_ = allocate(device, bytes.addend);
  product_ = allocate(device, bytes.product);
  padded_output_ = allocate(device, bytes.padded_output);
  workspace_ = allocate(device, bytes.workspace);
  attention_counters_ = allocate(device, bytes.attention_counters);
  if (bytes.attention_counters > 0) {
    stream.fill_zero(attention_counters_.data(), attention_counters_.bytes());
  }
  neuron_masks_ = allocate(device, bytes.neuron_masks);
  allocate_experts(program, device);
  allocate_latent(program, device);
}

void CudaMemory::allocate_experts(const Program& program, Device& device) {
  const ExpertSizes sizes = expert_sizes(program);
  if (sizes.slots == 0) return;
  const std::size_t element = size_of(program.dtype);
  std::size_t end = 0;
  const auto place = [&end](std::size_t bytes) { return place_behind(&end, bytes); };
  const std::size_t chosen = place(sizes.slots * sizeof(std::int32_t));
  const std::size_t weights = place(sizes.slots * sizeof(float));
  const std::size_t offsets = place((sizes.experts + 1) * sizeof(std::int32_t));
  const std::size_t entries = place(sizes.slots * sizeof(std::int32_t));
  const std::size_t slots_of = place(sizes.slots * sizeof(std::int32_t));
  const std::size_t expert_of = place(sizes.slots * sizeof(std::int32_t));
  // There is at most one tile for each slot.
  const std::size_t tiles = place((sizes.slots + 1) * sizeof(cuda::SlotTile));
  const std::size_t gate_up = place(2 * sizes.inner * element);
  const std::size_t activated = place(sizes.inner * element);
  const std::size_t down = place(sizes.hidden * element);
  expert_arrays_ = device.allocate(end);
  const auto integers = [this](std::size_t at) {
    return reinterpret_cast<std::int32_t*>(expert_arrays_.data() + at);
  };
  experts_ = {.chosen = integers(chosen),
              .weights = reinterpret_cast<float*>(expert_arrays_.data() + weights),
              .offsets = integers(offsets),
              .entries = integers(entries),
              .slots_of = integers(slots_of),
              .expert_of = integers(expert_of),
              .tiles = reinterpret_cast<cuda::SlotTile*>(expert_arrays_.data() + tiles),
              .gate_up = expert_arrays_.data() + gate_up,
              .activated = expert_arrays_.data() + activated,
              .down = expert_arrays_.data() + down};
}

void CudaMemory::allocate_latent(const Program& program, Device& device) {
  const LatentSizes sizes = latent_sizes(program);
  if (sizes.slots == 0) return;
  const std::size_t element = size_of(program.dtype);
  std::size_t end = 0;
  const std::size_t offsets = place_behind(&end, (sizes.heads + 1) * sizeof(std::int32_t));
  // There is at most one tile for each slot.
  const std::size_t tiles = place_behind(&end, (sizes.slots + 1) * sizeof(cuda::SlotTile));
  const std::size_t inputs = place_behind(&end, sizes.inputs * element);
  const std::size_t outputs = place_behind(&end, sizes.outputs * element);
  latent_arrays_ = device.allocate(end);
  std::byte* first = latent_arrays_.data();
  latent_ = {.offsets = reinterpret_cast<std::int32_t*>(first + offsets),
             .tiles = reinterpret_cast<cuda::SlotTile*>(first + tiles),
             .inputs = first + inputs,
             .outputs = first + outputs};
}

}  // namespace adaptrt
