#pragma once

#include <memory>

#include "adaptrt/program/program.h"
#include "cuda_memory.h"
#include "cuda_op.h"
#include "device_weights.h"

namespace adaptrt {

/// Returns the first of two neighbouring ops if they are a ReLU-gated MLP whose second layer has a sparse
/// input, so that single neurons may be read; nullptr if they are not.
[[nodiscard]] const LinearOp* sparse_gate(const Op& first, const Op& second);

/// True if a run of this shape reads only the active neurons of such MLPs. It depends on the number of rows
/// only.
[[nodiscard]] bool reads_active_neurons(const RunShape& shape);

/// Makes such an MLP. Runs with few rows read `neurons` one by one, and others read its whole matrices. All
/// results have the same bits.
[[nodiscard]] std::unique_ptr<const CudaOp> make_sparse_mlp(const LinearOp& gated, const LinearOp& down,
                                                            const NeuronWeights& neurons,
                                                            const Program& program, const CudaMemory& memory,
                                                            DeviceWeights& weights);

}  // namespace adaptrt
