#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "adaptrt/core/error.h"
#include "adaptrt/cuda/lora_kernel.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/lora/expand_kernel.h"
#include "cuda/kernels/lora/shrink_kernel.h"
#include "cuda/kernels/lora/step.h"

namespace adaptrt::cuda {
namespace {

using lora::Expand;
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

template <typename T>
void enqueue_typed(const LoraKernel::Config& config, const LoraKernel::Inputs& inputs, const Step& step,
                   std::int64_t in, void* y, void* stream) {
  const auto tiles = max_token_tiles(step.tokens, step.sequences, step.tile);
  const bool many = step.tile > Shrink<T>::kFewTokens;
  const auto rank_tiles = round_up(config.max_rank, Shrink<T>::kFewTokensRows) / Shrink<T>::kFewTokensRows;
  const auto rank_lanes = std::clamp<std::int64_t>(kBlocksWanted / (tiles * step.num_parts), 1, rank_tiles);
  launch<Shrink<T>>(
      {.x = static_cast<std::uint32_t>(tiles),
       .y = static_cast<std::uint32_t>(step.num_parts * rank_lanes),
       .shared_bytes = many ? Shrink<T>::kManyTokensSharedBytes : Shrink<T>::kFewTokensSharedBytes},
      {.step = step, .x = inputs.x, .in = static_cast<int>(in), .rank_lanes = static_cast<int>(rank_lanes)},
      stream);
  int column_blocks = 0;
  for (const auto size : config.out_sizes) column_blocks += Expand<T>::column_blocks(size);
  launch<Expand<T>>({.x = static_cast<std::uint32_t>(tiles),
                     .y = static_cast<std::uint32_t>(column_blocks),
                     .shared_bytes = Expand<T>::kSharedBytes},
                    {.step = step,
                     .base = inputs.base,
                     .y = y,
                     .out = static_cast<int>(total_width(config.out_sizes)),
                     .dora = config.dora},
                    stream);
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
  for (const auto module : config_.module_ids) {
    if (module < 0 || module >= lora::kNumModules) {
      problems.add("module id " + std::to_string(module) + " must be within 0 .. " +
                   std::to_string(lora::kNumModules - 1));
    }
  }
  for (const auto size : config_.out_sizes) {
    if (size < 1) problems.add("out size " + std::to_string(size) + " must be at least 1");
  }
  if (total_width(config_.out_sizes) > std::numeric_limits<std::int32_t>::max()) {
    problems.add("out_sizes add up to " + std::to_string(total_width(config_.out_sizes)));
  }
  problems.throw_if_any<ConfigError>("LoraKernel");
}

std::int64_t LoraKernel::workspace_bytes(std::int64_t max_tokens) const {
  const auto stride = round_up(config_.max_rank, lora::kVector);
  return max_tokens * static_cast<std::int64_t>(config_.module_ids.size()) * stride *
         static_cast<std::int64_t>(size_of(config_.dtype));
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
  check("layers", sizes.layers, config_.layer + 1);
  problems.throw_if_any<ConfigError>("LoraKernel.enqueue");
  if (sizes.tokens == 0) return;
  const bool many = sizes.tokens >= config_.many_tokens_from;
  Step step{.sequence_offsets = inputs.sequence_offsets,
            .adapter_slots = inputs.adapter_slots,
            .ranks = inputs.ranks,
            .pointers = inputs.pointers,
            .tokens = static_cast<int>(sizes.tokens),
            .sequences = static_cast<int>(sizes.sequences),
            .layers = static_cast<int>(sizes.layers),
            .layer = config_.layer,
            .tile = many ? Shrink<Half>::kManyTokens : Shrink<Half>::kFewTokens,
            .num_parts = static_cast<int>(config_.module_ids.size()),
            .parts = {},
            .shrunk = workspace,
            .shrunk_stride = static_cast<int>(round_up(config_.max_rank, lora::kVector))};
  int start = 0;
  for (std::size_t part = 0; part < config_.module_ids.size(); ++part) {
    step.parts[part] = {config_.module_ids[part], config_.out_sizes[part], start};
    start += config_.out_sizes[part];
  }
  if (config_.dtype == DType::kFloat16) {
    enqueue_typed<Half>(config_, inputs, step, sizes.in, y, stream);
  } else {
    enqueue_typed<BFloat16>(config_, inputs, step, sizes.in, y, stream);
  }
}

}  // namespace adaptrt::cuda
