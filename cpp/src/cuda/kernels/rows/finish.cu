#include <cstdint>

#include "adaptrt/cuda/row_kernels.h"
#include "cuda/kernels/divisor.h"
#include "cuda/kernels/element_type.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/rows/activations.h"
#include "cuda/kernels/rows/checks.h"
#include "cuda/kernels/rows/elements.h"

namespace adaptrt::cuda {
namespace {

struct FinishStep {
  const void* product;
  const void* linear;  ///< nullptr: in the second half of the product's rows
  const float* bias;
  const std::int32_t* bias_rows;
  void* output;
  std::int32_t count;  ///< vectors of the output
  Divisor width;       ///< vectors of a row of the output
  float scale;
  float softcap;
  float threshold;
};

/// One vector of the output per thread.
template <typename T, LinearEpilogue kEpilogue>
class FinishVectors {
 public:
  using Parameters = FinishStep;
  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerMultiprocessor = 4;

  __device__ static void run(const FinishStep& step) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (index >= step.count) return;
    const auto i = static_cast<std::int32_t>(index);
    const std::int32_t column = step.width.remainder(i);
    const std::int32_t bias_row = step.bias_rows == nullptr ? 0 : step.bias_rows[step.width.quotient(i)];
    const std::int64_t in_bias = std::int64_t{bias_row} * (kIsGated ? 2 : 1) * step.width.value() + column;
    if constexpr (kIsGated) {
      const std::int32_t width = step.width.value();
      const bool is_apart = step.linear != nullptr;
      const std::int64_t at = is_apart ? i : std::int64_t{2} * (i - column) + column;
      rows::Elements gated = read(step, step.product, at, in_bias, step.scale);
      const rows::Elements linear = read(step, is_apart ? step.linear : step.product,
                                         is_apart ? at : at + width, in_bias + width, 1.0F);
      gated.for_each([&](float value, int k) {
        return rows::activate<kEpilogue>(value, linear.values[k], step.threshold);
      });
      rows::store<T>(step.output, i, gated);
    } else {
      rows::Elements y = read(step, step.product, i, in_bias, step.scale);
      y.for_each([](float value, int) { return rows::activate<kEpilogue>(value); });
      rows::store<T>(step.output, i, y);
    }
  }

 private:
  static constexpr bool kIsGated = is_gated(kEpilogue);

  /// A vector of y, before the epilogue.
  __device__ static rows::Elements read(const FinishStep& step, const void* product, std::int64_t at,
                                        std::int64_t in_bias, float scale) {
    rows::Elements y = rows::load<T>(product, at);
    if (step.bias != nullptr) {
      const rows::Elements bias = rows::load_constant<float>(step.bias, in_bias);
      y.for_each([&](float value, int k) { return value + bias.values[k]; });
    }
    y.for_each([&](float value, int) { return value * scale; });
    if (step.softcap != 0.0F) {
      y.for_each([&](float value, int) { return rows::bounded(value, step.softcap); });
    }
    return y;
  }
};

template <LinearEpilogue kEpilogue>
void launch_epilogue(const Finish& work, void* stream) {
  const std::int64_t count = work.tokens * (work.width / rows::kVector);
  with_element_type(work.dtype, [&]<typename T>(TypeTag<T>) {
    using Kernel = FinishVectors<T, kEpilogue>;
    launch<Kernel>({.x = rows::blocks_for(count, Kernel::kThreads), .overlaps_previous = true},
                   {.product = work.product,
                    .linear = work.linear,
                    .bias = work.bias,
                    .bias_rows = work.bias_rows,
                    .output = work.output,
                    .count = static_cast<std::int32_t>(count),
                    .width = Divisor(static_cast<std::int32_t>(work.width / rows::kVector)),
                    .scale = work.scale,
                    .softcap = work.softcap,
                    .threshold = work.threshold},
                   stream);
  });
}

}  // namespace

void enqueue(const Finish& work, void* stream) {
  rows::Checks checks;
  checks.type(work.dtype).count("tokens", work.tokens).vectors("width", work.width, 8, rows::kMaxBlocks / 2);
  checks.condition(work.epilogue != LinearEpilogue::kAdd, "epilogue is kAdd; expected another one");
  checks.condition(work.linear == nullptr || is_gated(work.epilogue), "linear is given without a gate");
  checks.done("Finish");
  rows::Checks().count("tokens * width / 8", work.tokens * (work.width / rows::kVector)).done("Finish");
  switch (work.epilogue) {
    case LinearEpilogue::kStore:
    case LinearEpilogue::kAdd:
      return launch_epilogue<LinearEpilogue::kStore>(work, stream);
    case LinearEpilogue::kSiluMul:
      return launch_epilogue<LinearEpilogue::kSiluMul>(work, stream);
    case LinearEpilogue::kGeluMul:
      return launch_epilogue<LinearEpilogue::kGeluMul>(work, stream);
    case LinearEpilogue::kGeluTanhMul:
      return launch_epilogue<LinearEpilogue::kGeluTanhMul>(work, stream);
    case LinearEpilogue::kGelu:
      return launch_epilogue<LinearEpilogue::kGelu>(work, stream);
    case LinearEpilogue::kGeluTanh:
      return launch_epilogue<LinearEpilogue::kGeluTanh>(work, stream);
    case LinearEpilogue::kRelu:
      return launch_epilogue<LinearEpilogue::kRelu>(work, stream);
    case LinearEpilogue::kReluMul:
      return launch_epilogue<LinearEpilogue::kReluMul>(work, stream);
    case LinearEpilogue::kReluMulRelu:
      return launch_epilogue<LinearEpilogue::kReluMulRelu>(work, stream);
    case LinearEpilogue::kClampedSiluMul:
      return launch_epilogue<LinearEpilogue::kClampedSiluMul>(work, stream);
    case LinearEpilogue::kReluSquared:
      return launch_epilogue<LinearEpilogue::kReluSquared>(work, stream);
  }
}

}  // namespace adaptrt::cuda
