#pragma once

#include <cuda_runtime_api.h>

#include <string>

namespace adaptrt::cuda {

/// "cudaMalloc: out of memory (cudaErrorMemoryAllocation)"
[[nodiscard]] std::string describe(const char* call, cudaError_t status);

/// Throws EngineError for an error after which CUDA answers every call of the process with the same error,
/// StepError for any other.
void check(const char* call, cudaError_t status);

/// Makes a GPU the calling thread's current one.
void activate(int device);

}  // namespace adaptrt::cuda
