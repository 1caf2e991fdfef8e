#pragma once

#include <cstdint>

#include "cuda/kernels/attention/step.h"
#include "cuda/kernels/attention/words.h"
#include "cuda/kernels/types.h"

namespace adaptrt::cuda {

/// How a pool stores keys and values.
enum class KvFormat : bool { kPlain, kInt8 };

/// A key or a value of an int8 pool, in device memory. A block of the pool has integers [2, num_kv_heads,
/// tokens_per_block, head_dim], and then their scales, float32 [2, num_kv_heads, tokens_per_block].
struct Int8Row {
  std::int8_t* elements;
  float* scale;
};

/// is_value: 0 for the key, 1 for the value.
__device__ inline Int8Row int8_row(const AttentionStep& step, std::int32_t block, int is_value,
                                   std::int32_t kv_head, std::int32_t slot) {
  const std::int64_t rows = std::int64_t{2} * step.num_kv_heads * step.tokens_per_block.value();
  const std::int64_t row =
      (static_cast<std::int64_t>(is_value) * step.num_kv_heads + kv_head) * step.tokens_per_block.value() +
      slot;
  constexpr auto kScaleBytes = static_cast<std::int64_t>(sizeof(float));
  auto* begin = static_cast<std::int8_t*>(step.kv_pool) + block * rows * (step.head_dim + kScaleBytes);
  return {begin + row * step.head_dim, reinterpret_cast<float*>(begin + rows * step.head_dim) + row};
}

/// The value of an element, rounded to T, so that all kernels multiply the same numbers.
template <typename T>
__device__ inline T dequantized(std::int8_t element, float scale) {
  return from_float<T>(static_cast<float>(element) * scale);
}

/// The values of eight elements.
template <typename T>
__device__ inline Words<4> dequantized(const std::int8_t* elements, float scale) {
  const Words<2> integers = load_words<2>(elements);
  const auto integer = [&](int i) {
    return static_cast<float>(static_cast<std::int8_t>(integers.words[i / 4] >> (8 * (i % 4))));
  };
  Words<4> result;
  ADAPTRT_UNROLL
  for (int i = 0; i < 4; ++i) {
    result.words[i] = pack_pair<T>(integer(2 * i) * scale, integer(2 * i + 1) * scale);
  }
  return result;
}

/// Warp: writes a head with one scale, so that its largest element becomes 127. visit(unit, sink) calls
/// sink(index of the first one, elements) for all elements of a unit of the head, each time with the same
/// values. If one is not finite, the scale is NaN, and so is everything that is computed from the head.
template <typename Visit>
__device__ inline void write_int8(const Int8Row& to, std::int32_t units, const Visit& visit) {
  constexpr std::uint32_t kInfinity = 0x7f800000U;
  constexpr std::uint32_t kNan = 0x7fc00000U;
  constexpr float kLeast = 0x1p-100F;      // 127 divided by a smaller number might not be finite
  constexpr float kRounder = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
  const auto lane = static_cast<std::int32_t>(threadIdx.x) % kWarpSize;
  std::uint32_t greatest = 0;
  for (std::int32_t unit = lane; unit < units; unit += kWarpSize) {
    visit(unit, [&](std::int32_t, const auto& elements) {
      ADAPTRT_UNROLL
      for (const float value : elements.values) {
        const std::uint32_t magnitude = __float_as_uint(value) & 0x7fffffffU;
        greatest = magnitude > greatest ? magnitude : greatest;
      }
    });
  }
  ADAPTRT_UNROLL
  for (int bits = kWarpSize / 2; bits > 0; bits /= 2) {
    const std::uint32_t other = __shfl_xor_sync(kAllLanes, greatest, bits);
    greatest = other > greatest ? other : greatest;
  }
  const bool is_finite = greatest < kInfinity;
  const float largest = __uint_as_float(greatest);
  const bool is_zero = largest < kLeast;
  if (lane == 0) {
    *to.scale = !is_finite ? __uint_as_float(kNan) : is_zero ? 0.0F : largest / 127.0F;
  }
  const float factor = is_finite && !is_zero ? 127.0F / largest : 0.0F;
  for (std::int32_t unit = lane; unit < units; unit += kWarpSize) {
    visit(unit, [&](std::int32_t first, const auto& elements) {
      std::int32_t i = first;
      ADAPTRT_UNROLL
      for (const float value : elements.values) {
        const float bounded = fminf(fmaxf(value * factor, -127.0F), 127.0F);
        to.elements[i++] = static_cast<std::int8_t>(__float_as_uint(bounded + kRounder));
      }
    });
  }
}

}  // namespace adaptrt::cuda
