#pragma once

#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <random>
#include <vector>

#include "adaptrt/core/dtype.h"
#include "attention_step.h"
#include "print_dtype.h"

namespace adaptrt::cuda::attention_test {

inline constexpr DType kDtypes[] = {DType::kFloat16, DType::kBFloat16};
/// Head sizes with tensor core kernels.
inline constexpr std::int32_t kHeadDims[] = {64, 80, 96, 128, 256};

inline PagedAttentionConfig config_of(DType dtype, std::int32_t heads, std::int32_t kv_heads,
                                      std::int32_t head_dim, std::int32_t window = 0) {
  return {.dtype = dtype,
          .num_heads = heads,
          .num_kv_heads = kv_heads,
          .head_dim = head_dim,
          .scale = 1.0F / std::sqrt(static_cast<float>(head_dim)),
          .sliding_window = window};
}

/// Random numbers from a seed that is printed, to repeat a failure.
struct Random {
  Random() : seed(std::random_device{}()), engine(seed) { BOOST_TEST_MESSAGE("seed " << seed); }
  std::int32_t of(std::int32_t least, std::int32_t most) {
    return std::uniform_int_distribution<std::int32_t>(least, most)(engine);
  }
  template <typename Choices>
  auto among(const Choices& choices) {
    return choices[static_cast<std::size_t>(of(0, static_cast<std::int32_t>(std::size(choices)) - 1))];
  }
  std::uint32_t seed;
  std::mt19937 engine;
};

inline void expect_right(const PagedAttentionConfig& config, const StepSizes& sizes,
                         const std::vector<SequenceOfStep>& sequences, Random& random) {
  RandomAttentionStep step(config, sizes, sequences, random.engine);
  step.set_counters(random.of(0, 1) == 0);
  step.run();
  BOOST_TEST_CONTEXT("seed " << random.seed << ", head_dim " << config.head_dim << ", heads "
                             << config.num_heads << " / " << config.num_kv_heads << ", window "
                             << config.sliding_window << ", soft cap " << config.softcap
                             << ", tokens_per_block " << sizes.tokens_per_block << ", "
                             << name_of(config.dtype)) {
    BOOST_TEST(step.problems() == "");
  }
}

inline const std::vector<SequenceOfStep> kMixed = {{.tokens = 37},
                                                   {.past = 70},
                                                   {.past = 61, .tokens = 50},
                                                   {.padding = true},
                                                   {.past = 0},
                                                   {.past = 15, .tokens = 2},
                                                   {.past = 128, .tokens = 3},
                                                   {.tokens = 5, .padding = true},
                                                   {.past = 127}};

/// Each sequence of kMixed has the same bits alone and in a step with the others.
inline void expect_same_bits_alone(const PagedAttentionConfig& config, Random& random) {
  RandomAttentionStep together(config, {}, kMixed, random.engine);
  const RandomAttentionStep before = together;
  together.run();
  std::int32_t begin = 0;
  for (const SequenceOfStep& sequence : kMixed) {
    const std::int32_t end = begin + sequence.tokens;
    RandomAttentionStep alone = before.part(begin, end);
    alone.run();
    BOOST_TEST_CONTEXT("seed " << random.seed << ", tokens from " << begin) {
      BOOST_TEST((alone.attended(0, end - begin) == together.attended(begin, end)));
    }
    begin = end;
  }
}

}  // namespace adaptrt::cuda::attention_test
