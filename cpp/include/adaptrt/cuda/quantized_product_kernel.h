#pragma once

#include <cstdint>

#include "adaptrt/core/dtype.h"

namespace adaptrt::cuda {

/// ProductKernel for weights of 8 or 4 bits, which are scaled in groups of inputs:
///
///   y[token, out] = round(sum over groups of scale * (sum over the group's inputs of x * (u - zero)))
///
/// The integers u - zero are exact in the type of x. Sums are float32. Each sum adds its inputs in order,
/// sixteen at a time, and then the groups in order, for any number of tokens.
class QuantizedProductKernel {
 public:
  struct Config {
    DType dtype = DType::kBFloat16;  ///< type of x: float16 or bfloat16
    std::int32_t bits = 8;           ///< of a weight: 8 or 4
    std::int32_t in_size = 0;        ///< a multiple of 16 with 8 bits, of 32 with 4 bits
    std::int32_t out_size = 0;       ///< a multiple of 8
    std::int32_t group_size = 0;     ///< a multiple of 16; 0: all inputs are one group
    /// y is float32, and not rounded.
    bool float32_output = false;

    /// Number of groups of an output.
    [[nodiscard]] std::int32_t groups() const {
      return group_size == 0 ? 1 : (in_size + group_size - 1) / group_size;
    }
  };

  /// Addresses on the device. x, weights and y are aligned to 16 bytes, scales to 4.
  struct Inputs {
    const void* x = nullptr;  ///< [tokens, in]
    /// 8 bits: int8 u - 128 [out, in]. 4 bits: uint8 [out, in / 2], the first of two u in the lower half.
    const void* weights = nullptr;
    const float* scales = nullptr;        ///< [out, groups]
    const std::uint8_t* zeros = nullptr;  ///< [out, groups]; nullptr: 8 with 4 bits, 128 with 8 bits
  };

  /// Throws ConfigError that lists every invalid field.
  explicit QuantizedProductKernel(Config config);

  /// Enqueues one launch on `stream` (a cudaStream_t). y is [tokens, out], of the type of x or float32.
  /// Throws ConfigError for invalid arguments, and StepError if CUDA rejects the launch.
  void enqueue(std::int64_t tokens, const Inputs& inputs, void* y, void* stream) const;

 private:
  Config config_;
};

}  // namespace adaptrt::cuda
