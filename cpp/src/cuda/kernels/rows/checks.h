#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "adaptrt/core/dtype.h"
#include "adaptrt/core/error.h"
#include "cuda/kernels/rows/elements.h"

namespace adaptrt::cuda::rows {

/// CUDA's maximum of a grid's x.
inline constexpr std::int64_t kMaxBlocks = std::numeric_limits<std::int32_t>::max();

/// Collects the invalid sizes and types of one launch.
class Checks {
 public:
  Checks& type(DType dtype) {
    if (dtype == DType::kFloat32) problems_.add("dtype is float32; expected float16 or bfloat16");
    return *this;
  }

  /// A number of rows or elements, from 0 to `most`.
  Checks& count(const char* name, std::int64_t value, std::int64_t most = kMaxBlocks) {
    if (value < 0 || value > most) refuse(name, value, "0 to " + std::to_string(most));
    return *this;
  }

  Checks& positive(const char* name, std::int64_t value, std::int64_t most = kMaxBlocks) {
    if (value < 1 || value > most) refuse(name, value, "1 to " + std::to_string(most));
    return *this;
  }

  /// A number of elements that are loaded as vectors.
  Checks& vectors(const char* name, std::int64_t value, std::int64_t least, std::int64_t most = kMaxBlocks) {
    if (value < least || value > most || value % kVector != 0) {
      refuse(name, value, "a multiple of 8 from " + std::to_string(least) + " to " + std::to_string(most));
    }
    return *this;
  }

  Checks& condition(bool holds, const char* problem) {
    if (!holds) problems_.add(problem);
    return *this;
  }

  /// Throws ConfigError if there are problems.
  void done(const char* kernel) const { problems_.throw_if_any<ConfigError>(kernel); }

 private:
  void refuse(const char* name, std::int64_t value, const std::string& expected) {
    problems_.add(std::string(name) + " is " + std::to_string(value) + "; expected " + expected);
  }

  Problems problems_;
};

inline std::uint32_t blocks_for(std::int64_t items, int per_block) {
  return static_cast<std::uint32_t>((items + per_block - 1) / per_block);
}

}  // namespace adaptrt::cuda::rows
