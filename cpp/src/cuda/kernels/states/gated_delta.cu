#include <cmath>
#include <cstdint>

#include "adaptrt/cuda/state_kernels.h"
#include "cuda/kernels/divisor.h"
#include "cuda/kernels/rows/checks.h"
#include "cuda/kernels/states/recurrence_kernel.h"

namespace adaptrt::cuda {
namespace {

struct DeltaRule {
  SequenceStates states;
  float* outputs;
  GatedDelta work;
  Divisor heads_per_key;  ///< value heads that share a key head
  float query_scale;

  static constexpr bool kNormalizes = true;
  static constexpr bool kReadsFirst = true;

  [[nodiscard]] __host__ __device__ std::int64_t rows() const { return work.shape.key_dim; }
  [[nodiscard]] __host__ __device__ std::int64_t columns() const { return work.shape.value_dim; }
  [[nodiscard]] __host__ __device__ std::int64_t heads() const { return work.shape.num_value_heads; }

  [[nodiscard]] __device__ states::HeadRow row(std::int64_t row, std::int64_t head) const {
    const float* qkv = work.qkv + row * work.stride;
    const std::int64_t key = heads_per_key.quotient(static_cast<std::int32_t>(head)) * rows();
    const std::int64_t keys = work.shape.num_key_heads * rows();
    return {qkv + key, qkv + keys + key, qkv + 2 * keys + head * columns()};
  }

  [[nodiscard]] __device__ states::Gates gates(std::int64_t row, std::int64_t head) const {
    const float* gates = work.gates + 2 * row * heads() + head;
    const float time = states::softplus(gates[heads()] + work.time_bias[head]);
    return {work.update_scale / (1.0F + expf(-gates[0])), expf(-expf(work.log_decay[head]) * time)};
  }

  [[nodiscard]] __device__ float reader_factor(float squares) const {
    return query_scale * writer_factor(squares);
  }
  [[nodiscard]] __device__ float writer_factor(float squares) const { return rsqrtf(squares + 1e-6F); }

  [[nodiscard]] __device__ float change(float value, const states::Gates& gates, float known) const {
    return (value - gates.decay * known) * gates.strength;
  }
  [[nodiscard]] __device__ float output(float sum, float /*value*/, std::int64_t /*head*/) const {
    return sum;
  }
};

}  // namespace

void enqueue(const GatedDelta& work, void* stream) {
  const DeltaShape& shape = work.shape;
  rows::Checks checks;
  states::check(&checks, work.states);
  checks.positive("num_key_heads", shape.num_key_heads, states::kMaxLanes)
      .positive("num_value_heads", shape.num_value_heads, states::kMaxLanes)
      .positive("key_dim", shape.key_dim, kMaxStateRows)
      .positive("value_dim", shape.value_dim)
      .done("GatedDelta");
  checks
      .condition(shape.num_value_heads % shape.num_key_heads == 0,
                 "num_value_heads is not a multiple of num_key_heads")
      .condition(work.stride >= 2 * shape.key_size() + shape.value_size(), "stride is below q, k and v")
      .done("GatedDelta");
  states::launch_rule(DeltaRule{.states = work.states,
                                .outputs = work.output,
                                .work = work,
                                .heads_per_key = Divisor(
                                    static_cast<std::int32_t>(shape.num_value_heads / shape.num_key_heads)),
                                .query_scale = 1.0F / std::sqrt(static_cast<float>(shape.key_dim))},
                      stream);
}

}  // namespace adaptrt::cuda
