#pragma once

#include <cstddef>
#include <memory>

#include "adaptrt/program/program.h"
#include "adaptrt/program/state_layout.h"
#include "cuda_memory.h"
#include "cuda_op.h"
#include "device_weights.h"

namespace adaptrt {

/// The states of sequences on the device.
struct DeviceStates {
  StateLayout layout;
  /// Filled before the first run.
  std::byte* slots = nullptr;
};

// Make ops that advance states. `states` must outlive them.

[[nodiscard]] std::unique_ptr<const CudaOp> make_causal_convolution(const CausalConvolutionOp& op,
                                                                    const Program& program,
                                                                    const CudaMemory& memory,
                                                                    const DeviceStates& states,
                                                                    DeviceWeights& weights);

[[nodiscard]] std::unique_ptr<const CudaOp> make_gated_convolution(const GatedConvolutionOp& op,
                                                                   const Program& program,
                                                                   const CudaMemory& memory,
                                                                   const DeviceStates& states,
                                                                   DeviceWeights& weights);

[[nodiscard]] std::unique_ptr<const CudaOp> make_gated_delta(const GatedDeltaOp& op, const Program& program,
                                                             const CudaMemory& memory,
                                                             const DeviceStates& states,
                                                             DeviceWeights& weights);

[[nodiscard]] std::unique_ptr<const CudaOp> make_selective_scan(const SelectiveScanOp& op,
                                                                const Program& program,
                                                                const CudaMemory& memory,
                                                                const DeviceStates& states,
                                                                DeviceWeights& weights);

[[nodiscard]] std::unique_ptr<const CudaOp> make_gated_rms_norm(const GatedRmsNormOp& op,
                                                                const Program& program,
                                                                const CudaMemory& memory,
                                                                DeviceWeights& weights);

[[nodiscard]] std::unique_ptr<const CudaOp> make_sigmoid_gate(const SigmoidGateOp& op, const Program& program,
                                                              const CudaMemory& memory);

}  // namespace adaptrt
