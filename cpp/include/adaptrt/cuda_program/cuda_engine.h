#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/device/device.h"
#include "adaptrt/engine/engine.h"
#include "adaptrt/gpu/gpu_engine.h"
#include "adaptrt/program/program.h"

namespace adaptrt {

/// Lists everything in a valid program that the CUDA engine cannot run: ops, their fields, adapters.
[[nodiscard]] Problems problems_on_cuda(const Program& program);

/// How many tokens of a text opened each neuron's gate, for each sparse MLP of the body in order. A missing
/// or empty element: nothing is known.
using NeuronUsage = std::vector<std::vector<std::uint32_t>>;

/// Lists why a valid program cannot have hopper_prefill, except sizes of heads and int8 keys, which
/// PagedAttentionKernel checks.
[[nodiscard]] Problems hopper_prefill_problems(const Program& program);

/// Makes the engine that runs a program with row-major matrices on an NVIDIA GPU. Weights are copied to the
/// device, so the program's matrices are not needed afterwards. See make_gpu_engine for the steps.
///
/// `weight_memory`: bytes that weights may take on the device; 0: no limit. If they need more, layers stay in
/// pinned host memory and are copied to the device ahead of use, in every step. Results have the same bits.
/// Steps then run without graphs.
///
/// ReLU-gated MLPs with a sparse input (LinearOp::has_sparse_input) are divided, if the rest of the weights
/// and two of these MLPs fit: neurons that do not fit stay in host memory. Steps of up to
/// cuda::kMaxSparseTokens rows read the active neurons where they are, and may be graphs. Others copy these
/// MLPs ahead of use. `usage` says which neurons are kept on the device; without it, as many MLPs as possible
/// are kept whole, and an even share of the others.
///
/// `hopper_prefill`: see PagedAttentionConfig.
///
/// Throws EngineError with all problems of Program::validate() and problems_on_cuda(), StepError if the
/// device fails, and ConfigError if the device has no memory left, `weight_memory` is too small, or the
/// device or a layer of the program cannot have hopper_prefill.
[[nodiscard]] std::unique_ptr<Engine> make_cuda_engine(const Program& program, std::shared_ptr<Device> device,
                                                       GpuEngineOptions options,
                                                       std::size_t weight_memory = 0,
                                                       bool hopper_prefill = false, NeuronUsage usage = {});

}  // namespace adaptrt
