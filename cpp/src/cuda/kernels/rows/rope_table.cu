#include <cstdint>

#include "adaptrt/cuda/row_kernels.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/rows/checks.h"

namespace adaptrt::cuda {
namespace {

struct Rotation {
  float cosine;
  float sine;
};

/// Cosine and sine of a float32 angle, computed in float64 and rounded. CUDA's functions would also handle
/// angles from 2^31 on, for which they use local memory.
__device__ inline Rotation rotation_by(float angle) {
  constexpr double kTwoByPi = 0.63661977236758134308;
  // Their sum is pi / 2 to twice the precision of float64.
  constexpr double kHalfPi = 1.57079632679489661923;
  constexpr double kHalfPiRest = 6.12323399573676588614e-17;
  const double x = static_cast<double>(angle);
  const double turns = rint(x * kTwoByPi);
  const double rest = fma(-turns, kHalfPiRest, fma(-turns, kHalfPi, x));
  const double square = rest * rest;
  // Taylor series: up to pi / 4 the next terms are below 1e-15.
  double sine = -1.0 / 1307674368000.0;
  sine = fma(sine, square, 1.0 / 6227020800.0);
  sine = fma(sine, square, -1.0 / 39916800.0);
  sine = fma(sine, square, 1.0 / 362880.0);
  sine = fma(sine, square, -1.0 / 5040.0);
  sine = fma(sine, square, 1.0 / 120.0);
  sine = fma(sine, square, -1.0 / 6.0);
  sine = fma(sine * square, rest, rest);
  double cosine = 1.0 / 20922789888000.0;
  cosine = fma(cosine, square, -1.0 / 87178291200.0);
  cosine = fma(cosine, square, 1.0 / 479001600.0);
  cosine = fma(cosine, square, -1.0 / 3628800.0);
  cosine = fma(cosine, square, 1.0 / 40320.0);
  cosine = fma(cosine, square, -1.0 / 720.0);
  cosine = fma(cosine, square, 1.0 / 24.0);
  cosine = fma(cosine, square, -1.0 / 2.0);
  cosine = fma(cosine, square, 1.0);
  const int quarter = static_cast<int>(turns) & 3;
  const double first = quarter % 2 == 0 ? cosine : sine;
  const double second = quarter % 2 == 0 ? sine : cosine;
  return {static_cast<float>(quarter == 1 || quarter == 2 ? -first : first),
          static_cast<float>(quarter >= 2 ? -second : second)};
}

/// One angle per thread.
template <RopeKind kKind>
class RopeAngles {
 public:
  using Parameters = RopeTable;
  static constexpr int kThreads = 128;
  static constexpr int kBlocksPerMultiprocessor = 4;

  __device__ static void run(const RopeTable& work) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (i >= work.tokens * work.half) return;
    const std::int64_t token = i / work.half;
    const std::int64_t at = i % work.half;
    const std::int32_t position = work.positions[token];
    const float frequency = inverse_frequency(work, static_cast<std::int32_t>(token), position, at);
    const Rotation rotation = rotation_by(static_cast<float>(position) * frequency);
    work.cosine[i] = rotation.cosine * work.attention_scaling;
    work.sine[i] = rotation.sine * work.attention_scaling;
  }

 private:
  __device__ static float inverse_frequency(const RopeTable& work, std::int32_t token, std::int32_t position,
                                            std::int64_t at) {
    if constexpr (kKind != RopeKind::kStatic) {
      const std::int64_t length = max(std::int64_t{prompt_length(work, token)}, std::int64_t{position} + 1);
      if (length > work.original_max_position) {
        return kKind == RopeKind::kLong ? work.long_inverse_frequencies[at]
                                        : dynamic_frequency(work, length, at);
      }
    }
    return work.inverse_frequencies[at];
  }

  /// Prompt length of the token's sequence; 0 for a token after the last sequence.
  __device__ static std::int32_t prompt_length(const RopeTable& work, std::int32_t token) {
    if (token >= work.sequence_offsets[work.sequences]) return 0;
    std::int64_t low = 0;
    std::int64_t high = work.sequences;
    // sequence_offsets[low] <= token < sequence_offsets[high]
    while (high - low > 1) {
      const std::int64_t middle = (low + high) / 2;
      (work.sequence_offsets[middle] <= token ? low : high) = middle;
    }
    return work.prompt_lengths[low];
  }

  /// base' = base * (factor * length / original - (factor - 1))^(dim / (dim - 2)); 1 / base'^(2 i / dim).
  __device__ static float dynamic_frequency(const RopeTable& work, std::int64_t length, std::int64_t at) {
    const double half = static_cast<double>(work.half);
    const double factor = static_cast<double>(work.factor);
    const double grown = factor * static_cast<double>(length) / work.original_max_position - (factor - 1.0);
    const double logarithm = log2(static_cast<double>(work.base)) + log2(grown) * half / (half - 1.0);
    return static_cast<float>(exp2(-logarithm * static_cast<double>(at) / half));
  }
};

template <RopeKind kKind>
void launch_angles(const RopeTable& work, void* stream) {
  using Kernel = RopeAngles<kKind>;
  launch<Kernel>(
      {.x = rows::blocks_for(work.tokens * work.half, Kernel::kThreads), .overlaps_previous = true}, work,
      stream);
}

}  // namespace

void enqueue(const RopeTable& work, void* stream) {
  constexpr std::int64_t kMaxHalf = 1 << 20;
  rows::Checks checks;
  checks.count("tokens", work.tokens).positive("half", work.half, kMaxHalf);
  if (work.kind != RopeKind::kStatic) checks.positive("sequences", work.sequences);
  if (work.kind == RopeKind::kDynamic) {
    checks.condition(work.half != 1, "half is 1; expected at least 2 for a dynamic base")
        .condition(work.original_max_position > 0, "original_max_position is not positive");
  }
  checks.condition(work.kind != RopeKind::kLong || work.long_inverse_frequencies != nullptr,
                   "long_inverse_frequencies is missing");
  checks.done("RopeTable");
  switch (work.kind) {
    case RopeKind::kStatic:
      return launch_angles<RopeKind::kStatic>(work, stream);
    case RopeKind::kDynamic:
      return launch_angles<RopeKind::kDynamic>(work, stream);
    case RopeKind::kLong:
      return launch_angles<RopeKind::kLong>(work, stream);
  }
}

}  // namespace adaptrt::cuda
