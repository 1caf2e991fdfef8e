#pragma once

#include <memory>
#include <utility>

#include "cuda_op.h"

namespace adaptrt {

/// Calls the function of the kernel's header.
template <typename Kernel>
void enqueue_kernel(const Kernel& kernel, void* stream) {
  enqueue(kernel, stream);
}

/// An op that is one launch of a kernel. `fill` sets what differs from run to run.
template <typename Kernel, typename Fill>
class SingleLaunch final : public CudaOp {
 public:
  SingleLaunch(Kernel kernel, Fill fill) : kernel_(kernel), fill_(std::move(fill)) {}

  void enqueue(const CudaRun& run) const override {
    Kernel kernel = kernel_;
    fill_(kernel, run);
    enqueue_kernel(kernel, run.stream);
  }

 private:
  Kernel kernel_;
  Fill fill_;
};

template <typename Kernel, typename Fill>
std::unique_ptr<const CudaOp> make_launch(const Kernel& kernel, Fill fill) {
  return std::make_unique<SingleLaunch<Kernel, Fill>>(kernel, std::move(fill));
}

}  // namespace adaptrt
