#pragma once

#include <cstdint>

#include "adaptrt/core/dtype.h"

namespace adaptrt::cuda {

/// Matrix product of a linear layer on an NVIDIA GPU, with the same bits in any batch:
///
///   y[token, out] = round(sum over in of x[token, in] * weights[out, in])
///
/// Products are exact, sums are float32, and round() rounds to the type of y. Each sum adds its inputs in
/// order, sixteen at a time, for any number of tokens. So no bit of a token's y depends on the step's other
/// tokens. See cpp/src/cuda/kernels/product/README.md.
class ProductKernel {
 public:
  struct Config {
    DType dtype = DType::kBFloat16;  ///< float16 or bfloat16
    std::int32_t in_size = 0;        ///< a multiple of 8
    std::int32_t out_size = 0;       ///< a multiple of 8
    /// Uses the kernel that runs on every GPU, even on a GPU with a faster one. Both give the same bits.
    bool portable = false;
    /// y is float32, and not rounded.
    bool float32_output = false;
  };

  /// Addresses on the device, aligned to 16 bytes.
  struct Inputs {
    const void* x = nullptr;        ///< [tokens, in]
    const void* weights = nullptr;  ///< [out, in]; complete before enqueue is called
  };

  /// Throws ConfigError that lists every invalid field.
  explicit ProductKernel(Config config);

  /// Enqueues one launch on `stream` (a cudaStream_t). y is [tokens, out], of the type of x or float32. The
  /// kernel prefetches weights while the previous kernel still runs, so no work in the stream may still write
  /// them. Throws ConfigError for invalid arguments, and StepError if CUDA rejects the launch.
  void enqueue(std::int64_t tokens, const Inputs& inputs, void* y, void* stream) const;

 private:
  Config config_;
};

}  // namespace adaptrt::cuda
