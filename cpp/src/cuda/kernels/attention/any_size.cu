#include "cuda/kernels/attention/any_size.h"
#include "cuda/kernels/attention/instantiate.h"
#include "cuda/kernels/attention/softmax.h"
#include "cuda/kernels/attention/tile_sums.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/ptx.h"
#include "cuda/kernels/types.h"
#include "cuda/kernels/warp_sums.h"

namespace adaptrt::cuda {
namespace {

/// A warp computes one query head of one token, 32 keys at a time. Each thread has the score of one key, and
/// then dimensions lane, lane + 32, ... of every value.
template <typename T, KvFormat kFormat>
class AnySize {
 public:
  using Parameters = AttentionStep;
  static constexpr int kThreads = kWarpSize;
  static constexpr int kBlocksPerMultiprocessor = 16;

  __device__ static void run(const AttentionStep& step) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const auto token = static_cast<std::int32_t>(blockIdx.x);
    const auto head = static_cast<std::int32_t>(blockIdx.y);
    const auto [sequence, position, block] =
        place_of_token(step, token, reinterpret_cast<std::int32_t*>(shared_memory()));
    __syncwarp();
    if (block < 0) return;
    const auto lane = static_cast<std::int32_t>(threadIdx.x);
    const std::int64_t row = (static_cast<std::int64_t>(token) * step.num_heads + head) * step.head_dim;
    T* out = static_cast<T*>(step.attended) + row;
    const T* query = static_cast<const T*>(step.rotated_query) + row;
    float* sums = reinterpret_cast<float*>(shared_memory());
    for (std::int32_t d = lane; d < step.head_dim; d += kWarpSize) sums[d] = 0.0F;
    const std::int32_t kv_head = step.group.quotient(head);
    float maximum = kMinusInfinity;
    float total = 0.0F;
    for (std::int32_t first = first_visible(step, position); first <= position; first += kWarpSize) {
      const std::int32_t key = first + lane;
      const Row found = key <= position ? row_at(step, sequence, kv_head, key, 0) : Row{};
      const float score = found.is_none() ? kMinusInfinity : score_of(step, query, found) * step.scale;
      const float greatest = maximum_over_lanes(fmaxf(maximum, score));
      const float factor = rescale_factor(maximum, greatest);
      const float weight = rescale_factor(score, greatest);
      maximum = greatest;
      total = total * factor + sum_over_lanes(weight);
      for (std::int32_t d = lane; d < step.head_dim; d += kWarpSize) sums[d] *= factor;
      const std::int32_t keys = position - first + 1 < kWarpSize ? position - first + 1 : kWarpSize;
      for (std::int32_t i = 0; i < keys; ++i) {
        const float weight_of_key = __shfl_sync(kAllLanes, weight, i);
        const Row value = row_at(step, sequence, kv_head, first + i, 1);
        if (value.is_none()) continue;
        for (std::int32_t d = lane; d < step.head_dim; d += kWarpSize)
          sums[d] += weight_of_key * value.element(d);
      }
    }
    const float inverse = 1.0F / total_with_sink(step, head, {maximum, total});
    for (std::int32_t d = lane; d < step.head_dim; d += kWarpSize) out[d] = from_float<T>(sums[d] * inverse);
  }

 private:
  /// A key or a value in the pool.
  struct Row {
    const T* plain = nullptr;
    const std::int8_t* integers = nullptr;
    float scale = 0.0F;

    [[nodiscard]] __device__ bool is_none() const { return plain == nullptr && integers == nullptr; }
    [[nodiscard]] __device__ float element(std::int32_t i) const {
      if constexpr (kFormat == KvFormat::kInt8) return to_float(dequantized<T>(integers[i], scale));
      return to_float(plain[i]);
    }
  };

  /// No row if the table has no block.
  __device__ static Row row_at(const AttentionStep& step, std::int32_t sequence, std::int32_t kv_head,
                               std::int32_t key, int is_value) {
    const std::int32_t block = block_of(step, sequence, key);
    if (block < 0) return {};
    const std::int32_t slot = step.tokens_per_block.remainder(key);
    if constexpr (kFormat == KvFormat::kInt8) {
      const Int8Row row = int8_row(step, block, is_value, kv_head, slot);
      return {nullptr, row.elements, *row.scale};
    }
    return {static_cast<const T*>(step.kv_pool) + key_offset(step, block, kv_head, slot) +
                is_value * value_offset(step),
            nullptr, 0.0F};
  }

  /// The score before scaling.
  __device__ static float score_of(const AttentionStep& step, const T* query, const Row& key) {
    const float score = product(query, key, step.head_dim);
    return step.softcap == 0.0F ? score : bounded(score, step.softcap, step.exponent);
  }

  __device__ static float product(const T* a, const Row& b, std::int32_t size) {
    float sum = 0.0F;
    for (std::int32_t d = 0; d < size; ++d) sum += to_float(a[d]) * b.element(d);
    return sum;
  }
};

}  // namespace

void launch_any_size(const AttentionStep& step, DType dtype, void* stream) {
  with_element_type(dtype, [&]<typename T>(TypeTag<T>) {
    with_kv_format(step.int8_pool, [&]<KvFormat kFormat>(FormatTag<kFormat>) {
      launch<AnySize<T, kFormat>>({.x = static_cast<std::uint32_t>(step.tokens),
                                   .y = static_cast<std::uint32_t>(step.num_heads),
                                   .shared_bytes = static_cast<std::size_t>(step.head_dim) * sizeof(float),
                                   .overlaps_previous = true},
                                  step, stream);
    });
  });
}

}  // namespace adaptrt::cuda
