#include "adaptrt/cuda_program/cuda_engine.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <variant>

#include "cuda_model.h"

namespace adaptrt {

Problems hopper_prefill_problems(const Program& program) {
  constexpr std::int32_t kTokensTogether = 16;
  Problems problems;
  const bool has_paged_attention = std::ranges::any_of(program.body, [](const Op& op) {
    const auto* attention = std::get_if<AttentionOp>(&op);
    return attention != nullptr && !attention->shape.values_are_keys;
  });
  if (!has_paged_attention) {
    problems.add("hopper_prefill is true; the engine has no attention with keys and values of their own");
  }
  if (program.tokens_per_block % kTokensTogether != 0) {
    problems.add("hopper_prefill is true for tokens_per_block " + std::to_string(program.tokens_per_block) +
                 "; it needs a multiple of " + std::to_string(kTokensTogether));
  }
  return problems;
}

std::unique_ptr<Engine> make_cuda_engine(const Program& program, std::shared_ptr<Device> device,
                                         GpuEngineOptions options, std::size_t weight_memory,
                                         bool hopper_prefill, NeuronUsage usage) {
  program.validate().throw_if_any<EngineError>("the engine's program is inconsistent");
  problems_on_cuda(program).throw_if_any<EngineError>("the engine cannot run on a GPU");
  if (hopper_prefill) hopper_prefill_problems(program).throw_if_any<ConfigError>("the engine's options");
  return make_gpu_engine(
      describe(program),
      std::make_unique<CudaModel>(program, weight_memory, hopper_prefill, std::move(usage)),
      std::move(device), options);
}

}  // namespace adaptrt
