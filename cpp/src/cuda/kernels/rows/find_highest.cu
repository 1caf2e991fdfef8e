#include <cstddef>
#include <cstdint>

#include "adaptrt/core/best_token.h"
#include "adaptrt/core/exp_of_minus.h"
#include "adaptrt/cuda/row_kernels.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/rows/checks.h"
#include "cuda/kernels/rows/row_values.h"

namespace adaptrt::cuda {
namespace {

using rows::kInfinity;

/// The operations of exp_of_minus(), which the compiler does not fuse.
struct DeviceArithmetic {
  __device__ static float product(float a, float b) { return __fmul_rn(a, b); }
  __device__ static float sum(float a, float b) { return __fadd_rn(a, b); }
  __device__ static float difference(float a, float b) { return __fsub_rn(a, b); }
  __device__ static std::uint32_t bits(float value) { return __float_as_uint(value); }
  __device__ static float from_bits(std::uint32_t bits) { return __uint_as_float(bits); }
};

/// A logit's place in the order of logits: a larger number for a higher logit and, among equal ones, for a
/// lower index. No logit has place 0.
using Place = std::uint64_t;

__device__ inline Place place_of(float logit, std::int32_t index) {
  constexpr std::uint32_t kSign = 0x80000000U;
  const std::uint32_t bits = __float_as_uint(logit == 0.0F ? 0.0F : logit);
  const std::uint32_t ascending = (bits & kSign) != 0 ? ~bits : bits | kSign;
  return (Place{ascending} << 32) | ~static_cast<std::uint32_t>(index);
}

__device__ inline std::int32_t index_at(Place place) {
  return static_cast<std::int32_t>(~static_cast<std::uint32_t>(place));
}

/// One block per row. kWidth: see RowValues.
///
/// The highest logits are found by their digits, of 8 bits, from the first on: the digits so far of the last
/// logit to find, and how many of those with the same digits are wanted. To count few logits, the same is
/// done first for the highest logit of each thread, which gives a bound.
template <int kWidth>
class FindHighestRows {
 public:
  using Parameters = FindHighest;
  static constexpr int kThreads = 1024;
  static constexpr int kBlocksPerMultiprocessor = 1;
  static constexpr int kWarps = kThreads / kWarpSize;
  static_assert(kWarps == kWarpSize, "each lane takes the result of one warp");

 private:
  static constexpr int kLanes = 16;    ///< of sums
  static constexpr int kSummed = 256;  ///< logits in a sum
  static constexpr int kSums = kThreads / kLanes;
  static constexpr int kDigitBits = 8;
  static constexpr int kDigits = 1 << kDigitBits;
  static constexpr int kLoads = 4;
  static_assert(kMaxHighestLogits <= kThreads, "each thread writes one of the highest logits");
  using Values = rows::RowValues<kThreads, kWidth, kLoads>;

  /// A thread's part of the summary, and then the block's.
  struct Range {
    float max = -kInfinity;
    float min = kInfinity;
    std::int32_t is_unusable = 0;

    __device__ void take(const Range& other) {
      max = other.max > max ? other.max : max;
      min = other.min < min ? other.min : min;
      is_unusable |= other.is_unusable;
    }
    __device__ void take_from_warp() {
      ADAPTRT_UNROLL
      for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
        take({__shfl_xor_sync(kAllLanes, max, distance), __shfl_xor_sync(kAllLanes, min, distance),
              __shfl_xor_sync(kAllLanes, is_unusable, distance)});
      }
    }
  };

  struct Shared {
    Place places[kMaxHighestLogits];
    double sums[2][kSums];
    double sum;
    Range ranges[kWarps];
    std::int32_t counts[kDigits];
    std::int32_t digit;
    std::int32_t num_above;  ///< places with a higher digit
    std::int32_t num_places;
  };

 public:
  static constexpr std::size_t kSharedBytes = sizeof(Shared);

  __device__ static void run(const FindHighest& work) {
    auto& shared = *reinterpret_cast<Shared*>(shared_memory());
    const float* row = work.logits + static_cast<std::int64_t>(blockIdx.x) * work.stride;
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    const auto width = static_cast<std::int32_t>(work.width);
    const auto count = static_cast<std::int32_t>(work.count);
    const Values values(row, work.width);

    Range range;
    Place highest = 0;
    values.for_each([&](float value, std::int32_t at) {
      if (value > range.max) highest = place_of(value, at);
      range.take({value, value == -kInfinity ? kInfinity : value, value < kInfinity ? 0 : 1});
    });
    range = range_of_block(range, &shared);
    RowSummary& summary = work.summaries[blockIdx.x];
    if (range.is_unusable != 0 || range.max == -kInfinity) {
      if (thread == 0) {
        summary.best_token = range.is_unusable != 0 ? kUnusableLogits : kEveryTokenForbidden;
      }
      return;
    }
    const float max = range.max == 0.0F ? 0.0F : range.max;
    sum_exponentials(row, width, max, &shared);
    const Place bound = last_place(count, [highest](const auto& take) { take(highest); }, &shared);
    const auto for_each_place = [&](const auto& take) {
      values.for_each([&](float value, std::int32_t at) {
        if (at >= width) return;
        const Place place = place_of(value, at);
        if (place >= bound) take(place);
      });
    };
    const Place last = last_place(count, for_each_place, &shared);
    if (thread == 0) shared.num_places = 0;
    __syncthreads();
    for_each_place([&](Place place) {
      if (place >= last) shared.places[atomicAdd(&shared.num_places, 1)] = place;
    });
    __syncthreads();
    if (thread >= count) return;
    const Place own = shared.places[thread];
    std::int32_t rank = 0;
    for (std::int32_t other = 0; other < count; ++other) rank += shared.places[other] > own ? 1 : 0;
    const std::int32_t index = index_at(own);
    work.highest[blockIdx.x * work.count + rank] = {row[index], index};
    if (rank == 0) summary = {shared.sum, max, range.min == 0.0F ? 0.0F : range.min, index};
  }

 private:
  __device__ static Range range_of_block(Range range, Shared* shared) {
    const auto warp = static_cast<std::int32_t>(threadIdx.x) / kWarpSize;
    const auto lane = static_cast<std::int32_t>(threadIdx.x) % kWarpSize;
    range.take_from_warp();
    if (lane == 0) shared->ranges[warp] = range;
    __syncthreads();
    range = shared->ranges[lane];
    range.take_from_warp();
    return range;
  }

  __device__ static float weight(float max, float logit) {
    return exp_of_minus<DeviceArithmetic>(__fsub_rn(max, logit));
  }

  /// Sets shared->sum, which the block sees after its next barrier, to sum_of_exponentials()
  /// (sample/row_math.h), whose order this is. Sixteen threads add up kSummed logits, and one thread the
  /// sums.
  __device__ static void sum_exponentials(const float* row, std::int32_t width, float max, Shared* shared) {
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    const std::int32_t lane = thread % kLanes;
    const std::int32_t place = thread / kLanes;
    double total = 0.0;
    int half = 0;
    for (std::int64_t first = 0; first < width; first += kSums * kSummed) {
      const std::int64_t begin = first + place * kSummed;
      const auto left = static_cast<std::int32_t>(width - begin);
      const double sum = sum_of(row + begin, left < 0 ? 0 : left < kSummed ? left : kSummed, lane, max);
      if (lane == 0) shared->sums[half][place] = sum;
      // The other half is written in the next round, after this barrier and before the next.
      __syncthreads();
      if (thread == 0) {
        for (int i = 0; i < kSums && first + i * kSummed < width; ++i) total += shared->sums[half][i];
      }
      half ^= 1;
    }
    if (thread == 0) shared->sum = total;
  }

  /// Sixteen threads, together with the other half of their warp: the sum of `count` weights.
  __device__ static double sum_of(const float* logits, std::int32_t count, std::int32_t lane, float max) {
    const std::int32_t complete = count / kLanes * kLanes;
    double own = 0.0;
    for (std::int32_t i = lane; i < complete; i += kLanes) own += weight(max, logits[i]);
    double total = 0.0;
    for (int other = 0; other < kLanes; ++other) total += __shfl_sync(kAllLanes, own, other, kLanes);
    const std::int32_t rest = count - complete;
    const float last = lane < rest ? weight(max, logits[complete + lane]) : 0.0F;
    for (int other = 0; other < kLanes - 1; ++other) total += __shfl_sync(kAllLanes, last, other, kLanes);
    return total;
  }

  /// Block: for_each(take) calls take(place) for some places. Returns a place such that exactly `count` of
  /// them are at least as high, or 0 if there are fewer except zeros.
  template <typename ForEach>
  __device__ static Place last_place(std::int32_t count, const ForEach& for_each, Shared* shared) {
    constexpr int kPlaceBits = 64;
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    Place digits = 0;
    for (int shift = kPlaceBits - kDigitBits; shift >= 0; shift -= kDigitBits) {
      __syncthreads();  // all threads have read the results of the digit before
      if (thread < kDigits) shared->counts[thread] = 0;
      __syncthreads();
      for_each([&](Place place) {
        if (place >> shift >> kDigitBits != digits >> shift >> kDigitBits) return;
        atomicAdd(&shared->counts[(place >> shift) % kDigits], 1);
      });
      __syncthreads();
      if (thread < kWarpSize) find_digit(count, shared);
      __syncthreads();
      digits |= static_cast<Place>(shared->digit) << shift;
      count -= shared->num_above;
      if (shared->counts[shared->digit] == count) break;
    }
    return digits;
  }

  /// Warp: finds the digit of the `count`-th highest place.
  __device__ static void find_digit(std::int32_t count, Shared* shared) {
    constexpr int kDigitsOfLane = kDigits / kWarpSize;
    const auto lane = static_cast<std::int32_t>(threadIdx.x);
    std::int32_t digit = kDigits - 1 - lane * kDigitsOfLane;
    std::int32_t own = 0;
    for (int i = 0; i < kDigitsOfLane; ++i) own += shared->counts[digit - i];
    std::int32_t above = 0;
    for (int other = 0; other < kWarpSize; ++other) {
      const std::int32_t of_other = __shfl_sync(kAllLanes, own, other);
      above += other < lane ? of_other : 0;
    }
    if (above >= count || above + own < count) return;
    for (; above + shared->counts[digit] < count; --digit) above += shared->counts[digit];
    shared->digit = digit;
    shared->num_above = above;
  }
};

}  // namespace

void enqueue(const FindHighest& work, void* stream) {
  rows::Checks checks;
  checks.count("rows", work.rows).positive("width", work.width, rows::kMaxRowValues);
  checks.positive("count", work.count, work.width < kMaxHighestLogits ? work.width : kMaxHighestLogits);
  checks.condition(work.stride >= work.width, "stride is below width").done("FindHighest");
  rows::launch_rows<FindHighestRows, /*kOverlapsPrevious=*/false>(work, stream);
}

}  // namespace adaptrt::cuda
