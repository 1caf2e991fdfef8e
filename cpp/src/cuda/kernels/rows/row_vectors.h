#pragma once

#include <cstdint>
#include <string>

#include "cuda/kernels/divisor.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/platform.h"
#include "cuda/kernels/rows/checks.h"
#include "cuda/kernels/rows/elements.h"

namespace adaptrt::cuda::rows {

/// The vectors of a matrix, if a launch has a thread for each of them.
class RowVectors {
 public:
  RowVectors() = default;
  /// `width` is a multiple of 8. Throws ConfigError that names the kernel if there are too many vectors.
  RowVectors(const char* name_of_rows, std::int64_t rows, std::int64_t width, const char* kernel)
      : width_(static_cast<std::int32_t>(width / kVector)) {
    const std::int64_t count = rows * (width / kVector);
    Checks().count((std::string(name_of_rows) + " * width / 8").c_str(), count).done(kernel);
    count_ = static_cast<std::int32_t>(count);
  }

  template <typename Kernel>
  [[nodiscard]] LaunchShape shape() const {
    return {.x = blocks_for(count_, Kernel::kThreads), .overlaps_previous = true};
  }

  /// The number of this thread's vector; -1: there is none.
  template <int kThreads>
  [[nodiscard]] __device__ std::int32_t own() const {
    const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    return index < count_ ? static_cast<std::int32_t>(index) : -1;
  }
  [[nodiscard]] __device__ std::int32_t row(std::int32_t vector) const { return width_.quotient(vector); }
  [[nodiscard]] __device__ std::int32_t column(std::int32_t vector) const { return width_.remainder(vector); }
  /// Vectors of a row.
  [[nodiscard]] __device__ std::int32_t width() const { return width_.value(); }

 private:
  std::int32_t count_ = 0;
  Divisor width_;
};

}  // namespace adaptrt::cuda::rows
