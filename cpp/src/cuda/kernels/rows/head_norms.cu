#include <algorithm>
#include <cstdint>
#include <string>

#include "adaptrt/cuda/row_kernels.h"
#include "cuda/kernels/divisor.h"
#include "cuda/kernels/element_type.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/rows/block_sum.h"
#include "cuda/kernels/rows/checks.h"
#include "cuda/kernels/rows/elements.h"
#include "cuda/kernels/warp_sums.h"

namespace adaptrt::cuda {
namespace {

/// Columns of a group that one warp normalises: a vector per thread.
constexpr std::int64_t kMaxWarpSize = std::int64_t{kWarpSize} * rows::kVector;

/// Groups in units of vectors.
struct GroupVectors {
  std::int32_t first;
  std::int32_t count;
  std::int32_t size;
  const float* weight;
};

struct HeadNormsStep {
  void* qkv;
  std::int64_t groups;  ///< of all tokens
  std::int64_t stride;  ///< vectors of a row
  Divisor groups_per_token;
  GroupVectors queries;
  GroupVectors keys;
  GroupVectors values;
  void* values_from_keys;
  float epsilon;
  std::int32_t half;  ///< vectors of a half of the rotated part; 0: groups are not rotated
  bool interleaved;   ///< elements 2 i and 2 i + 1 of a group rotate together
  const float* cosine;
  const float* sine;

  struct Group {
    std::int64_t token;
    std::int64_t first;  ///< vector of the tensor
    std::int32_t size;
    const float* weight;
    bool is_rotated;
    /// For a key that is also a value before its norm: vector of the value in values_from_keys; otherwise -1.
    std::int64_t value;
  };

  /// Group `index` of all tokens.
  [[nodiscard]] __device__ Group group(std::int64_t index) const {
    const auto i = static_cast<std::int32_t>(index);
    const std::int64_t token = groups_per_token.quotient(i);
    const std::int32_t number = groups_per_token.remainder(i);
    const bool is_query = number < queries.count;
    const bool is_value = number >= queries.count + keys.count;
    const GroupVectors& columns = is_query ? queries : is_value ? values : keys;
    const std::int32_t before = is_query ? 0 : is_value ? queries.count + keys.count : queries.count;
    const std::int64_t at = std::int64_t{number - before} * columns.size;
    const bool has_value = values_from_keys != nullptr && !is_query;
    return {token,
            token * stride + columns.first + at,
            columns.size,
            columns.weight,
            half > 0 && !is_value,
            has_value ? token * stride + at : -1};
  }
};

__device__ inline float sum_of_squares(const rows::Elements& elements) {
  float sum = 0.0F;
  ADAPTRT_UNROLL
  for (int i = 0; i < rows::kVector; ++i) sum += elements.values[i] * elements.values[i];
  return sum;
}

__device__ inline float factor_of(const HeadNormsStep& step, float squares, std::int32_t vectors) {
  return rsqrtf(squares / static_cast<float>(vectors * rows::kVector) + step.epsilon);
}

template <typename T>
__device__ inline void store_scaled(const HeadNormsStep& step, std::int64_t at, rows::Elements elements,
                                    float factor, const rows::Elements& weight) {
  elements.for_each([&](float value, int i) { return value * factor * weight.values[i]; });
  rows::store<T>(step.qkv, at, elements);
}

/// Stores vector `index` of a group's value, if the group is a key that is also a value.
template <typename T>
__device__ inline void store_value(const HeadNormsStep& step, const HeadNormsStep::Group& group,
                                   std::int32_t index, rows::Elements elements, float factor) {
  if (group.value < 0) return;
  const rows::Elements weight = rows::load_constant<float>(step.values.weight, index);
  elements.for_each([&](float value, int i) { return value * factor * weight.values[i]; });
  rows::store<T>(step.values_from_keys, group.value + index, elements);
}

/// Rotates the neighbours in vector `index` of a group.
__device__ inline rows::Elements rotate_neighbours(const HeadNormsStep& step,
                                                   const HeadNormsStep::Group& group, std::int32_t index,
                                                   rows::Elements own) {
  constexpr int kPairs = rows::kVector / 2;
  const std::int64_t first = group.token * step.half * rows::kVector + std::int64_t{index} * kPairs;
  ADAPTRT_UNROLL
  for (int i = 0; i < kPairs; ++i) {
    const float cosine = step.cosine[first + i];
    const float sine = step.sine[first + i];
    float& a = own.values[2 * i];
    float& b = own.values[2 * i + 1];
    const float turned = a * cosine - b * sine;
    b = b * cosine + a * sine;
    a = turned;
  }
  return own;
}

/// Rotates vector `index` of a group. Other threads must not store the group's vectors yet.
template <typename T>
__device__ inline rows::Elements rotate(const HeadNormsStep& step, const HeadNormsStep::Group& group,
                                        std::int32_t index, rows::Elements own) {
  if (index >= 2 * step.half) return own;
  if (step.interleaved) return rotate_neighbours(step, group, index, own);
  const bool is_first = index < step.half;
  const std::int64_t partner = group.first + (is_first ? index + step.half : index - step.half);
  const rows::Elements other = rows::load<T>(step.qkv, partner);
  const std::int64_t angles = group.token * step.half + index % step.half;
  const rows::Elements cosine = rows::load<float>(step.cosine, angles);
  const rows::Elements sine = rows::load<float>(step.sine, angles);
  own.for_each([&](float value, int i) {
    const float turned = other.values[i] * sine.values[i];
    return value * cosine.values[i] + (is_first ? -turned : turned);
  });
  return own;
}

/// One warp per group of up to kMaxWarpSize columns.
template <typename T>
class WarpHeadNorms {
 public:
  using Parameters = HeadNormsStep;
  static constexpr int kThreads = 128;
  static constexpr int kBlocksPerMultiprocessor = 8;
  static constexpr int kGroupsPerBlock = kThreads / kWarpSize;
  static constexpr std::size_t kSharedBytes = 0;

  __device__ static void run(const HeadNormsStep& step) {
    allow_next_kernel();
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kGroupsPerBlock + thread / kWarpSize;
    const bool has_group = index < step.groups;
    const HeadNormsStep::Group group = step.group(has_group ? index : 0);
    const std::int32_t lane = thread % kWarpSize;
    const bool has_vector = has_group && lane < group.size;
    rows::Elements weight{};
    if (has_vector) weight = rows::load_constant<float>(group.weight, lane);
    wait_for_previous_kernel();
    rows::Elements kept{};
    if (has_vector) {
      kept = rows::load<T>(step.qkv, group.first + lane);
      if (group.is_rotated) kept = rotate<T>(step, group, lane, kept);
    }
    const float squares = sum_over_lanes(sum_of_squares(kept));
    if (!has_vector) return;
    const float factor = factor_of(step, squares, group.size);
    store_value<T>(step, group, lane, kept, factor);
    store_scaled<T>(step, group.first + lane, kept, factor, weight);
  }
};

/// One block per group. A thread reads its vectors twice.
template <typename T>
class BlockHeadNorms {
 public:
  using Parameters = HeadNormsStep;
  static constexpr int kThreads = 512;
  static constexpr int kBlocksPerMultiprocessor = 2;
  static constexpr int kGroupsPerBlock = 1;
  static constexpr std::size_t kSharedBytes = kThreads / kWarpSize * sizeof(float);

  __device__ static void run(const HeadNormsStep& step) {
    allow_next_kernel();
    const HeadNormsStep::Group group = step.group(blockIdx.x);
    wait_for_previous_kernel();
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    float squares = 0.0F;
    for (std::int32_t i = thread; i < group.size; i += kThreads) {
      squares += sum_of_squares(rows::load<T>(step.qkv, group.first + i));
    }
    const float sum = rows::block_sum<kThreads>(squares, reinterpret_cast<float*>(shared_memory()));
    const float factor = factor_of(step, sum, group.size);
    for (std::int32_t i = thread; i < group.size; i += kThreads) {
      const rows::Elements kept = rows::load<T>(step.qkv, group.first + i);
      store_value<T>(step, group, i, kept, factor);
      store_scaled<T>(step, group.first + i, kept, factor, rows::load_constant<float>(group.weight, i));
    }
  }
};

/// rotary_half: of these groups.
void check(rows::Checks* checks, const NormGroups& groups, const HeadNorms& work, std::int64_t rotary_half,
           const std::string& name) {
  if (groups.count == 0) return;
  checks->count((name + ".count").c_str(), groups.count)
      .vectors((name + ".size").c_str(), groups.size, 8)
      .vectors((name + ".first").c_str(), groups.first, 0)
      .condition(groups.first + groups.count * groups.size <= work.stride,
                 (name + " ends after the row").c_str())
      .condition(rotary_half == 0 || groups.size <= kMaxWarpSize,
                 (name + ".size is too large for a rotation; expected at most 256").c_str())
      .condition(2 * rotary_half <= groups.size, "rotary_half is more than half of a group");
}

GroupVectors in_vectors(const NormGroups& groups) {
  return {.first = static_cast<std::int32_t>(groups.first / rows::kVector),
          .count = static_cast<std::int32_t>(groups.count),
          .size = static_cast<std::int32_t>(groups.size / rows::kVector),
          .weight = groups.weight};
}

template <typename Kernel>
void launch_groups(const HeadNormsStep& step, void* stream) {
  launch<Kernel>({.x = rows::blocks_for(step.groups, Kernel::kGroupsPerBlock),
                  .shared_bytes = Kernel::kSharedBytes,
                  .overlaps_previous = true},
                 step, stream);
}

}  // namespace

void enqueue(const HeadNorms& work, void* stream) {
  rows::Checks checks;
  checks.type(work.dtype).count("tokens", work.tokens).vectors("stride", work.stride, 8);
  checks.vectors("rotary_half", work.rotary_half, 0);
  check(&checks, work.queries, work, work.rotary_half, "queries");
  check(&checks, work.keys, work, work.rotary_half, "keys");
  check(&checks, work.values, work, 0, "values");
  checks.condition(work.values_from_keys == nullptr || (work.values.count == 0 && work.rotary_half == 0),
                   "values_from_keys is given, and values have columns or heads are rotated");
  checks.done("HeadNorms");
  const std::int64_t per_token = work.queries.count + work.keys.count + work.values.count;
  rows::Checks().count("tokens * groups", work.tokens * per_token).done("HeadNorms");
  if (per_token == 0) return;
  const HeadNormsStep step{.qkv = work.qkv,
                           .groups = work.tokens * per_token,
                           .stride = work.stride / rows::kVector,
                           .groups_per_token = Divisor(static_cast<std::int32_t>(per_token)),
                           .queries = in_vectors(work.queries),
                           .keys = in_vectors(work.keys),
                           .values = in_vectors(work.values),
                           .values_from_keys = work.values_from_keys,
                           .epsilon = work.epsilon,
                           .half = static_cast<std::int32_t>(work.rotary_half / rows::kVector),
                           .interleaved = work.interleaved,
                           .cosine = work.cosine,
                           .sine = work.sine};
  // The sizes alone decide, so the order of a sum does not depend on the number of tokens.
  const bool fits_warps = std::max({work.queries.size, work.keys.size, work.values.size}) <= kMaxWarpSize;
  with_element_type(work.dtype, [&]<typename T>(TypeTag<T>) {
    if (fits_warps) {
      launch_groups<WarpHeadNorms<T>>(step, stream);
    } else {
      launch_groups<BlockHeadNorms<T>>(step, stream);
    }
  });
}

}  // namespace adaptrt::cuda
