#include "state_ops.h"

#include <cstdint>

#include "adaptrt/cuda/state_kernels.h"
#include "buffers.h"
#include "single_launch.h"

namespace adaptrt {
namespace {

/// Makes the launch of a kernel with the states at byte `offset` of each slot.
template <typename Kernel>
std::unique_ptr<const CudaOp> make_state_launch(Kernel kernel, const DeviceStates& states,
                                                std::size_t offset) {
  kernel.states.slot_stride = static_cast<std::int64_t>(states.layout.slot_bytes() / sizeof(float));
  return make_launch(kernel, [&states, offset](Kernel& work, const CudaRun& run) {
    work.states.sequences = run.shape.sequences;
    work.states.sequence_offsets = run.sequence_offsets;
    work.states.slots = run.state_slots;
    work.states.states = floats(states.slots + offset);
    work.states.advances = run.shape.advances_states;
  });
}

}  // namespace

std::unique_ptr<const CudaOp> make_causal_convolution(const CausalConvolutionOp& op, const Program& program,
                                                      const CudaMemory& memory, const DeviceStates& states,
                                                      DeviceWeights& weights) {
  const cuda::CausalConvolution kernel{.states = {},
                                       .width = op.width(),
                                       .stride = width_of(program, op.values),
                                       .taps = op.taps,
                                       .weight = weights.vector(op.weight),
                                       .bias = weights.vector(op.bias),
                                       .values = floats(memory.buffer(op.values))};
  return make_state_launch(kernel, states, states.layout.convolution(op.layer));
}

std::unique_ptr<const CudaOp> make_gated_convolution(const GatedConvolutionOp& op, const Program& program,
                                                     const CudaMemory& memory, const DeviceStates& states,
                                                     DeviceWeights& weights) {
  const cuda::GatedConvolution kernel{.dtype = program.dtype,
                                      .states = {},
                                      .width = op.width(),
                                      .taps = op.taps,
                                      .weight = weights.vector(op.weight),
                                      .bias = weights.vector(op.bias),
                                      .input = floats(memory.buffer(op.input)),
                                      .output = memory.buffer(op.output)};
  return make_state_launch(kernel, states, states.layout.convolution(op.layer));
}

std::unique_ptr<const CudaOp> make_gated_delta(const GatedDeltaOp& op, const Program& program,
                                               const CudaMemory& memory, const DeviceStates& states,
                                               DeviceWeights& weights) {
  const cuda::GatedDelta kernel{.states = {},
                                .shape = op.shape,
                                .stride = width_of(program, op.qkv),
                                .qkv = floats(memory.buffer(op.qkv)),
                                .gates = floats(memory.buffer(op.gates)),
                                .log_decay = weights.vector(op.log_decay),
                                .time_bias = weights.vector(op.time_bias),
                                .update_scale = op.update_scale,
                                .output = floats(memory.buffer(op.output))};
  return make_state_launch(kernel, states, states.layout.delta(op.layer));
}

std::unique_ptr<const CudaOp> make_selective_scan(const SelectiveScanOp& op, const Program& program,
                                                  const CudaMemory& memory, const DeviceStates& states,
                                                  DeviceWeights& weights) {
  const cuda::SelectiveScan kernel{.states = {},
                                   .shape = op.shape,
                                   .stride = width_of(program, op.values),
                                   .values = floats(memory.buffer(op.values)),
                                   .log_decay = weights.vector(op.log_decay),
                                   .time_bias = weights.vector(op.time_bias),
                                   .skip = weights.vector(op.skip),
                                   .time_min = op.time_min,
                                   .time_max = op.time_max,
                                   .output = floats(memory.buffer(op.output))};
  return make_state_launch(kernel, states, states.layout.scan(op.layer));
}

std::unique_ptr<const CudaOp> make_gated_rms_norm(const GatedRmsNormOp& op, const Program& program,
                                                  const CudaMemory& memory, DeviceWeights& weights) {
  const cuda::GatedRmsNorm kernel{.dtype = program.dtype,
                                  .width = width_of(program, op.input),
                                  .group = op.weight.size / op.num_groups,
                                  .weight_size = op.weight.size,
                                  .gate_stride = width_of(program, op.gate),
                                  .input = floats(memory.buffer(op.input)),
                                  .gate = floats(memory.buffer(op.gate)),
                                  .weight = weights.vector(op.weight),
                                  .epsilon = op.epsilon,
                                  .gate_first = op.gate_first,
                                  .output = memory.buffer(op.output)};
  return make_launch(kernel,
                     [](cuda::GatedRmsNorm& work, const CudaRun& run) { work.rows = run.shape.tokens; });
}

std::unique_ptr<const CudaOp> make_sigmoid_gate(const SigmoidGateOp& op, const Program& program,
                                                const CudaMemory& memory) {
  const cuda::SigmoidGate kernel{.dtype = program.dtype,
                                 .width = width_of(program, op.output),
                                 .gate_stride = width_of(program, op.gate),
                                 .gate = memory.buffer(op.gate),
                                 .output = memory.buffer(op.output)};
  return make_launch(kernel,
                     [](cuda::SigmoidGate& work, const CudaRun& run) { work.rows = run.shape.tokens; });
}

}  // namespace adaptrt
