#include <algorithm>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <ostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "adaptrt/core/error.h"
#include "attention_cases.h"
#include "attention_step.h"
#include "cuda/kernels/attention/decode.h"
#include "cuda/kernels/attention/softmax.h"
#include "support/sanitized.h"

namespace adaptrt::cuda::attention_test {
namespace {

namespace data = boost::unit_test::data;

BOOST_AUTO_TEST_SUITE(attention_suite)

BOOST_DATA_TEST_CASE(prefill_and_decode_in_one_step, data::make(kHeadDims) * data::make(kDtypes), head_dim,
                     dtype) {
  Random random;
  constexpr std::int32_t kTokensPerBlock[] = {16, 32, 64, 128};
  const std::int32_t tokens_per_block = random.among(kTokensPerBlock);
  expect_right(config_of(dtype, 4, 2, head_dim),
               {.tokens_per_block = tokens_per_block, .max_blocks = 160 / tokens_per_block + 1}, kMixed,
               random);
}

BOOST_DATA_TEST_CASE(any_tokens_per_block_that_16_divides, data::make({16, 32, 48, 64, 128}),
                     tokens_per_block) {
  Random random;
  expect_right(config_of(random.among(kDtypes), 2, 1, 64),
               {.tokens_per_block = tokens_per_block, .max_blocks = 160 / tokens_per_block + 1}, kMixed,
               random);
}

BOOST_DATA_TEST_CASE(query_heads_of_a_kv_head, data::make({1, 2, 3, 5, 7, 8, 16, 17, 40}), group) {
  Random random;
  expect_right(config_of(random.among(kDtypes), 2 * group, 2, 64), {},
               {{.past = 40, .tokens = 21}, {.past = 90}, {.padding = true}, {.tokens = 2}}, random);
}

BOOST_DATA_TEST_CASE(sliding_window, data::make({1, 2, 15, 16, 17, 33, 64, 100, 1000}), window) {
  Random random;
  expect_right(config_of(random.among(kDtypes), 4, 2, random.among(kHeadDims), window), {}, kMixed, random);
}

BOOST_DATA_TEST_CASE(tokens_see_their_own_chunk, data::make({1, 2, 15, 16, 33, 64, 100, 1000}), chunk) {
  Random random;
  constexpr std::int32_t kAnyHeadDim[] = {64, 80, 96, 128, 256, 20};
  PagedAttentionConfig config = config_of(random.among(kDtypes), 4, 2, random.among(kAnyHeadDim));
  config.chunk = chunk;
  expect_right(config, {.sinks = random.of(0, 1) == 0}, kMixed, random);
  expect_right(config, {.max_blocks = 40}, {{.past = 1200}, {.past = 300}, {.past = chunk - 1}}, random);
}

/// A chunk of 100 begins before the end of a split of 512, 384 or 256 keys, and ends after it.
BOOST_DATA_TEST_CASE(a_chunk_may_need_two_splits, data::make(kHeadDims), head_dim) {
  Random random;
  PagedAttentionConfig config = config_of(random.among(kDtypes), 4, 2, head_dim);
  config.chunk = 100;
  expect_right(config, {.max_blocks = 40}, {{.past = 530}, {.past = 390}, {.past = 270}}, random);
}

BOOST_DATA_TEST_CASE(queries_are_scaled_by_their_position, data::make({64, 80, 96, 128, 256, 20}), head_dim) {
  Random random;
  PagedAttentionConfig config = config_of(random.among(kDtypes), 4, 2, head_dim);
  config.query_scaling_beta = 0.7F;
  config.query_scaling_length = random.of(1, 40);
  config.query_scaling_offset = random.of(0, 1);
  config.int8_pool = head_dim % 8 == 0 && random.of(0, 1) == 0;
  // Heads that are not rotated, and decodes that rotate themselves.
  for (const std::int32_t half : {head_dim / 2, 0}) {
    expect_right(config, {.rotary_half = half}, kMixed, random);
    expect_right(config, {.rotary_half = half}, {{.past = 70}, {.past = 3}, {.padding = true}}, random);
  }
}

BOOST_DATA_TEST_CASE(sizes_without_tensor_core_kernels, data::make({2, 12, 16, 40, 72, 200}), head_dim) {
  Random random;
  constexpr std::int32_t kWindows[] = {0, 20};
  expect_right(config_of(random.among(kDtypes), 4, 2, head_dim, random.among(kWindows)), {}, kMixed, random);
}

BOOST_DATA_TEST_CASE(tokens_per_block_without_tensor_core_kernels, data::make({1, 8, 20}), tokens_per_block) {
  Random random;
  expect_right(config_of(random.among(kDtypes), 4, 2, 64),
               {.tokens_per_block = tokens_per_block, .max_blocks = 132 / tokens_per_block + 1}, kMixed,
               random);
}

BOOST_DATA_TEST_CASE(part_of_a_head_is_turned, data::make({0, 1, 4, 16, 20, 32, 40}), half) {
  Random random;
  const PagedAttentionConfig config = config_of(random.among(kDtypes), 2, 2, 80);
  expect_right(config, {.rotary_half = half}, kMixed, random);
  expect_right(config, {.rotary_half = half}, {{.past = 70}, {.past = 3}}, random);
}

BOOST_DATA_TEST_CASE(neighbouring_elements_rotate_together, data::make({64, 80, 128, 6, 24}), head_dim) {
  Random random;
  PagedAttentionConfig config = config_of(random.among(kDtypes), 4, 2, head_dim);
  config.interleaved = true;
  // Decodes rotate parts of 8 pairs themselves.
  const std::int32_t part = head_dim >= 32 ? 8 * random.of(1, head_dim / 16) : random.of(1, head_dim / 2);
  for (const std::int32_t half : {head_dim / 2, part}) {
    expect_right(config, {.rotary_half = half}, kMixed, random);
    expect_right(config, {.rotary_half = half}, {{.past = 70}, {.past = 3}}, random);
  }
}

BOOST_DATA_TEST_CASE(sinks_take_a_share_of_the_weights, data::make({64, 128, 256, 20}) * data::make({0, 33}),
                     head_dim, window) {
  Random random;
  const PagedAttentionConfig config = config_of(random.among(kDtypes), 6, 2, head_dim, window);
  expect_right(config, {.sinks = true}, kMixed, random);
  expect_right(config, {.max_blocks = 40, .sinks = true}, {{.past = 1200}, {.past = 300}, {.past = 9}},
               random);
}

BOOST_DATA_TEST_CASE(columns_of_one_buffer, data::make({64, 128, 24, 6}), head_dim) {
  Random random;
  expect_right(config_of(random.among(kDtypes), 6, 2, head_dim), {.fused = true}, kMixed, random);
  expect_right(config_of(random.among(kDtypes), 6, 2, head_dim), {.fused = true}, {{.past = 70}, {.past = 3}},
               random);
}

BOOST_DATA_TEST_CASE(scores_of_great_magnitude, data::make(kDtypes), dtype) {
  Random random;
  expect_right(config_of(dtype, 4, 2, 64), {.magnitude = 8.0F}, kMixed, random);
}

const auto kSoftCaps = sanitized<std::vector<float>>({3.0F}, {0.25F, 3.0F, 50.0F});

BOOST_DATA_TEST_CASE(soft_caps, data::make({64, 80, 96, 128, 256, 20}) * data::make(kSoftCaps), head_dim,
                     softcap) {
  Random random;
  constexpr std::int32_t kWindows[] = {0, 33};
  PagedAttentionConfig config = config_of(random.among(kDtypes), 4, 2, head_dim, random.among(kWindows));
  config.softcap = softcap;
  // Scores up to 8 times the cap, and others far below it.
  expect_right(config, {.magnitude = random.of(0, 1) == 0 ? 1.0F : 4.0F}, kMixed, random);
  expect_right(config, {.max_blocks = 40}, {{.past = 1200}, {.past = 300}, {.past = 9}}, random);
}

BOOST_DATA_TEST_CASE(decodes_over_several_splits, data::make(kHeadDims) * data::make({0, 513}), head_dim,
                     window) {
  Random random;
  expect_right(config_of(random.among(kDtypes), 4, 2, head_dim, window), {.max_blocks = 40},
               {{.past = 1200},
                {.past = 3},
                {.past = 255},
                {.past = 256},
                {.past = random.of(500, 1270)},
                {.past = 600, .tokens = 3},
                {.padding = true}},
               random);
}

PagedAttentionConfig int8_config(std::int32_t heads, std::int32_t head_dim, Random& random) {
  constexpr std::int32_t kWindows[] = {0, 33};
  PagedAttentionConfig config = config_of(random.among(kDtypes), heads, 2, head_dim, random.among(kWindows));
  config.int8_pool = true;
  config.interleaved = random.of(0, 1) == 0;
  return config;
}

BOOST_DATA_TEST_CASE(int8_pools, data::make({64, 80, 96, 128, 256, 16, 200}), head_dim) {
  Random random;
  const PagedAttentionConfig config = int8_config(4, head_dim, random);
  expect_right(config, {.fused = true, .sinks = random.of(0, 1) == 0}, kMixed, random);
  // Decodes that rotate themselves, and others.
  for (const std::int32_t half : {head_dim / 16 * 8, 4, 0}) {
    expect_right(config, {.rotary_half = half}, {{.past = 70}, {.past = 3}, {.padding = true}}, random);
  }
  expect_right(int8_config(4, head_dim, random), {.max_blocks = 40}, {{.past = random.of(500, 1270)}},
               random);
}

BOOST_DATA_TEST_CASE(int8_pools_of_any_tokens_per_block, data::make({1, 20, 16, 128}), tokens_per_block) {
  Random random;
  expect_right(int8_config(4, 64, random),
               {.tokens_per_block = tokens_per_block, .max_blocks = 160 / tokens_per_block + 1}, kMixed,
               random);
}

/// A head with an element that is not finite has the scale NaN, as on the CPU.
BOOST_DATA_TEST_CASE(int8_keys_that_are_not_finite_are_seen, data::make({1, 5}), tokens) {
  Random random;
  for (const float value :
       {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    PagedAttentionConfig config = config_of(random.among(kDtypes), 2, 1, 64);
    config.int8_pool = true;
    RandomAttentionStep step(config, {}, {{.past = 3, .tokens = tokens}, {.past = 9}}, random.engine);
    step.set_key(0, 7, value);
    step.run();
    const auto count_nan = [&](std::int32_t begin, std::int32_t end) {
      const std::vector<std::uint16_t> found = step.attended(begin, end);
      return std::ranges::count_if(found, [&](std::uint16_t bits) {
        return std::isnan(config.dtype == DType::kFloat16 ? float16_to_float(bits) : bfloat16_to_float(bits));
      });
    };
    BOOST_TEST(count_nan(0, tokens) == tokens * 2 * 64);
    BOOST_TEST(count_nan(tokens, tokens + 1) == 0);
  }
}

/// A layer may share another one's keys and values: prefills with decodes, decodes alone, int8 pools and
/// sizes without tensor core kernels.
BOOST_DATA_TEST_CASE(keys_that_the_pool_has_already, data::make({64, 24}) * data::make({false, true}),
                     head_dim, int8_pool) {
  Random random;
  PagedAttentionConfig config = config_of(random.among(kDtypes), 4, 2, head_dim);
  config.int8_pool = int8_pool;
  const std::vector<SequenceOfStep> decodes{{.past = 70}, {.past = 3}, {.padding = true}};
  for (const auto& sequences : {kMixed, decodes}) {
    RandomAttentionStep step(config, {.tokens_per_block = 16, .max_blocks = 16}, sequences, random.engine);
    step.run();
    const auto attended = step.attended(0, step.tokens());
    const auto pool = step.pool();
    step.run(/*has_keys=*/false);
    BOOST_TEST_CONTEXT("seed " << random.seed) {
      BOOST_TEST((step.attended(0, step.tokens()) == attended));
      BOOST_TEST((step.pool() == pool));
    }
  }
}

BOOST_AUTO_TEST_CASE(one_decode_and_one_prefill_alone) {
  Random random;
  expect_right(config_of(random.among(kDtypes), 6, 2, 128), {}, {{.past = 33}}, random);
  expect_right(config_of(random.among(kDtypes), 6, 2, 128), {}, {{.past = 33, .tokens = 2}}, random);
  expect_right(config_of(random.among(kDtypes), 6, 2, 128), {}, {{.padding = true}}, random);
  // Keys of one block.
  expect_right(config_of(random.among(kDtypes), 6, 2, 128), {.max_blocks = 1},
               {{.padding = true}, {.past = 9}}, random);
}

BOOST_DATA_TEST_CASE(random_steps, data::xrange(sanitized(3, 8)), index) {
  (void)index;
  Random random;
  const std::int32_t kv_heads = random.of(1, 3);
  constexpr std::int32_t kTokensPerBlock[] = {16, 32, 64};
  constexpr std::int32_t kAnyHeadDim[] = {64, 80, 96, 128, 256, 12, 16};
  const std::int32_t tokens_per_block = random.among(kTokensPerBlock);
  std::vector<SequenceOfStep> sequences(static_cast<std::size_t>(random.of(1, 8)));
  for (SequenceOfStep& sequence : sequences) {
    sequence = {.past = random.of(0, 300), .tokens = random.of(0, 1) == 0 ? 1 : random.of(1, 50)};
    sequence.padding = random.of(0, 5) == 0;
  }
  expect_right(config_of(random.among(kDtypes), kv_heads * random.of(1, 5), kv_heads,
                         random.among(kAnyHeadDim), random.of(0, 2) == 0 ? random.of(1, 200) : 0),
               {.tokens_per_block = tokens_per_block, .max_blocks = 400 / tokens_per_block}, sequences,
               random);
}

BOOST_AUTO_TEST_CASE(weights_relative_to_equal_maxima_stay_as_they_are) {
  Random random;
  std::uniform_real_distribution<float> uniform(-40.0F, 40.0F);
  for (int i = 0; i < 1000; ++i) {
    const float maximum = uniform(random.engine);
    const float scale = std::abs(uniform(random.engine));
    BOOST_TEST(rescale_factor(maximum, maximum, scale) == 1.0F);
    BOOST_TEST(rescale_factor(kMinusInfinity, maximum, scale) == 0.0F);
    BOOST_TEST(rescale_factor(maximum - 0.5F, maximum, 2.0F) == 0.5F, boost::test_tools::tolerance(1e-4F));
  }
  BOOST_TEST(rescale_factor(kMinusInfinity, kMinusInfinity, 1.0F) == 0.0F);
}

/// Sets what a model with chunks has.
void add_chunks(PagedAttentionConfig& config, std::int32_t chunk) {
  config.sliding_window = 0;
  config.chunk = chunk;
  config.query_scaling_beta = 0.5F;
  config.query_scaling_length = 20;
}

BOOST_DATA_TEST_CASE(chunks_of_a_prompt_equal_the_whole, data::make(kHeadDims) * data::make({0, 50}),
                     head_dim, window) {
  Random random;
  constexpr std::int32_t kTokens = 100;
  PagedAttentionConfig config = config_of(random.among(kDtypes), 4, 2, head_dim, window);
  config.softcap = random.of(0, 1) == 0 ? 0.0F : 2.0F;
  config.interleaved = random.of(0, 1) == 0;
  config.int8_pool = random.of(0, 1) == 0;
  if (window > 0 && random.of(0, 1) == 0) add_chunks(config, window);
  RandomAttentionStep whole(config, {.sinks = random.of(0, 1) == 0},
                            {{.past = random.of(0, 70), .tokens = kTokens}}, random.engine);
  RandomAttentionStep::Pool pool = whole.pool();
  const RandomAttentionStep before = whole;
  whole.run();
  for (std::int32_t begin = 0; begin < kTokens;) {
    // A chunk of one token is a decode.
    const std::int32_t end = std::min(kTokens, begin + (random.of(0, 1) == 0 ? 1 : random.of(2, 40)));
    RandomAttentionStep chunk = before.part(begin, end);
    chunk.set_pool(pool);
    chunk.run();
    pool = chunk.pool();
    BOOST_TEST_CONTEXT("seed " << random.seed) {
      BOOST_TEST((chunk.attended(0, end - begin) == whole.attended(begin, end)));
    }
    begin = end;
  }
  BOOST_TEST((pool == whole.pool()));
}

BOOST_DATA_TEST_CASE(decodes_equal_prefills, data::make(kHeadDims) * data::make({0, 700}), head_dim, window) {
  // The prompt crosses the ends of its first splits. Its last tokens are computed again, as a decode alone,
  // as a decode in a step of many, and as decodes in a step with a prefill.
  Random random;
  constexpr std::int32_t kTokens = 8;
  constexpr std::int32_t kGroups[] = {1, 4, 9};
  const std::int32_t group = random.among(kGroups);
  PagedAttentionConfig config = config_of(random.among(kDtypes), 2 * group, 2, head_dim, window);
  config.softcap = random.of(0, 1) == 0 ? 0.0F : 2.0F;
  config.int8_pool = random.of(0, 1) == 0;
  if (window > 0 && random.of(0, 1) == 0) add_chunks(config, window);
  for (const std::int32_t past :
       {random.of(0, 90), kTileKeys<64> * kSplitTiles * 2 - 4, random.of(800, 1200)}) {
    RandomAttentionStep prompt(config, {.max_blocks = 50, .sinks = random.of(0, 1) == 0},
                               {{.past = past, .tokens = kTokens}}, random.engine);
    RandomAttentionStep::Pool pool = prompt.pool();
    const RandomAttentionStep before = prompt;
    prompt.run();
    for (std::int32_t token = 0; token < kTokens; ++token) {
      for (const std::vector<SequenceOfStep>& others :
           {std::vector<SequenceOfStep>{},
            std::vector<SequenceOfStep>(static_cast<std::size_t>(random.of(1, 40)), {.padding = true}),
            std::vector<SequenceOfStep>{{.tokens = 3, .padding = true}}}) {
        RandomAttentionStep decode = before.part(token, token + 1);
        decode.set_pool(pool);
        decode.append(others);
        decode.run();
        BOOST_TEST_CONTEXT("seed " << random.seed << ", past " << past << ", token " << token << ", "
                                   << others.size() << " others") {
          BOOST_TEST((decode.attended(0, 1) == prompt.attended(token, token + 1)));
        }
        if (others.empty()) pool = decode.pool();
      }
    }
  }
}

/// Blocks of a decode that share a sequence's keys: one for each tile, one for each split, or one for all.
BOOST_DATA_TEST_CASE(decodes_have_the_same_bits_however_blocks_share_their_keys,
                     data::make(kHeadDims) * data::make({false, true}), head_dim, has_window) {
  Random random;
  const std::int32_t tile = head_dim < 128 ? 64 : head_dim == 128 ? 48 : 32;
  constexpr std::int32_t kGroups[] = {1, 4, 17};
  const std::int32_t heads = 2 * random.among(kGroups);
  // The window begins within a tile and a split.
  PagedAttentionConfig config =
      config_of(random.among(kDtypes), heads, 2, head_dim, has_window ? 5 * tile + 7 : 0);
  config.int8_pool = random.of(0, 1) == 0;
  for (const std::int32_t keys : {4 * tile, 4 * tile + 1, 8 * tile, 8 * tile + 1, 13 * tile + 5, 16 * tile,
                                  17 * tile, 17 * tile + 1, 25 * tile - 1}) {
    RandomAttentionStep prompt(config, {.max_blocks = 52, .sinks = random.of(0, 1) == 0},
                               {{.past = keys - 2, .tokens = 2}}, random.engine);
    prompt.run();
    for (const std::int32_t others : {0, 3, 20, 520}) {
      if (others == 520 && keys != 8 * tile + 1) continue;
      RandomAttentionStep decode = prompt.part(1, 2);
      decode.append(std::vector<SequenceOfStep>(static_cast<std::size_t>(others), {.padding = true}));
      decode.set_counters(random.of(0, 1) == 0);
      decode.run();
      BOOST_TEST_CONTEXT("seed " << random.seed << ", " << keys << " keys, " << others << " others") {
        BOOST_TEST((decode.attended(0, 1) == prompt.attended(1, 2)));
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(few_sequences_have_a_block_for_each_tile) {
  const auto plan = [](std::int32_t sequences, std::int32_t heads, std::int32_t kv_heads,
                       std::int32_t head_dim, std::int32_t capacity) {
    AttentionStep step{};
    step.sequences = sequences;
    step.num_heads = heads;
    step.num_kv_heads = kv_heads;
    step.head_dim = head_dim;
    step.max_blocks = capacity / 16;
    step.tokens_per_block = Divisor(16);
    return plan_splits(step);
  };
  for (const std::int32_t capacity : {208, 512, 8192}) {
    const Splits splits = plan(1, 32, 8, 128, capacity);
    BOOST_TEST(splits.separates_tiles);
    BOOST_TEST(splits.count == kMostParts);
    BOOST_TEST(splits.lanes == kMostParts);
  }
  BOOST_TEST(plan(1, 15, 15, 128, 512).separates_tiles);
  // Too many blocks, also of heads that need two; a round for all keys; a round for each split.
  BOOST_TEST(!plan(1, 16, 16, 128, 512).separates_tiles);
  BOOST_TEST(!plan(2, 32, 8, 128, 512).separates_tiles);
  BOOST_TEST(!plan(1, 17 * 8, 8, 128, 512).separates_tiles);
  BOOST_TEST(!plan(1, 32, 8, 128, 192).separates_tiles);
  BOOST_TEST(!plan(1, 32, 8, 64, 512).separates_tiles);
  const Splits many = plan(2, 32, 8, 128, 512);
  BOOST_TEST(many.count == 2);
  BOOST_TEST(many.lanes == 2);
  BOOST_TEST(plan(256, 32, 8, 128, 8192).lanes == 1);
  BOOST_TEST(plan(64, 32, 8, 128, 8192).lanes == 4);
}

BOOST_AUTO_TEST_CASE(counters_in_the_workspace_are_set_to_zero) {
  // More counters than a block of RotateAndWrite has threads.
  constexpr std::int32_t kHeads = 260;
  Random random;
  RandomAttentionStep step(config_of(random.among(kDtypes), kHeads, kHeads, 64), {.max_blocks = 18},
                           {{.past = 520}}, random.engine);
  step.set_counters(false);
  step.run();
  BOOST_TEST_CONTEXT("seed " << random.seed) {
    BOOST_TEST(step.problems() == "");
  }
}

BOOST_AUTO_TEST_CASE(counters_are_for_blocks_of_16_heads) {
  const auto counters = [](std::int32_t heads, std::int32_t kv_heads) {
    return PagedAttentionKernel(config_of(DType::kFloat16, heads, kv_heads, 64)).counter_bytes(5) / 4;
  };
  BOOST_TEST(counters(32, 8) == 5U * 8);
  BOOST_TEST(counters(32, 2) == 5U * 2);
  BOOST_TEST(counters(34, 2) == 5U * 4);
}

BOOST_DATA_TEST_CASE(a_sequence_does_not_depend_on_its_neighbours, data::make({0, 40}), window) {
  Random random;
  expect_same_bits_alone(config_of(random.among(kDtypes), 6, 2, random.among(kHeadDims), window), random);
}

BOOST_AUTO_TEST_CASE(the_workspace_of_the_greatest_step_does_for_smaller_ones) {
  for (const auto& [heads, kv_heads] : {std::pair{32, 8}, {28, 4}, {12, 12}, {40, 2}}) {
    constexpr std::int32_t kMostSequences = 700;
    const std::size_t most = split_bytes(heads, 128, kMostSequences);
    for (std::int32_t sequences = 1; sequences <= kMostSequences; ++sequences) {
      AttentionStep step{};
      step.sequences = sequences;
      step.num_heads = heads;
      step.num_kv_heads = kv_heads;
      step.head_dim = 128;
      step.sliding_window = sequences % 3 == 1 ? 9000 : 0;
      step.has_chunks = sequences % 3 == 2;
      step.chunk = Divisor(9000);
      step.max_blocks = 100000;
      step.tokens_per_block = Divisor(64);
      step.group = Divisor(heads / kv_heads);
      const Splits splits = plan_splits(step);
      const std::size_t needed = splits.count == 1 ? 0
                                                   : static_cast<std::size_t>(sequences) *
                                                         static_cast<std::size_t>(heads * splits.count) *
                                                         130 * sizeof(float);
      BOOST_REQUIRE_LE(needed, most);
    }
    // The workspace is used: few sequences are split.
    BOOST_TEST(most > 0U);
  }
}

/// True if `call` throws a ConfigError with all of `parts` in its message.
bool is_refused(const std::function<void()>& call, const std::vector<std::string>& parts) {
  try {
    call();
  } catch (const ConfigError& error) {
    const std::string message = error.what();
    BOOST_TEST_MESSAGE(message);
    return std::all_of(parts.begin(), parts.end(),
                       [&](const std::string& part) { return message.find(part) != std::string::npos; });
  }
  return false;
}

BOOST_AUTO_TEST_CASE(invalid_arguments_are_refused_by_name) {
  BOOST_TEST(is_refused(
      [] {
        PagedAttentionKernel({.dtype = DType::kFloat32,
                              .num_heads = 3,
                              .num_kv_heads = 2,
                              .head_dim = 7,
                              .scale = 0.0F,
                              .sliding_window = -1,
                              .softcap = -1.0F,
                              .chunk = -1,
                              .query_scaling_length = 0,
                              .query_scaling_offset = -1});
      },
      {"dtype is float32", "num_heads 3 is not a multiple of num_kv_heads 2", "head_dim is 7", "scale",
       "sliding_window is -1", "softcap is -1", "chunk is -1", "query_scaling_length is 0; it must be 1 to",
       "query_scaling_offset is -1"}));
  BOOST_TEST(is_refused(
      [] {
        PagedAttentionConfig config = config_of(DType::kFloat16, 2, 1, 64, 9);
        config.chunk = 8;
        config.query_scaling_beta = std::numeric_limits<float>::infinity();
        PagedAttentionKernel kernel(config);
      },
      {"chunk is 8 with a sliding_window; expected one of them", "query_scaling_beta is inf"}));
  BOOST_TEST(is_refused(
      [] {
        PagedAttentionConfig config = config_of(DType::kFloat16, 2, 1, 20);
        config.int8_pool = true;
        PagedAttentionKernel kernel(config);
      },
      {"head_dim is 20; with an int8 pool it must be a multiple of 8"}));
  BOOST_TEST(
      is_refused([] { PagedAttentionKernel({}); }, {"num_heads is 0", "num_kv_heads is 0", "head_dim is 0"}));
  const PagedAttentionKernel kernel(config_of(DType::kFloat16, 2, 1, 64));
  BOOST_TEST(is_refused(
      [&] {
        kernel.enqueue({.tokens = 1,
                        .sequences = 2,
                        .max_blocks = 0,
                        .tokens_per_block = 0,
                        .rotary_half = 33,
                        .q_stride = 132,
                        .kv_stride = 56},
                       {}, nullptr, nullptr);
      },
      {"sequences is 2; it must be 1 to 1", "max_blocks is 0", "tokens_per_block is 0",
       "rotary_half is 33; it must be 0 to 32", "q_stride is 132; it must be a multiple of 8",
       "kv_stride is 56; it must be 64 to "}));
  BOOST_TEST(is_refused(
      [&] {
        kernel.enqueue({.tokens = 1,
                        .sequences = 1,
                        .max_blocks = 1 << 26,
                        .tokens_per_block = 64,
                        .rotary_half = 32,
                        .q_stride = 128,
                        .kv_stride = 64},
                       {}, nullptr, nullptr);
      },
      {"max_blocks * tokens_per_block is 4294967296"}));
}

BOOST_AUTO_TEST_CASE(addresses_that_cannot_be_used_are_refused) {
  const PagedAttentionKernel kernel(config_of(DType::kFloat16, 2, 1, 64));
  alignas(16) std::uint8_t bytes[32] = {};
  BOOST_TEST(is_refused(
      [&] {
        kernel.enqueue(
            {.tokens = 1,
             .sequences = 1,
             .max_blocks = 1,
             .tokens_per_block = 16,
             .rotary_half = 32,
             .q_stride = 128,
             .kv_stride = 64},
            {.q = bytes + 8, .k = bytes, .v = bytes, .counters = reinterpret_cast<std::uint32_t*>(bytes + 2)},
            bytes, nullptr);
      },
      {"the address of counters is", "the address of q is", "it must be a multiple of 16 and not 0",
       "the address of kv_pool is 0"}));
}

BOOST_AUTO_TEST_CASE(divisors_divide) {
  Random random;
  constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
  for (int i = 0; i < 20000; ++i) {
    const std::int32_t divisor = i < 200 ? i + 1 : random.of(1, kMost >> random.of(0, 30));
    const std::int32_t n =
        random.of(0, 9) == 0 ? kMost - random.of(0, 3) : random.of(0, kMost >> random.of(0, 30));
    const Divisor by(divisor);
    BOOST_REQUIRE_EQUAL(by.quotient(n), n / divisor);
    BOOST_REQUIRE_EQUAL(by.remainder(n), n % divisor);
  }
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::cuda::attention_test
