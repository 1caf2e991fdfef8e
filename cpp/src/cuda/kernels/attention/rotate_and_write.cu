#include "cuda/kernels/attention/instantiate.h"
#include "cuda/kernels/attention/rotate_and_write.h"
#include "cuda/kernels/attention/words.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/types.h"

namespace adaptrt::cuda {
namespace {

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

/// One block per token. The work is divided into units: kWidth pairs of a head to rotate, or kWidth elements
/// to copy.
template <typename T, int kWidth>
class RotateAndWrite {
 public:
  using Parameters = AttentionStep;
  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerMultiprocessor = 4;

  __device__ static void run(const AttentionStep& step) {
    const auto token = static_cast<std::int32_t>(blockIdx.x);
    const std::int32_t sequence =
        sequence_of_token(step, token, reinterpret_cast<std::int32_t*>(shared_memory()));
    const std::int32_t position = step.positions[token];
    const std::int32_t block = sequence < 0 ? -1 : block_of(step, sequence, position);
    if (block < 0) {
      clear(step, token);
      return;
    }
    const std::int32_t slot = step.tokens_per_block.remainder(position);
    const std::int32_t units_of_value = step.head_dim / kWidth;
    const std::int32_t units_of_turned = units_of_value - step.rotary_half / kWidth;
    const std::int32_t query_units = step.num_heads * units_of_turned;
    const std::int32_t key_units = step.num_kv_heads * units_of_turned;
    const std::int32_t value_units = step.num_kv_heads * units_of_value;
    for (auto unit = static_cast<std::int32_t>(threadIdx.x); unit < query_units + key_units + value_units;
         unit += kThreads) {
      if (unit < query_units) {
        const std::int32_t head = unit / units_of_turned;
        const std::int64_t from = static_cast<std::int64_t>(token) * step.query_stride + head * step.head_dim;
        const std::int64_t to = (static_cast<std::int64_t>(token) * step.num_heads + head) * step.head_dim;
        turn(step, token, unit % units_of_turned, static_cast<const T*>(step.query) + from,
             static_cast<T*>(step.rotated_query) + to);
      } else if (unit < query_units + key_units) {
        const std::int32_t kv_head = (unit - query_units) / units_of_turned;
        turn(step, token, (unit - query_units) % units_of_turned, source(step, step.key, token, kv_head),
             static_cast<T*>(step.kv_pool) + key_offset(step, block, kv_head, slot));
      } else {
        const std::int32_t kv_head = (unit - query_units - key_units) / units_of_value;
        const std::int32_t at = (unit - query_units - key_units) % units_of_value * kWidth;
        T* to = static_cast<T*>(step.kv_pool) + key_offset(step, block, kv_head, slot) + value_offset(step);
        Elements<T, kWidth>::load(source(step, step.value, token, kv_head) + at).store(to + at);
      }
    }
  }

 private:
  /// Sets the result of a token that attends to nothing to zero.
  __device__ static void clear(const AttentionStep& step, std::int32_t token) {
    const std::int32_t width = step.num_heads * step.head_dim;
    T* out = static_cast<T*>(step.attended) + static_cast<std::int64_t>(token) * width;
    for (auto at = static_cast<std::int32_t>(threadIdx.x) * kWidth; at < width; at += kThreads * kWidth) {
      const Elements<T, kWidth> zeros{};
      zeros.store(out + at);
    }
  }

  __device__ static const T* source(const AttentionStep& step, const void* from, std::int32_t token,
                                    std::int32_t kv_head) {
    return static_cast<const T*>(from) + static_cast<std::int64_t>(token) * step.kv_stride +
           kv_head * step.head_dim;
  }

  /// Rotates unit `unit` of a head: element i of the first half of the rotated part pairs with element i of
  /// the second half.
  __device__ static void turn(const AttentionStep& step, std::int32_t token, std::int32_t unit, const T* from,
                              T* to) {
    using Vector = Elements<T, kWidth>;
    const std::int32_t half = step.rotary_half;
    const std::int32_t first = unit * kWidth;
    if (first >= half) {
      Vector::load(from + half + first).store(to + half + first);
      return;
    }
    const float* cosine = step.cosine + static_cast<std::int64_t>(token) * half + first;
    const float* sine = step.sine + static_cast<std::int64_t>(token) * half + first;
    Vector a = Vector::load(from + first);
    Vector b = Vector::load(from + half + first);
    ADAPTRT_UNROLL
    for (int i = 0; i < kWidth; ++i) {
      const float turned = a.values[i] * cosine[i] - b.values[i] * sine[i];
      b.values[i] = b.values[i] * cosine[i] + a.values[i] * sine[i];
      a.values[i] = turned;
    }
    a.store(to + first);
    b.store(to + half + first);
  }
};

}  // namespace

void launch_rotate_and_write(const AttentionStep& step, DType dtype, void* stream) {
  constexpr int kWide = 8;
  const LaunchShape shape{.x = static_cast<std::uint32_t>(step.tokens), .shared_bytes = sizeof(std::int32_t)};
  const bool wide = step.head_dim % kWide == 0 && step.rotary_half % kWide == 0;
  with_element_type(dtype, [&]<typename T>(TypeTag<T>) {
    if (wide) {
      launch<RotateAndWrite<T, kWide>>(shape, step, stream);
    } else {
      launch<RotateAndWrite<T, 1>>(shape, step, stream);
    }
  });
}

}  // namespace adaptrt::cuda
