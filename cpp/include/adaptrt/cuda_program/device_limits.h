#pragma once

#include <cstddef>
#include <cstdint>

#include "adaptrt/core/dtype.h"
#include "adaptrt/device/device.h"

namespace adaptrt {

/// The most that a GPU did in a measurement.
struct DeviceLimits {
  double copy_bandwidth = 0.0;  ///< bytes per second that a copy on the device reads and writes
  double product_flops = 0.0;   ///< of a product of square matrices by cuda::ProductKernel
};

/// Sizes of a measurement.
struct DeviceLimitSizes {
  std::size_t copy_bytes = 0;     ///< of a copy; more than the caches hold
  std::int64_t product_size = 0;  ///< rows of a square matrix, a multiple of 8
  std::int32_t repeats = 1;       ///< copies, and products, of a try
  std::int32_t tries = 1;         ///< the fastest one counts
};

/// Measures a device on which nothing else runs. `dtype`: float16 or bfloat16. Throws ConfigError for invalid
/// sizes and if the device has too little memory, StepError if it fails.
[[nodiscard]] DeviceLimits measure_device_limits(Device& device, DType dtype, const DeviceLimitSizes& sizes);

}  // namespace adaptrt
