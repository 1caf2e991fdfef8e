#include <cstdint>

#include "adaptrt/cuda/state_kernels.h"
#include "cuda/kernels/divisor.h"
#include "cuda/kernels/rows/checks.h"
#include "cuda/kernels/states/recurrence_kernel.h"

namespace adaptrt::cuda {
namespace {

struct ScanRule {
  SequenceStates states;
  float* outputs;
  SelectiveScan work;
  Divisor heads_per_group;

  static constexpr bool kNormalizes = false;
  static constexpr bool kReadsFirst = false;

  [[nodiscard]] __host__ __device__ std::int64_t rows() const { return work.shape.state_dim; }
  [[nodiscard]] __host__ __device__ std::int64_t columns() const { return work.shape.head_dim; }
  [[nodiscard]] __host__ __device__ std::int64_t heads() const { return work.shape.num_heads; }

  [[nodiscard]] __device__ states::HeadRow row(std::int64_t row, std::int64_t head) const {
    const float* values = work.values + row * work.stride;
    const float* b =
        values + heads() * columns() + heads_per_group.quotient(static_cast<std::int32_t>(head)) * rows();
    return {b + work.shape.num_groups * rows(), b, values + head * columns()};
  }

  [[nodiscard]] __device__ states::Gates gates(std::int64_t row, std::int64_t head) const {
    const std::int64_t times = heads() * columns() + 2 * work.shape.num_groups * rows();
    const float dt = work.values[row * work.stride + times + head];
    const float softplus = states::softplus(dt + work.time_bias[head]);
    // NaN stays NaN.
    const float time = softplus < work.time_min   ? work.time_min
                       : softplus > work.time_max ? work.time_max
                                                  : softplus;
    return {time, expf(-expf(work.log_decay[head]) * time)};
  }

  [[nodiscard]] __device__ float change(float value, const states::Gates& gates, float /*found*/) const {
    return value * gates.strength;
  }
  [[nodiscard]] __device__ float output(float sum, float value, std::int64_t head) const {
    return fmaf(work.skip[head], value, sum);
  }
};

}  // namespace

void enqueue(const SelectiveScan& work, void* stream) {
  const ScanShape& shape = work.shape;
  rows::Checks checks;
  states::check(&checks, work.states);
  checks.positive("num_heads", shape.num_heads, states::kMaxLanes)
      .positive("num_groups", shape.num_groups, states::kMaxLanes)
      .positive("state_dim", shape.state_dim, kMaxStateRows)
      .positive("head_dim", shape.head_dim)
      .done("SelectiveScan");
  checks.condition(shape.num_heads % shape.num_groups == 0, "num_heads is not a multiple of num_groups")
      .condition(work.stride >= shape.value_size() + 2 * shape.group_size() + shape.num_heads,
                 "stride is below x, B, C and dt")
      .done("SelectiveScan");
  states::launch_rule(
      ScanRule{.states = work.states,
               .outputs = work.output,
               .work = work,
               .heads_per_group = Divisor(static_cast<std::int32_t>(shape.num_heads / shape.num_groups))},
      stream);
}

}  // namespace adaptrt::cuda
