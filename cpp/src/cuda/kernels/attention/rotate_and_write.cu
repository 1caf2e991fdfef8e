#include <cstdint>
#include <iterator>
#include <span>

#include "cuda/kernels/attention/instantiate.h"
#include "cuda/kernels/attention/rotate_and_write.h"
#include "cuda/kernels/attention/rotation.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/ptx.h"
#include "cuda/kernels/types.h"

namespace adaptrt::cuda {
namespace {

/// One block per token. The work is divided into units: kWidth pairs of a head to rotate, or kWidth elements
/// to copy.
template <typename T, int kWidth, KvFormat kFormat>
class RotateAndWrite {
 public:
  struct Parameters {
    AttentionStep step;
    std::uint32_t* counters;
    std::int64_t num_counters;
  };
  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerMultiprocessor = 4;

  __device__ static void run(const Parameters& parameters) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const AttentionStep& step = parameters.step;
    for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < parameters.num_counters;
         i += std::int64_t{gridDim.x} * kThreads) {
      parameters.counters[i] = 0;
    }
    const auto token = static_cast<std::int32_t>(blockIdx.x);
    const auto [sequence, position, block] =
        place_of_token(step, token, reinterpret_cast<std::int32_t*>(shared_memory()));
    if (block < 0) {
      clear(step, token);
      return;
    }
    const std::int32_t slot = step.tokens_per_block.remainder(position);
    const std::int32_t units_of_value = step.head_dim / kWidth;
    const std::int32_t units_of_turned = units_of_value - step.rotary_half / kWidth;
    const std::int32_t query_units = step.num_heads * units_of_turned;
    const float factor = query_factor(step, position);
    const std::int32_t kv_heads = step.key == nullptr ? 0 : step.num_kv_heads;  // to write
    if constexpr (kFormat == KvFormat::kInt8) {
      for (auto unit = static_cast<std::int32_t>(threadIdx.x); unit < query_units; unit += kThreads) {
        rotate_query(step, token, factor, unit, units_of_turned);
      }
      for (auto i = static_cast<std::int32_t>(threadIdx.x) / kWarpSize; i < 2 * kv_heads;
           i += kThreads / kWarpSize) {
        const std::int32_t kv_head = i / 2;
        const Int8Row to = int8_row(step, block, i % 2, kv_head, slot);
        if (i % 2 == 0) {
          write_int8_key<T, kWidth>(step, token, kv_head, to);
        } else {
          write_int8_value<T, kWidth>(step, token, kv_head, to);
        }
      }
      return;
    }
    const std::int32_t key_units = kv_heads * units_of_turned;
    const std::int32_t value_units = kv_heads * units_of_value;
    for (auto unit = static_cast<std::int32_t>(threadIdx.x); unit < query_units + key_units + value_units;
         unit += kThreads) {
      if (unit < query_units) {
        rotate_query(step, token, factor, unit, units_of_turned);
      } else if (unit < query_units + key_units) {
        const std::int32_t kv_head = (unit - query_units) / units_of_turned;
        rotate_unit<T, kWidth>(step, token, (unit - query_units) % units_of_turned,
                               kv_source<T>(step, step.key, token, kv_head),
                               static_cast<T*>(step.kv_pool) + key_offset(step, block, kv_head, slot));
      } else {
        const std::int32_t kv_head = (unit - query_units - key_units) / units_of_value;
        const std::int32_t at = (unit - query_units - key_units) % units_of_value * kWidth;
        T* to = static_cast<T*>(step.kv_pool) + key_offset(step, block, kv_head, slot) + value_offset(step);
        Elements<T, kWidth>::load(kv_source<T>(step, step.value, token, kv_head) + at).store(to + at);
      }
    }
  }

 private:
  __device__ static void rotate_query(const AttentionStep& step, std::int32_t token, float factor,
                                      std::int32_t unit, std::int32_t units_of_head) {
    const std::int32_t head = unit / units_of_head;
    const std::int64_t to = (static_cast<std::int64_t>(token) * step.num_heads + head) * step.head_dim;
    rotate_query_unit<T, kWidth>(step, token, factor, unit % units_of_head,
                                 query_source<T>(step, token, head),
                                 static_cast<T*>(step.rotated_query) + to);
  }

  /// Sets the result of a token that attends to nothing to zero.
  __device__ static void clear(const AttentionStep& step, std::int32_t token) {
    const std::int32_t width = step.num_heads * step.head_dim;
    T* out = static_cast<T*>(step.attended) + static_cast<std::int64_t>(token) * width;
    for (auto at = static_cast<std::int32_t>(threadIdx.x) * kWidth; at < width; at += kThreads * kWidth) {
      const Elements<T, kWidth> zeros{};
      zeros.store(out + at);
    }
  }
};

}  // namespace

void launch_rotate_and_write(const AttentionStep& step, std::span<std::uint32_t> counters, DType dtype,
                             void* stream) {
  constexpr int kWide = 8;
  const LaunchShape shape{.x = static_cast<std::uint32_t>(step.tokens),
                          .shared_bytes = sizeof(std::int32_t),
                          .overlaps_previous = true};
  const bool wide = step.head_dim % kWide == 0 && step.rotary_half % kWide == 0;
  with_element_type(dtype, [&]<typename T>(TypeTag<T>) {
    with_kv_format(step.int8_pool, [&]<KvFormat kFormat>(FormatTag<kFormat>) {
      if (wide) {
        launch<RotateAndWrite<T, kWide, kFormat>>(shape, {step, counters.data(), std::ssize(counters)},
                                                  stream);
      } else {
        launch<RotateAndWrite<T, 1, kFormat>>(shape, {step, counters.data(), std::ssize(counters)}, stream);
      }
    });
  });
}

}  // namespace adaptrt::cuda
