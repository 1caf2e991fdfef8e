#pragma once

#include <cstdint>

#include "cuda/kernels/attention/int8_rows.h"
#include "cuda/kernels/attention/softmax.h"
#include "cuda/kernels/attention/step.h"
#include "cuda/kernels/attention/words.h"
#include "cuda/kernels/types.h"

namespace adaptrt::cuda {

/// kWidth elements that a thread processes at once: 8 (16 bytes), or 1 if the sizes are not multiples of 8.
template <typename T, int kWidth>
struct Elements {
  float values[kWidth];

  __device__ static Elements load(const T* from) {
    Elements result;
    if constexpr (kWidth == 1) {
      result.values[0] = to_float(*from);
    } else {
      const auto words = load_words<kWidth / 2>(from);
      ADAPTRT_UNROLL
      for (int i = 0; i < kWidth / 2; ++i) {
        const FloatPair pair = unpack_pair<T>(words.words[i]);
        result.values[2 * i] = pair.first;
        result.values[2 * i + 1] = pair.second;
      }
    }
    return result;
  }

  __device__ void store(T* to) const {
    if constexpr (kWidth == 1) {
      *to = from_float<T>(values[0]);
    } else {
      Words<kWidth / 2> words;
      ADAPTRT_UNROLL
      for (int i = 0; i < kWidth / 2; ++i) words.words[i] = pack_pair<T>(values[2 * i], values[2 * i + 1]);
      store_words(to, words);
    }
  }
};

/// Rotates the pair (a, b).
__device__ inline void rotate_pair(float* a, float* b, float cosine, float sine) {
  const float turned = rounded_product(*a, cosine) - rounded_product(*b, sine);
  *b = rounded_product(*b, cosine) + rounded_product(*a, sine);
  *a = turned;
}

/// Rotates the pairs of neighbours in two adjacent vectors.
template <typename T, int kWidth>
__device__ inline void rotate_neighbours(Elements<T, kWidth>& a, Elements<T, kWidth>& b, const float* cosine,
                                         const float* sine) {
  if constexpr (kWidth == 1) {
    rotate_pair(&a.values[0], &b.values[0], cosine[0], sine[0]);
  } else {
    ADAPTRT_UNROLL
    for (int i = 0; i < kWidth / 2; ++i) {
      rotate_pair(&a.values[2 * i], &a.values[2 * i + 1], cosine[i], sine[i]);
      rotate_pair(&b.values[2 * i], &b.values[2 * i + 1], cosine[kWidth / 2 + i], sine[kWidth / 2 + i]);
    }
  }
}

/// Rotates unit `unit` of a head, which is kWidth pairs, or takes a unit of kWidth elements that are not
/// rotated. Calls sink(index of the first one, elements) once or twice. Element i of the first half of the
/// rotated part pairs with element i of the second half; if interleaved, with its neighbour. A head has
/// head_dim / kWidth - rotary_half / kWidth units.
template <typename T, int kWidth, typename Sink>
__device__ inline void visit_rotated(const AttentionStep& step, std::int32_t token, std::int32_t unit,
                                     const T* from, const Sink& sink) {
  using Vector = Elements<T, kWidth>;
  const std::int32_t half = step.rotary_half;
  const std::int32_t first = unit * kWidth;
  if (first >= half) {
    sink(half + first, Vector::load(from + half + first));
    return;
  }
  const float* cosine = step.cosine + static_cast<std::int64_t>(token) * half + first;
  const float* sine = step.sine + static_cast<std::int64_t>(token) * half + first;
  // Offsets of the unit's two vectors.
  const std::int32_t low = step.interleaved ? 2 * first : first;
  const std::int32_t high = low + (step.interleaved ? kWidth : half);
  Vector a = Vector::load(from + low);
  Vector b = Vector::load(from + high);
  if (step.interleaved) {
    rotate_neighbours(a, b, cosine, sine);
  } else {
    ADAPTRT_UNROLL
    for (int i = 0; i < kWidth; ++i) rotate_pair(&a.values[i], &b.values[i], cosine[i], sine[i]);
  }
  sink(low, a);
  sink(high, b);
}

/// Stores a rotated unit of a head.
template <typename T, int kWidth>
__device__ inline void rotate_unit(const AttentionStep& step, std::int32_t token, std::int32_t unit,
                                   const T* from, T* to) {
  visit_rotated<T, kWidth>(
      step, token, unit, from,
      [to](std::int32_t first, const Elements<T, kWidth>& elements) { elements.store(to + first); });
}

/// The same of a query, which is multiplied by its factor.
template <typename T, int kWidth>
__device__ inline void rotate_query_unit(const AttentionStep& step, std::int32_t token, float factor,
                                         std::int32_t unit, const T* from, T* to) {
  visit_rotated<T, kWidth>(step, token, unit, from,
                           [to, factor](std::int32_t first, Elements<T, kWidth> elements) {
                             ADAPTRT_UNROLL
                             for (float& value : elements.values) value *= factor;
                             elements.store(to + first);
                           });
}

/// First element of a token's query head, or of its key or value of a KV head, before rotation.
template <typename T>
__device__ inline const T* query_source(const AttentionStep& step, std::int32_t token, std::int32_t head) {
  return static_cast<const T*>(step.query) + static_cast<std::int64_t>(token) * step.query_stride +
         head * step.head_dim;
}
template <typename T>
__device__ inline const T* kv_source(const AttentionStep& step, const void* from, std::int32_t token,
                                     std::int32_t kv_head) {
  return static_cast<const T*>(from) + static_cast<std::int64_t>(token) * step.kv_stride +
         kv_head * step.head_dim;
}

/// Warp: writes a token's rotated key, or its value, of a KV head to an int8 pool.
template <typename T, int kWidth>
__device__ inline void write_int8_key(const AttentionStep& step, std::int32_t token, std::int32_t kv_head,
                                      const Int8Row& to) {
  const T* from = kv_source<T>(step, step.key, token, kv_head);
  const std::int32_t units = step.head_dim / kWidth - step.rotary_half / kWidth;
  write_int8(to, units, [&](std::int32_t unit, const auto& sink) {
    visit_rotated<T, kWidth>(step, token, unit, from, sink);
  });
}
template <typename T, int kWidth>
__device__ inline void write_int8_value(const AttentionStep& step, std::int32_t token, std::int32_t kv_head,
                                        const Int8Row& to) {
  const T* from = kv_source<T>(step, step.value, token, kv_head);
  write_int8(to, step.head_dim / kWidth, [&](std::int32_t unit, const auto& sink) {
    sink(unit * kWidth, Elements<T, kWidth>::load(from + unit * kWidth));
  });
}

}  // namespace adaptrt::cuda
