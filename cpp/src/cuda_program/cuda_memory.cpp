#include "cuda_memory.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "kernel_configs.h"

namespace adaptrt {
namespace {

/// Bytes of the memory that ops share, for the largest run.
struct SharedBytes {
  std::size_t addend = 0;
  std::size_t product = 0;
  std::size_t padded_output = 0;
  std::size_t workspace = 0;
};

/// Sizes of all mixtures of experts, for the largest run.
struct ExpertSizes {
  std::size_t slots = 0;
  std::size_t experts = 0;
  std::size_t inner = 0;   ///< elements of all slots between the layers
  std::size_t hidden = 0;  ///< elements of all slots after the layers
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

SharedBytes shared_bytes(const Program& program) {
  SharedBytes bytes;
  const auto element = static_cast<std::int64_t>(size_of(program.dtype));
  const std::int64_t tokens = program.max_num_tokens;
  for (const std::vector<Op>* section : program.sections()) {
    for (const Op& op : *section) {
      if (const auto* linear = std::get_if<LinearOp>(&op)) {
        const std::int64_t needed = tokens * product_width(*linear) * element;
        if (linear->epilogue == LinearEpilogue::kAdd) require(&bytes.addend, needed);
        if (is_activated(linear->epilogue)) require(&bytes.product, needed);
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
      } else if (const auto* attention = std::get_if<AttentionOp>(&op)) {
        if (attention->values_from_keys) {
          const std::int64_t width = program.buffers[static_cast<std::size_t>(attention->qkv)].width;
          require(&bytes.product, tokens * width * element);
        }
        const cuda::PagedAttentionKernel kernel(attention_config(*attention, program));
        require(&bytes.workspace, static_cast<std::int64_t>(kernel.workspace_bytes(program.max_num_tokens,
                                                                                   program.max_batch_size)));
      }
    }
  }
  return bytes;
}

Allocation allocate(Device& device, std::size_t bytes) {
  return bytes == 0 ? Allocation() : device.allocate(bytes);
}

}  // namespace

CudaMemory::CudaMemory(const Program& program, const GpuModelArrays& arrays, Device& device)
    : logits_(arrays.logits), adapters_(arrays.adapters), arena_(device.allocate(program.arena_bytes)) {
  for (const Buffer& buffer : program.buffers) buffers_.push_back(arena_.data() + buffer.offset);
  buffers_[static_cast<std::size_t>(program.logits)] = logits_;
  const SharedBytes bytes = shared_bytes(program);
  addend_ = allocate(device, bytes.addend);
  product_ = allocate(device, bytes.product);
  padded_output_ = allocate(device, bytes.padded_output);
  workspace_ = allocate(device, bytes.workspace);
  allocate_experts(program, device);
}

void CudaMemory::allocate_experts(const Program& program, Device& device) {
  const ExpertSizes sizes = expert_sizes(program);
  if (sizes.slots == 0) return;
  const std::size_t element = size_of(program.dtype);
  std::size_t end = 0;
  // Places an array; the address is known when all have a place.
  const auto place = [&end](std::size_t bytes) {
    constexpr std::size_t kAlignment = 256;
    return std::exchange(end, end + (bytes + kAlignment - 1) / kAlignment * kAlignment);
  };
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

}  // namespace adaptrt
