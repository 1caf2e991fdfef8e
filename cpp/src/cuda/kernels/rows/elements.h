#pragma once

#include <cstdint>

#include "cuda/kernels/platform.h"
#include "cuda/kernels/ptx.h"
#include "cuda/kernels/types.h"

namespace adaptrt::cuda::rows {

/// Number of elements that a thread computes at a time.
inline constexpr int kVector = 8;

/// Eight adjacent elements of a row, in float32.
struct Elements {
  float values[kVector];

  template <typename Function>
  __device__ void for_each(const Function& function) {
    ADAPTRT_UNROLL
    for (int i = 0; i < kVector; ++i) values[i] = function(values[i], i);
  }
};

/// Unpacks a vector of T.
template <typename T>
__device__ inline Elements unpack(const Vector16& vector) {
  Elements result;
  ADAPTRT_UNROLL
  for (int i = 0; i < kVector / 2; ++i) {
    const FloatPair pair = unpack_pair<T>(vector.words[i]);
    result.values[2 * i] = pair.first;
    result.values[2 * i + 1] = pair.second;
  }
  return result;
}

__device__ inline Elements join(const Vector16& low, const Vector16& high) {
  Elements result;
  ADAPTRT_UNROLL
  for (int i = 0; i < kVector / 2; ++i) {
    result.values[i] = __uint_as_float(low.words[i]);
    result.values[i + kVector / 2] = __uint_as_float(high.words[i]);
  }
  return result;
}

/// Vector `index` of a tensor of T or float that earlier kernels may have written.
template <typename T>
__device__ inline Elements load(const void* tensor, std::int64_t index) {
  return unpack<T>(static_cast<const Vector16*>(tensor)[index]);
}
template <>
__device__ inline Elements load<float>(const void* tensor, std::int64_t index) {
  const auto* vectors = static_cast<const Vector16*>(tensor) + 2 * index;
  return join(vectors[0], vectors[1]);
}

/// The same, of a tensor that no kernel in the stream writes. It may be called before
/// wait_for_previous_kernel().
template <typename T>
__device__ inline Elements load_constant(const void* tensor, std::int64_t index) {
  return unpack<T>(load_read_only_16(static_cast<const Vector16*>(tensor) + index));
}
template <>
__device__ inline Elements load_constant<float>(const void* tensor, std::int64_t index) {
  const auto* vectors = static_cast<const Vector16*>(tensor) + 2 * index;
  return join(load_read_only_16(vectors), load_read_only_16(vectors + 1));
}

/// Rounds to T and stores vector `index` of a tensor.
template <typename T>
__device__ inline void store(void* tensor, std::int64_t index, const Elements& elements) {
  Vector16 vector;
  ADAPTRT_UNROLL
  for (int i = 0; i < kVector / 2; ++i) {
    vector.words[i] = pack_pair<T>(elements.values[2 * i], elements.values[2 * i + 1]);
  }
  static_cast<Vector16*>(tensor)[index] = vector;
}
template <>
__device__ inline void store<float>(void* tensor, std::int64_t index, const Elements& elements) {
  Vector16 low;
  Vector16 high;
  ADAPTRT_UNROLL
  for (int i = 0; i < kVector / 2; ++i) {
    low.words[i] = __float_as_uint(elements.values[i]);
    high.words[i] = __float_as_uint(elements.values[i + kVector / 2]);
  }
  auto* vectors = static_cast<Vector16*>(tensor) + 2 * index;
  vectors[0] = low;
  vectors[1] = high;
}

}  // namespace adaptrt::cuda::rows
