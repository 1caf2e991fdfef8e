#pragma once

#include <bit>
#include <cstdint>

#include "cuda/kernels/platform.h"

namespace adaptrt::cuda {

/// Division by a number known at launch, as a multiplication. With l = ceil(log2 divisor) and m = ceil(2^(31
/// + l) / divisor), floor(n m / 2^(31 + l)) is the quotient for every n below 2^31 (Granlund and Montgomery,
/// "Division by invariant integers using multiplication", theorem 4.2).
class Divisor {
 public:
  Divisor() = default;
  /// `divisor` is at least 1.
  explicit Divisor(std::int32_t divisor)
      : divisor_(divisor),
        shift_(31 + std::bit_width(static_cast<std::uint32_t>(divisor) - 1U)),
        factor_(((std::uint64_t{1} << shift_) + static_cast<std::uint64_t>(divisor) - 1) /
                static_cast<std::uint64_t>(divisor)) {}

  [[nodiscard]] __host__ __device__ std::int32_t value() const { return divisor_; }
  /// n / divisor and n % divisor, for n >= 0.
  [[nodiscard]] __host__ __device__ std::int32_t quotient(std::int32_t n) const {
    return static_cast<std::int32_t>((static_cast<std::uint64_t>(static_cast<std::uint32_t>(n)) * factor_) >>
                                     shift_);
  }
  [[nodiscard]] __host__ __device__ std::int32_t remainder(std::int32_t n) const {
    return n - quotient(n) * divisor_;
  }

 private:
  std::int32_t divisor_ = 1;
  std::int32_t shift_ = 31;
  std::uint64_t factor_ = std::uint64_t{1} << 31;
};

}  // namespace adaptrt::cuda
