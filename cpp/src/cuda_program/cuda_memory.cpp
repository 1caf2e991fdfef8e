#include "cuda_memory.h"

#include <algorithm>
#include <cstdint>

#include "kernel_configs.h"

namespace adaptrt {
namespace {

/// Bytes of the memory that ops share, for the largest run.
struct SharedBytes {
  std::size_t addend = 0;
  std::size_t product = 0;
  std::size_t padded_logits = 0;
  std::size_t workspace = 0;
};

void require(std::size_t* bytes, std::int64_t needed) {
  *bytes = std::max(*bytes, static_cast<std::size_t>(needed));
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
        if (has_padded_logits(*linear, program)) {
          require(&bytes.padded_logits, program.max_batch_size * padded_rows(product_width(*linear)) *
                                            static_cast<std::int64_t>(sizeof(float)));
        }
        if (const auto lora = lora_config(*linear, program)) {
          require(&bytes.workspace, cuda::LoraKernel(*lora).workspace_bytes(tokens));
        }
      } else if (const auto* attention = std::get_if<AttentionOp>(&op)) {
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
  padded_logits_ = allocate(device, bytes.padded_logits);
  workspace_ = allocate(device, bytes.workspace);
}

}  // namespace adaptrt
