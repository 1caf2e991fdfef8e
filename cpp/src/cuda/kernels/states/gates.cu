#include <cstdint>

#include "adaptrt/cuda/state_kernels.h"
#include "cuda/kernels/divisor.h"
#include "cuda/kernels/element_type.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/rows/activations.h"
#include "cuda/kernels/rows/checks.h"
#include "cuda/kernels/rows/elements.h"
#include "cuda/kernels/rows/row_vectors.h"
#include "cuda/kernels/types.h"
#include "cuda/kernels/warp_sums.h"

namespace adaptrt::cuda {
namespace {

struct GatedRmsNormStep {
  GatedRmsNorm work;
  std::int32_t count;  ///< groups of all rows
  Divisor groups_of_row;
  Divisor groups_of_weight;
};

/// One warp per group, whose elements are read twice.
template <typename T>
class GatedRmsNormGroups {
 public:
  using Parameters = GatedRmsNormStep;
  static constexpr int kThreads = 128;
  static constexpr int kBlocksPerMultiprocessor = 8;
  static constexpr int kGroupsPerBlock = kThreads / kWarpSize;

  __device__ static void run(const GatedRmsNormStep& step) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const GatedRmsNorm& work = step.work;
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kGroupsPerBlock + thread / kWarpSize;
    if (index >= step.count) return;
    const std::int64_t row = step.groups_of_row.quotient(static_cast<std::int32_t>(index));
    const std::int32_t group = step.groups_of_row.remainder(static_cast<std::int32_t>(index));
    const std::int64_t first = group * work.group;
    const float* input = work.input + row * work.width + first;
    const float* gate = work.gate + (row + 1) * work.gate_stride - work.width + first;
    const float* weight = work.weight + step.groups_of_weight.remainder(group) * work.group;
    T* output = static_cast<T*>(work.output) + row * work.width + first;
    const auto before_norm = [&](std::int64_t i) {
      return work.gate_first ? input[i] * rows::times_sigmoid(gate[i], gate[i]) : input[i];
    };
    float squares = 0.0F;
    for (std::int64_t i = thread % kWarpSize; i < work.group; i += kWarpSize) {
      squares = fmaf(before_norm(i), before_norm(i), squares);
    }
    squares = sum_over_lanes(squares);
    const float factor = rsqrtf(squares / static_cast<float>(work.group) + work.epsilon);
    for (std::int64_t i = thread % kWarpSize; i < work.group; i += kWarpSize) {
      const float normed = before_norm(i) * factor * weight[i];
      output[i] = from_float<T>(work.gate_first ? normed : normed * rows::times_sigmoid(gate[i], gate[i]));
    }
  }
};

struct SigmoidGateStep {
  SigmoidGate work;
  rows::RowVectors vectors;
};

/// One vector per thread.
template <typename T>
class SigmoidGateVectors {
 public:
  using Parameters = SigmoidGateStep;
  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerMultiprocessor = 4;

  __device__ static void run(const SigmoidGateStep& step) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const SigmoidGate& work = step.work;
    const std::int32_t i = step.vectors.own<kThreads>();
    if (i < 0) return;
    const std::int64_t row = step.vectors.row(i);
    const std::int64_t at = ((row + 1) * work.gate_stride - work.width) / rows::kVector;
    const rows::Elements gate = rows::load<T>(work.gate, at + step.vectors.column(i));
    rows::Elements output = rows::load<T>(work.output, i);
    output.for_each([&](float value, int k) { return rows::times_sigmoid(value, gate.values[k]); });
    rows::store<T>(work.output, i, output);
  }
};

}  // namespace

void enqueue(const GatedRmsNorm& work, void* stream) {
  rows::Checks()
      .type(work.dtype)
      .count("rows", work.rows)
      .positive("width", work.width)
      .positive("group", work.group)
      .positive("weight_size", work.weight_size)
      .condition(work.gate_stride >= work.width, "gate_stride is below width")
      .done("GatedRmsNorm");
  const std::int64_t of_row = work.width / work.group;
  rows::Checks()
      .condition(work.weight_size % work.group == 0, "weight_size is not a multiple of group")
      .condition(work.width % work.weight_size == 0, "width is not a multiple of weight_size")
      .count("rows * groups", work.rows * of_row)
      .done("GatedRmsNorm");
  with_element_type(work.dtype, [&]<typename T>(TypeTag<T>) {
    using Kernel = GatedRmsNormGroups<T>;
    launch<Kernel>(
        {.x = rows::blocks_for(work.rows * of_row, Kernel::kGroupsPerBlock), .overlaps_previous = true},
        {.work = work,
         .count = static_cast<std::int32_t>(work.rows * of_row),
         .groups_of_row = Divisor(static_cast<std::int32_t>(of_row)),
         .groups_of_weight = Divisor(static_cast<std::int32_t>(work.weight_size / work.group))},
        stream);
  });
}

void enqueue(const SigmoidGate& work, void* stream) {
  rows::Checks()
      .type(work.dtype)
      .count("rows", work.rows)
      .vectors("width", work.width, 8)
      .vectors("gate_stride", work.gate_stride, 8)
      .condition(work.gate_stride >= work.width, "gate_stride is below width")
      .done("SigmoidGate");
  const rows::RowVectors vectors("rows", work.rows, work.width, "SigmoidGate");
  with_element_type(work.dtype, [&]<typename T>(TypeTag<T>) {
    using Kernel = SigmoidGateVectors<T>;
    launch<Kernel>(vectors.shape<Kernel>(), {.work = work, .vectors = vectors}, stream);
  });
}

}  // namespace adaptrt::cuda
