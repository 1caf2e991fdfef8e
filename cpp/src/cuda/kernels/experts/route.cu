#include <cstdint>
#include <limits>

#include "adaptrt/cuda/expert_kernels.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/rows/checks.h"
#include "cuda/kernels/warp_sums.h"

namespace adaptrt::cuda {
namespace {

constexpr float kExcluded = -std::numeric_limits<float>::infinity();

/// True if the first of two experts is chosen first: NaN is smaller than every number, and of equal values
/// the smaller index comes first.
__device__ inline bool comes_first(float value, std::int32_t index, float other, std::int32_t other_index) {
  const bool is_larger = value > other || (other != other && value == value);
  const bool is_smaller = value < other || (value != value && other == other);
  return is_larger || (!is_smaller && index < other_index);
}

/// A warp routes one token.
class Route {
 public:
  using Parameters = RouteTokens;
  static constexpr int kThreads = kWarpSize;
  static constexpr int kBlocksPerMultiprocessor = 16;

  __device__ static void run(const RouteTokens& work) {
    allow_next_kernel();
    wait_for_previous_kernel();
    float* scores = reinterpret_cast<float*>(shared_memory());
    float* choice = scores + work.experts;
    auto* taken = reinterpret_cast<std::int32_t*>(choice + work.experts);
    float* ratings = reinterpret_cast<float*>(taken + work.experts);
    const auto token = static_cast<std::int64_t>(blockIdx.x);
    load_scores(work, work.logits + token * work.experts, scores);
    for (std::int32_t i = lane(); i < work.experts; i += kWarpSize) {
      choice[i] = scores[i] + (work.bias == nullptr ? 0.0F : work.bias[i]);
      taken[i] = 0;
    }
    __syncwarp();
    if (work.num_groups > 1) drop_groups(work, choice, ratings);
    for (std::int32_t k = 0; k < work.top_k; ++k) take_best(work.experts, choice, taken);
    const std::int32_t own = write_chosen(work, taken, work.chosen + token * work.top_k);
    write_weights(work, own < 0 ? 0.0F : scores[own], own, work.weights + token * work.top_k);
  }

  static std::size_t shared_bytes(const RouteTokens& work) {
    return static_cast<std::size_t>(3 * work.experts + work.num_groups) * sizeof(float);
  }

 private:
  __device__ static std::int32_t lane() { return static_cast<std::int32_t>(threadIdx.x); }

  __device__ static void load_scores(const RouteTokens& work, const float* logits, float* scores) {
    float maximum = kExcluded;
    for (std::int32_t i = lane(); i < work.experts; i += kWarpSize) maximum = fmaxf(maximum, logits[i]);
    maximum = maximum_over_lanes(maximum);
    float sum = 0.0F;
    for (std::int32_t i = lane(); i < work.experts; i += kWarpSize) {
      float score = logits[i];
      if (work.scores == RouterScores::kSoftmax) score = expf(score - maximum);
      if (work.scores == RouterScores::kSigmoid) score = 1.0F / (1.0F + expf(-score));
      scores[i] = score;
      sum += score;
    }
    sum = sum_over_lanes(sum);
    if (work.scores != RouterScores::kSoftmax) return;
    for (std::int32_t i = lane(); i < work.experts; i += kWarpSize) scores[i] /= sum;
  }

  /// Excludes the experts that are not in the best groups.
  __device__ static void drop_groups(const RouteTokens& work, float* choice, float* ratings) {
    const std::int32_t size = work.experts / work.num_groups;
    for (std::int32_t group = lane(); group < work.num_groups; group += kWarpSize) {
      ratings[group] = rating_of(choice + group * size, size, work.rates_groups_by_best);
    }
    __syncwarp();
    for (std::int32_t group = lane(); group < work.num_groups; group += kWarpSize) {
      std::int32_t better = 0;
      for (std::int32_t i = 0; i < work.num_groups; ++i) {
        if (i != group && comes_first(ratings[i], i, ratings[group], group)) ++better;
      }
      if (better < work.topk_groups) continue;
      for (std::int32_t i = 0; i < size; ++i) choice[group * size + i] = kExcluded;
    }
    __syncwarp();
  }

  /// Sum of the two largest values of a group, or the largest one.
  __device__ static float rating_of(const float* group, std::int32_t size, bool by_best) {
    std::int32_t best = 0;
    for (std::int32_t i = 1; i < size; ++i) {
      if (comes_first(group[i], i, group[best], best)) best = i;
    }
    if (by_best || size == 1) return group[best];
    float second = kExcluded;
    for (std::int32_t i = 0; i < size; ++i) {
      if (i != best) second = fmaxf(second, group[i]);
    }
    return group[best] + second;
  }

  /// Takes the best expert that is not taken.
  __device__ static void take_best(std::int32_t experts, const float* choice, std::int32_t* taken) {
    std::int32_t best = -1;
    for (std::int32_t i = lane(); i < experts; i += kWarpSize) {
      if (taken[i] == 0 && (best < 0 || comes_first(choice[i], i, choice[best], best))) best = i;
    }
    ADAPTRT_UNROLL
    for (int bits = kWarpSize / 2; bits > 0; bits /= 2) {
      const std::int32_t other = __shfl_xor_sync(kAllLanes, best, bits);
      if (other >= 0 && (best < 0 || comes_first(choice[other], other, choice[best], best))) best = other;
    }
    if (lane() == 0) taken[best] = 1;
    __syncwarp();
  }

  /// Writes the taken experts in ascending order. Returns the expert whose place is the thread's lane; -1 for
  /// lanes from top_k on.
  __device__ static std::int32_t write_chosen(const RouteTokens& work, const std::int32_t* taken,
                                              std::int32_t* chosen) {
    std::int32_t own = -1;
    std::int32_t count = 0;
    for (std::int32_t first = 0; first < work.experts; first += kWarpSize) {
      const std::int32_t expert = first + lane();
      std::uint32_t mask = __ballot_sync(kAllLanes, expert < work.experts && taken[expert] != 0);
      const std::int32_t found = __popc(mask);
      // The n-th set bit belongs to the lane of the n-th place.
      for (std::int32_t n = lane() - count; n > 0 && mask != 0; --n) mask &= mask - 1;
      if (lane() >= count && lane() < count + found) own = first + __popc((mask & (~mask + 1)) - 1);
      count += found;
    }
    if (own >= 0) chosen[lane()] = own;
    return own;
  }

  __device__ static void write_weights(const RouteTokens& work, float score, std::int32_t expert,
                                       float* weights) {
    const bool is_chosen = expert >= 0;
    if (work.scores == RouterScores::kSoftmaxOfChosen) {
      const float maximum = maximum_over_lanes(is_chosen ? score : kExcluded);
      score = is_chosen ? expf(score - maximum) : 0.0F;
      score /= sum_over_lanes(score);
    }
    if (work.norm_topk_prob) {
      constexpr float kLeast = 1e-20F;  // all sigmoids may be zero
      score /= kLeast + sum_over_lanes(is_chosen ? score : 0.0F);
    }
    score *= work.scale;
    if (!is_chosen) return;
    weights[lane()] = work.expert_scale == nullptr ? score : score * work.expert_scale[expert];
  }
};

}  // namespace

void enqueue(const RouteTokens& work, void* stream) {
  rows::Checks checks;
  checks.count("tokens", work.tokens)
      .positive("experts", work.experts, kMaxExperts)
      .positive("top_k", work.top_k, kMaxTopK)
      .positive("num_groups", work.num_groups, work.experts)
      .positive("topk_groups", work.topk_groups, work.num_groups);
  checks.done("RouteTokens");
  rows::Checks()
      .condition(work.experts % work.num_groups == 0, "num_groups does not divide experts")
      .positive("top_k", work.top_k, work.experts / work.num_groups * work.topk_groups)
      .done("RouteTokens");
  launch<Route>({.x = static_cast<std::uint32_t>(work.tokens),
                 .shared_bytes = Route::shared_bytes(work),
                 .overlaps_previous = true},
                work, stream);
}

}  // namespace adaptrt::cuda
