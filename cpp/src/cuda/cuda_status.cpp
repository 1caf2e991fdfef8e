#include "cuda_status.h"

#include "adaptrt/core/error.h"

namespace adaptrt::cuda {
namespace {

/// True for the errors after which the process must be restarted to use CUDA, according to
/// cuda_runtime_api.h.
bool ends_the_context(cudaError_t status) {
  switch (status) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorExternalDevice:
    case cudaErrorMpsClientTerminated:
#if CUDART_VERSION >= 13000
    case cudaErrorContained:
    case cudaErrorTensorMemoryLeak:
#endif
      return true;
    default:
      return false;
  }
}

}  // namespace

std::string describe(const char* call, cudaError_t status) {
  return std::string(call) + ": " + cudaGetErrorString(status) + " (" + cudaGetErrorName(status) + ")";
}

void check(const char* call, cudaError_t status) {
  if (status == cudaSuccess) return;
  // Clear the error; otherwise the next launch would report it.
  static_cast<void>(cudaGetLastError());
  if (ends_the_context(status)) {
    throw EngineError(describe(call, status) + "; the GPU cannot be used any more by this process");
  }
  throw StepError(describe(call, status));
}

void activate(int device) {
  check("cudaSetDevice", cudaSetDevice(device));
}

}  // namespace adaptrt::cuda
