#include <algorithm>
#include <array>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "adaptrt/core/error.h"
#include "attention_cases.h"
#include "attention_step.h"
#include "cuda/kernels/attention/splits.h"
#include "emulation/hopper_machine.h"
#include "support/sanitized.h"

// HopperPrefill, compared with float64, and its bits with Prefill and Decode.
namespace adaptrt::cuda::attention_test {
namespace {

namespace data = boost::unit_test::data;

using Sizes = std::vector<std::int32_t>;

/// Head sizes with the kernel.
constexpr std::int32_t kHopperHeadDims[] = {64, 96, 128};

PagedAttentionConfig hopper_config(Random& random, std::int32_t group, std::int32_t head_dim,
                                   std::int32_t window = 0) {
  PagedAttentionConfig config = config_of(random.among(kDtypes), 2 * group, 2, head_dim, window);
  config.hopper_prefill = true;
  return config;
}

/// Runs a step with both prefill kernels. Their bits must be equal, and right.
void expect_equal(const PagedAttentionConfig& config, const StepSizes& sizes,
                  const std::vector<SequenceOfStep>& sequences, Random& random) {
  RandomAttentionStep hopper(config, sizes, sequences, random.engine);
  RandomAttentionStep portable = hopper;
  portable.set_hopper_prefill(false);
  hopper.run();
  portable.run();
  BOOST_TEST_CONTEXT("seed " << random.seed << ", head_dim " << config.head_dim << ", heads "
                             << config.num_heads << ", window " << config.sliding_window << ", soft cap "
                             << config.softcap << ", tokens_per_block " << sizes.tokens_per_block << ", "
                             << name_of(config.dtype)) {
    BOOST_TEST(hopper.problems() == "");
    BOOST_TEST((hopper.attended(0, hopper.tokens()) == portable.attended(0, portable.tokens())));
  }
}

BOOST_AUTO_TEST_SUITE(hopper_prefill_suite)

BOOST_DATA_TEST_CASE(prefills_and_decodes_in_one_step, data::make(kHopperHeadDims) * data::make(kDtypes),
                     head_dim, dtype) {
  Random random;
  PagedAttentionConfig config = hopper_config(random, 2, head_dim);
  config.dtype = dtype;
  expect_equal(config, {.max_blocks = 6}, kMixed, random);
}

/// Results do not tell which kernel made them, but copies of boxes do.
BOOST_AUTO_TEST_CASE(the_config_chooses_the_kernel) {
  Random random;
  RandomAttentionStep step(hopper_config(random, 1, 64), {}, {{.tokens = 20}}, random.engine);
  for (const bool hopper : {true, false}) {
    step.set_hopper_prefill(hopper);
    const std::size_t before = emulation::count_box_copies();
    step.run();
    // 16 keys and 4 keys of a tile for 2 heads; only whole boxes have values.
    BOOST_TEST(emulation::count_box_copies() - before == (hopper ? 2U * (2 + 1) : 0U));
  }
}

BOOST_DATA_TEST_CASE(any_tokens_per_block_that_16_divides,
                     data::make(sanitized<Sizes>({16, 48}, {16, 32, 48, 64, 128})), tokens_per_block) {
  Random random;
  expect_equal(hopper_config(random, 1, random.among(kHopperHeadDims)),
               {.tokens_per_block = tokens_per_block, .max_blocks = 160 / tokens_per_block + 1}, kMixed,
               random);
}

BOOST_DATA_TEST_CASE(query_heads_of_a_kv_head,
                     data::make(sanitized<Sizes>({1, 7}, {1, 2, 3, 4, 5, 6, 7, 8, 17, 40})), group) {
  Random random;
  expect_equal(hopper_config(random, group, random.among(kHopperHeadDims)), {},
               {{.past = 40, .tokens = 21}, {.past = 90}, {.padding = true}, {.tokens = 2}}, random);
}

/// Warpgroups whose rows end before the tile's last keys, and tiles of rows that are not full.
BOOST_DATA_TEST_CASE(prompts_of_several_tiles,
                     data::make(kHopperHeadDims) * data::make(sanitized<Sizes>({129}, {63, 64, 129, 200})),
                     head_dim, tokens) {
  Random random;
  expect_equal(hopper_config(random, random.among(std::array{1, 2, 4}), head_dim), {.max_blocks = 12},
               {{.past = random.of(0, 90), .tokens = tokens}}, random);
}

BOOST_DATA_TEST_CASE(sliding_window,
                     data::make(sanitized<Sizes>({17}, {1, 2, 15, 16, 17, 33, 48, 64, 100, 1000})), window) {
  Random random;
  expect_equal(hopper_config(random, 2, random.among(kHopperHeadDims), window), {}, kMixed, random);
}

BOOST_DATA_TEST_CASE(blocks_before_the_window_are_not_read,
                     data::make(kHopperHeadDims) * data::make({5, 40, 70}), head_dim, window) {
  Random random;
  RandomAttentionStep step(
      hopper_config(random, 2, head_dim, window), {.tokens_per_block = 16, .max_blocks = 24},
      {{.past = random.of(100, 250), .tokens = random.of(2, 100)}, {.past = 200}}, random.engine);
  step.forget_unseen_keys();
  RandomAttentionStep portable = step;
  portable.set_hopper_prefill(false);
  step.run();
  portable.run();
  BOOST_TEST_CONTEXT("seed " << random.seed) {
    BOOST_TEST(step.problems() == "");
    BOOST_TEST((step.attended(0, step.tokens()) == portable.attended(0, step.tokens())));
  }
}

/// The tokens of a warp may be in different chunks.
BOOST_DATA_TEST_CASE(chunks_of_positions, data::make({1, 7, 48, 100}), chunk) {
  Random random;
  PagedAttentionConfig config = hopper_config(random, random.of(1, 5), random.among(kHopperHeadDims));
  config.chunk = chunk;
  expect_equal(config, {}, kMixed, random);
}

BOOST_DATA_TEST_CASE(sinks_and_soft_caps, data::make(kHopperHeadDims) * data::make({0, 33}), head_dim,
                     window) {
  Random random;
  PagedAttentionConfig config = hopper_config(random, 3, head_dim, window);
  expect_equal(config, {.sinks = true}, kMixed, random);
  config.softcap = random.among(std::array{0.25F, 3.0F, 50.0F});
  expect_equal(config, {.magnitude = 4.0F, .sinks = random.of(0, 1) == 0}, kMixed, random);
}

BOOST_DATA_TEST_CASE(scores_of_great_magnitude, data::make(kHopperHeadDims), head_dim) {
  Random random;
  expect_equal(hopper_config(random, 2, head_dim), {.magnitude = 8.0F}, kMixed, random);
}

/// More tiles of keys than stages, ends of splits, and windows that begin within a split.
BOOST_DATA_TEST_CASE(several_splits,
                     data::make(kHopperHeadDims) * data::make(sanitized<Sizes>({513}, {0, 513, 700})),
                     head_dim, window) {
  Random random;
  const std::int32_t split = head_dim == 128 ? kTileKeys<128> * kSplitTiles : kTileKeys<64> * kSplitTiles;
  expect_equal(hopper_config(random, random.of(1, 4), head_dim, window),
               {.max_blocks = 48, .sinks = random.of(0, 1) == 0},
               {{.past = 2 * split - random.of(1, 30), .tokens = 33},
                {.past = random.of(500, 1270), .tokens = random.of(2, 70)},
                {.past = split - 2, .tokens = 2}},
               random);
}

/// The rows of one tile have splits of 384 and of 768 keys. Few results of 16 bits show the order of a sum,
/// so there are many.
BOOST_AUTO_TEST_CASE(splits_of_different_sizes_in_one_tile) {
  if (kSanitizedPart) return;
  Random random;
  constexpr std::int32_t kKeys = kTileKeys<128> * kSplitTiles * kMostSplits;
  PagedAttentionConfig config = hopper_config(random, 8, 128);
  config.dtype = DType::kFloat16;
  config.num_heads = 8;
  config.num_kv_heads = 1;
  expect_equal(config, {.tokens_per_block = 64, .max_blocks = kKeys / 64 + 1},
               {{.past = kKeys - 4, .tokens = 32}}, random);
}

BOOST_DATA_TEST_CASE(keys_that_the_pool_has_already, data::make(kHopperHeadDims), head_dim) {
  Random random;
  RandomAttentionStep step(hopper_config(random, 2, head_dim), {}, kMixed, random.engine);
  step.run();
  const auto attended = step.attended(0, step.tokens());
  step.run(/*has_keys=*/false);
  BOOST_TEST((step.attended(0, step.tokens()) == attended));
}

BOOST_DATA_TEST_CASE(chunks_of_a_prompt_equal_the_whole, data::make(kHopperHeadDims) * data::make({0, 50}),
                     head_dim, window) {
  Random random;
  constexpr std::int32_t kTokens = 150;
  PagedAttentionConfig config = hopper_config(random, random.of(1, 4), head_dim, window);
  config.softcap = random.of(0, 1) == 0 ? 0.0F : 2.0F;
  RandomAttentionStep whole(config, {.sinks = random.of(0, 1) == 0},
                            {{.past = random.of(0, 70), .tokens = kTokens}}, random.engine);
  RandomAttentionStep::Pool pool = whole.pool();
  const RandomAttentionStep before = whole;
  whole.run();
  for (std::int32_t begin = 0; begin < kTokens;) {
    // A chunk of one token is a decode. Chunks also come to the other kernel.
    const std::int32_t end = std::min(kTokens, begin + (random.of(0, 1) == 0 ? 1 : random.of(2, 90)));
    RandomAttentionStep chunk = before.part(begin, end);
    chunk.set_hopper_prefill(random.of(0, 2) != 0);
    chunk.set_pool(pool);
    chunk.run();
    pool = chunk.pool();
    BOOST_TEST_CONTEXT("seed " << random.seed << ", tokens from " << begin) {
      BOOST_TEST((chunk.attended(0, end - begin) == whole.attended(begin, end)));
    }
    begin = end;
  }
}

BOOST_DATA_TEST_CASE(decodes_equal_prefills, data::make(kHopperHeadDims) * data::make({0, 700}), head_dim,
                     window) {
  Random random;
  constexpr std::int32_t kTokens = 8;
  PagedAttentionConfig config = hopper_config(random, random.among(std::array{1, 4, 9}), head_dim, window);
  for (const std::int32_t past : {random.of(0, 90), random.of(800, 1200)}) {
    RandomAttentionStep prompt(config, {.max_blocks = 50}, {{.past = past, .tokens = kTokens}},
                               random.engine);
    RandomAttentionStep::Pool pool = prompt.pool();
    const RandomAttentionStep before = prompt;
    prompt.run();
    for (std::int32_t token = 0; token < kTokens; ++token) {
      RandomAttentionStep decode = before.part(token, token + 1);
      decode.set_pool(pool);
      decode.run();
      pool = decode.pool();
      BOOST_TEST_CONTEXT("seed " << random.seed << ", past " << past << ", token " << token) {
        BOOST_TEST((decode.attended(0, 1) == prompt.attended(token, token + 1)));
      }
    }
  }
}

BOOST_DATA_TEST_CASE(a_sequence_does_not_depend_on_its_neighbours, data::make({0, 40}), window) {
  Random random;
  expect_same_bits_alone(hopper_config(random, 3, random.among(kHopperHeadDims), window), random);
}

BOOST_DATA_TEST_CASE(random_steps, data::xrange(sanitized(3, 12)), index) {
  (void)index;
  Random random;
  const std::int32_t tokens_per_block = random.among(std::array{16, 32, 64});
  std::vector<SequenceOfStep> sequences(static_cast<std::size_t>(random.of(1, 6)));
  for (SequenceOfStep& sequence : sequences) {
    sequence = {.past = random.of(0, 300), .tokens = random.of(0, 2) == 0 ? 1 : random.of(2, 90)};
    sequence.padding = random.of(0, 5) == 0;
  }
  PagedAttentionConfig config = hopper_config(random, random.of(1, 5), random.among(kHopperHeadDims),
                                              random.of(0, 2) == 0 ? random.of(1, 200) : 0);
  config.softcap = random.of(0, 3) == 0 ? 2.0F : 0.0F;
  expect_equal(config,
               {.tokens_per_block = tokens_per_block,
                .max_blocks = 400 / tokens_per_block,
                .sinks = random.of(0, 3) == 0},
               sequences, random);
}

/// The message of the ConfigError that `call` throws; empty if it throws none.
std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return {};
}

BOOST_AUTO_TEST_CASE(sizes_without_the_kernel_are_refused) {
  Random random;
  const auto contains = [](const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
  };
  const PagedAttentionConfig wide = hopper_config(random, 2, 256);
  BOOST_TEST(contains(refusal([&] { PagedAttentionKernel kernel(wide); }),
                      "hopper_prefill is true for head_dim 256; it needs 64, 96 or 128"));
  PagedAttentionConfig config = hopper_config(random, 2, 64);
  config.int8_pool = true;
  BOOST_TEST(contains(refusal([&] { PagedAttentionKernel kernel(config); }),
                      "hopper_prefill is true for an int8 pool"));
  config.int8_pool = false;
  RandomAttentionStep step(config, {.tokens_per_block = 20}, {{.tokens = 3}}, random.engine);
  BOOST_TEST(contains(refusal([&] { step.run(); }),
                      "tokens_per_block is 20; with hopper_prefill it must be a multiple of 16"));
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::cuda::attention_test
