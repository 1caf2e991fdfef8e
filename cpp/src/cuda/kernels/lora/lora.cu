#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "adaptrt/core/error.h"
#include "adaptrt/cuda/lora_kernel.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/lora/decode_expand_kernel.h"
#include "cuda/kernels/lora/decode_shrink_kernel.h"
#include "cuda/kernels/lora/expand_kernel.h"
#include "cuda/kernels/lora/expand_logits_kernel.h"
#include "cuda/kernels/lora/shrink_kernel.h"
#include "cuda/kernels/lora/step.h"

namespace adaptrt::cuda {
namespace {

using lora::DecodeExpand;
using lora::DecodeShrink;
using lora::Expand;
using lora::ExpandLogits;
using lora::max_token_tiles;
using lora::Shrink;
using lora::Step;

/// Number of blocks that keeps the multiprocessors of the largest GPU loading.
constexpr std::int64_t kBlocksWanted = 1024;

std::int64_t round_up(std::int64_t value, std::int64_t unit) {
  return (value + unit - 1) / unit * unit;
}

std::int64_t total_width(const std::vector<std::int32_t>& out_sizes) {
  std::int64_t total = 0;
  for (const auto size : out_sizes) total += size;
  return total;
}

/// Number of tiles of a step, or of blocks for them.
std::int64_t count_tiles(const Step& step) {
  return step.tiles == nullptr ? max_token_tiles(step.tokens, step.sequences, step.tile) : step.num_tiles;
}

/// Number of blocks of DecodeShrink that all run at once on an H100 or H200.
constexpr std::int64_t kDecodeBlocksWanted = 400;

struct Operands {
  Step step;
  const void* x;
  int in;
  const void* base;
  void* y;
  void* stream;
};

template <typename Kernel>
void enqueue_shrink(const Operands& operands, std::int64_t rank_lanes, std::size_t shared_bytes) {
  const Step& step = operands.step;
  launch<Kernel>(
      {.x = static_cast<std::uint32_t>(count_tiles(step)),
       .y = static_cast<std::uint32_t>(step.num_parts * rank_lanes),
       .shared_bytes = shared_bytes,
       .overlaps_previous = true},
      {.step = step, .x = operands.x, .in = operands.in, .rank_lanes = static_cast<int>(rank_lanes)},
      operands.stream);
}

template <typename Kernel>
LaunchShape expand_shape(const LoraKernel::Config& config, const Step& step) {
  int column_blocks = 0;
  for (const auto size : config.out_sizes) column_blocks += Kernel::column_blocks(size);
  return {.x = static_cast<std::uint32_t>(count_tiles(step)),
          .y = static_cast<std::uint32_t>(column_blocks),
          .shared_bytes = Kernel::kSharedBytes,
          .overlaps_previous = true};
}

template <typename Kernel>
void enqueue_expand(const LoraKernel::Config& config, const Operands& operands) {
  launch<Kernel>(expand_shape<Kernel>(config, operands.step),
                 {.step = operands.step,
                  .base = operands.base,
                  .y = operands.y,
                  .out = static_cast<int>(total_width(config.out_sizes)),
                  .dora = config.dora},
                 operands.stream);
}

template <typename T>
void enqueue_expand_logits(const LoraKernel::Config& config, const Operands& operands) {
  launch<ExpandLogits<T>>(expand_shape<ExpandLogits<T>>(config, operands.step),
                          {.step = operands.step,
                           .y = static_cast<float*>(operands.y),
                           .stride = config.logits_stride,
                           .dora = config.dora},
                          operands.stream);
}

/// True if the addresses and sizes allow loads of 16 bytes, which the kernels for decode steps need.
bool has_rows_of_vectors(const LoraKernel::Config& config, const Operands& operands) {
  const auto is_aligned = [](const void* address) {
    return reinterpret_cast<std::uintptr_t>(address) % (lora::kVector * sizeof(Half)) == 0;
  };
  const auto is_padded = [](std::int64_t size) { return size % lora::kVector == 0; };
  if (!is_padded(operands.in) || !is_aligned(operands.x)) return false;
  // The kernel for logits loads no vectors of y.
  return config.logits_stride > 0 || (std::ranges::all_of(config.out_sizes, is_padded) &&
                                      is_aligned(operands.base) && is_aligned(operands.y));
}

template <typename T>
void enqueue_typed(const LoraKernel::Config& config, const Operands& operands) {
  const Step& step = operands.step;
  const auto blocks = count_tiles(step) * step.num_parts;
  if (step.tile == DecodeShrink<T>::kTokens && step.tokens <= config.decode_tokens &&
      has_rows_of_vectors(config, operands)) {
    const auto rank_tiles = round_up(config.max_rank, DecodeShrink<T>::kRows) / DecodeShrink<T>::kRows;
    const auto lanes = std::clamp<std::int64_t>((kDecodeBlocksWanted + blocks / 2) / blocks, 1, rank_tiles);
    enqueue_shrink<DecodeShrink<T>>(operands, lanes, DecodeShrink<T>::kSharedBytes);
    if (config.logits_stride > 0) {
      enqueue_expand_logits<T>(config, operands);
    } else {
      enqueue_expand<DecodeExpand<T>>(config, operands);
    }
    return;
  }
  const bool many = step.tile > Shrink<T>::kFewTokens;
  const auto rank_tiles = round_up(config.max_rank, Shrink<T>::kFewTokensRows) / Shrink<T>::kFewTokensRows;
  const auto lanes = std::clamp<std::int64_t>(kBlocksWanted / blocks, 1, rank_tiles);
  enqueue_shrink<Shrink<T>>(operands, lanes,
                            many ? Shrink<T>::kManyTokensSharedBytes : Shrink<T>::kFewTokensSharedBytes);
  if (config.logits_stride > 0) {
    enqueue_expand_logits<T>(config, operands);
  } else {
    enqueue_expand<Expand<T>>(config, operands);
  }
}

}  // namespace

LoraKernel::LoraKernel(Config config) : config_(std::move(config)) {
  Problems problems;
  if (config_.dtype == DType::kFloat32) problems.add("dtype float32; expected float16 or bfloat16");
  if (config_.layer < 0) problems.add("layer " + std::to_string(config_.layer) + " is negative");
  if (config_.max_rank < 1)
    problems.add("max_rank " + std::to_string(config_.max_rank) + " must be at least 1");
  const auto parts = config_.module_ids.size();
  if (parts < 1 || parts > lora::kMaxParts || config_.out_sizes.size() != parts) {
    problems.add(std::to_string(parts) + " module_ids and " + std::to_string(config_.out_sizes.size()) +
                 " out_sizes; expected as many, 1 to " + std::to_string(lora::kMaxParts));
  }
  if (!config_.entries.empty() && config_.entries.size() != parts) {
    problems.add(std::to_string(config_.entries.size()) + " entries; expected none, or one for each part");
  }
  for (const auto entry : config_.entries) {
    if (entry < 0) problems.add("entry " + std::to_string(entry) + " is negative");
  }
  const bool uses_modules = config_.entries.empty() && config_.expert_entry == kNoExperts;
  for (const auto module : config_.module_ids) {
    if (uses_modules && (module < 0 || module >= lora::kNumModules)) {
      problems.add("module id " + std::to_string(module) + " must be within 0 .. " +
                   std::to_string(lora::kNumModules - 1));
    }
  }
  for (const auto size : config_.out_sizes) {
    if (size < 1) problems.add("out size " + std::to_string(size) + " must be at least 1");
  }
  const std::int64_t width = total_width(config_.out_sizes);
  if (width > std::numeric_limits<std::int32_t>::max()) {
    problems.add("out_sizes add up to " + std::to_string(width));
  }
  if (config_.expert_entry != kNoExperts && (config_.expert_entry < 0 || config_.logits_stride != 0)) {
    problems.add("expert_entry " + std::to_string(config_.expert_entry) +
                 " must be at least 0, and is not for logits");
  }
  if (config_.logits_stride != 0 && config_.logits_stride < width) {
    problems.add("logits_stride " + std::to_string(config_.logits_stride) +
                 " is less than the out_sizes' sum " + std::to_string(width));
  }
  problems.throw_if_any<ConfigError>("LoraKernel");
}

std::int64_t LoraKernel::entry_of(std::size_t part) const {
  if (config_.expert_entry != kNoExperts) return config_.expert_entry + static_cast<std::int64_t>(part);
  if (!config_.entries.empty()) return config_.entries[part];
  return std::int64_t{config_.layer} * lora::kNumModules + config_.module_ids[part];
}

std::int64_t LoraKernel::workspace_bytes(std::int64_t max_tokens) const {
  const auto stride = round_up(config_.max_rank, lora::kVector);
  return max_tokens * static_cast<std::int64_t>(config_.module_ids.size()) * stride *
         static_cast<std::int64_t>(size_of(config_.dtype));
}

std::int32_t LoraKernel::tile_tokens(std::int64_t tokens, std::int64_t many_tokens_from) {
  return tokens >= many_tokens_from ? Shrink<Half>::kManyTokens : Shrink<Half>::kFewTokens;
}

void LoraKernel::enqueue(const Sizes& sizes, const Inputs& inputs, void* y, void* workspace,
                         void* stream) const {
  constexpr std::int64_t kMax = std::numeric_limits<std::int32_t>::max() / 2;
  Problems problems;
  const auto check = [&problems](const char* name, std::int64_t size, std::int64_t least) {
    if (size < least || size > kMax) {
      problems.add(std::string(name) + " " + std::to_string(size) + " must be within " +
                   std::to_string(least) + " .. " + std::to_string(kMax));
    }
  };
  check("tokens", sizes.tokens, 0);
  check("in", sizes.in, 1);
  check("sequences", sizes.sequences, 0);
  std::int64_t last_entry = 0;
  for (std::size_t part = 0; part < config_.module_ids.size(); ++part) {
    last_entry = std::max(last_entry, entry_of(part));
  }
  check("layers", sizes.layers, last_entry / lora::kNumModules + 1);
  const bool has_experts = config_.expert_entry != kNoExperts;
  check("tiles", sizes.tiles, has_experts ? 1 : 0);
  if (has_experts != (inputs.tiles != nullptr)) problems.add("tiles are for experts, and needed by them");
  if (config_.logits_stride > 0 && inputs.base != y) problems.add("base of logits is not y");
  problems.throw_if_any<ConfigError>("LoraKernel.enqueue");
  if (sizes.tokens == 0) return;
  Step step{.sequence_offsets = inputs.sequence_offsets,
            .adapter_slots = inputs.adapter_slots,
            .ranks = inputs.ranks,
            .pointers = inputs.pointers,
            .shifts = inputs.shifts,
            .tokens = static_cast<int>(sizes.tokens),
            .sequences = static_cast<int>(sizes.sequences),
            .slot_entries = static_cast<int>(sizes.layers) * lora::kNumModules,
            .tile = tile_tokens(sizes.tokens, config_.many_tokens_from),
            .tiles = inputs.tiles,
            .num_tiles = static_cast<int>(sizes.tiles),
            .expert_entries = static_cast<int>(config_.module_ids.size()),
            .num_parts = static_cast<int>(config_.module_ids.size()),
            .parts = {},
            .shrunk = workspace,
            .shrunk_stride = static_cast<int>(round_up(config_.max_rank, lora::kVector))};
  int start = 0;
  for (std::size_t part = 0; part < config_.module_ids.size(); ++part) {
    step.parts[part] = {static_cast<int>(entry_of(part)), config_.out_sizes[part], start};
    start += config_.out_sizes[part];
  }
  const Operands operands{.step = step,
                          .x = inputs.x,
                          .in = static_cast<int>(sizes.in),
                          .base = inputs.base,
                          .y = y,
                          .stream = stream};
  if (config_.dtype == DType::kFloat16) {
    enqueue_typed<Half>(config_, operands);
  } else {
    enqueue_typed<BFloat16>(config_, operands);
  }
}

}  // namespace adaptrt::cuda
