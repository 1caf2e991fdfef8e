#pragma once

#include <cstdint>

#include "cuda/kernels/lora/step.h"
#include "cuda/kernels/platform.h"
#include "cuda/kernels/ptx.h"
#include "cuda/kernels/types.h"

namespace adaptrt::cuda::lora {

/// True if rows with this stride, in elements, can be loaded as vectors.
__device__ inline bool rows_are_aligned(const void* rows, std::int64_t stride) {
  return reinterpret_cast<std::uintptr_t>(rows) % sizeof(Vector16) == 0 && stride % kVector == 0;
}

/// Elements k .. k + 7 of a row of `width`, loaded one by one; zeros from `width` on.
template <typename T>
__device__ inline Vector16 gather_vector(const T* row, int k, int width) {
  Vector16 vector = {{0, 0, 0, 0}};
  ADAPTRT_UNROLL
  for (int i = 0; i < kVector; ++i) {
    if (k + i < width) vector.words[i / 2] |= static_cast<std::uint32_t>(row[k + i].bits) << (16 * (i % 2));
  }
  return vector;
}

/// Copies 8 elements to shared memory, one by one; zeros from `width` on. It needs few registers.
template <typename T>
__device__ inline void copy_elements(unsigned char* shared, const T* from, int width) {
  T* const to = reinterpret_cast<T*>(shared);
  ADAPTRT_NO_UNROLL
  for (int i = 0; i < kVector; ++i) to[i].bits = i < width ? from[i].bits : std::uint16_t{0};
}

/// How rows are loaded: as vectors if all of them are aligned and complete, else element by element.
enum class Rows : bool { kAnyhow, kOfVectors };

/// Loads elements k .. k + 7 from memory that no thread writes while the kernel runs.
template <Rows kRows, typename T>
__device__ inline Vector16 load_vector(const T* row, int k, int width) {
  if constexpr (kRows == Rows::kAnyhow) return gather_vector(row, k, width);
  return k < width ? load_read_only_16(row + k) : Vector16{{0, 0, 0, 0}};
}

/// Loads elements k .. k + 7 from memory that an earlier kernel or this thread writes.
template <Rows kRows, typename T>
__device__ inline Vector16 load_own_vector(const T* row, int k, int width) {
  if constexpr (kRows == Rows::kAnyhow) return gather_vector(row, k, width);
  return k < width ? *reinterpret_cast<const Vector16*>(row + k) : Vector16{{0, 0, 0, 0}};
}

/// Stores elements k .. k + 7 of a row of `width`, except those from `width` on.
template <Rows kRows, typename T>
__device__ inline void store_vector(T* row, int k, int width, const Vector16& vector) {
  if constexpr (kRows == Rows::kOfVectors) {
    if (k < width) *reinterpret_cast<Vector16*>(row + k) = vector;
  } else {
    ADAPTRT_UNROLL
    for (int i = 0; i < kVector; ++i) {
      if (k + i < width) row[k + i].bits = static_cast<std::uint16_t>(vector.words[i / 2] >> (16 * (i % 2)));
    }
  }
}

/// Adds the products of 32 columns to d[16, 8]. A thread's vector holds eight adjacent columns of its row,
/// while mma_16x8x16 expects four separate pairs. The result is the same if both factors use the same order,
/// so rows go from memory to registers unchanged.
template <typename T>
__device__ inline void multiply_32(float (&d)[4], const Vector16& a_row, const Vector16& a_row_8,
                                   const Vector16& b_row) {
  ADAPTRT_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int w = 2 * half;
    mma_16x8x16<T>(d, {a_row.words[w], a_row_8.words[w], a_row.words[w + 1], a_row_8.words[w + 1]},
                   {b_row.words[w], b_row.words[w + 1]});
  }
}

inline constexpr int kColumnsOfMultiply = 32;

/// Elements `column` .. `column + 7` of a part's magnitudes and shifts.
class RowVectors {
 public:
  /// `magnitude` and `shift` are nullptr without any; elements from `width` on are not read.
  __device__ RowVectors(const float* magnitude, const float* shift, int column, int width) {
    ADAPTRT_UNROLL
    for (int i = 0; i < kVector; ++i) {
      const bool exists = column + i < width;
      factors_[i] = magnitude != nullptr && exists ? magnitude[column + i] : 1.0F;
      shifts_[i] = shift != nullptr && exists ? shift[column + i] : 0.0F;
    }
  }

  /// Written with fmaf, so that every kernel rounds in the same way.
  [[nodiscard]] __device__ float apply(float value, int i) const {
    return fmaf(value, factors_[i], shifts_[i]);
  }

 private:
  float factors_[kVector];
  float shifts_[kVector];
};

}  // namespace adaptrt::cuda::lora
