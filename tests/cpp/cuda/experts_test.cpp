#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/cuda/expert_kernels.h"
#include "adaptrt/cuda/quantized_product_kernel.h"
#include "lora_case.h"
#include "print_dtype.h"
#include "rows_case.h"

namespace adaptrt::cuda::experts_test {
namespace {

namespace data = boost::unit_test::data;

auto says(const std::string& text) {
  return
      [text](const ConfigError& error) { return std::string(error.what()).find(text) != std::string::npos; };
}

struct Choice {
  std::vector<std::int32_t> chosen;
  std::vector<double> weights;
};

/// Divides exponentials by their sum.
void softmax(std::vector<double>* values) {
  const double largest = *std::max_element(values->begin(), values->end());
  double sum = 0;
  for (double& value : *values) sum += value = std::exp(value - largest);
  for (double& value : *values) value /= sum;
}

/// Indices of the `count` largest values, ascending.
std::vector<std::int32_t> largest_of(const std::vector<double>& values, std::int32_t count) {
  std::vector<std::int32_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
    return values[static_cast<std::size_t>(a)] > values[static_cast<std::size_t>(b)];
  });
  order.resize(static_cast<std::size_t>(count));
  std::sort(order.begin(), order.end());
  return order;
}

/// Routing in float64.
Choice route(const RouteTokens& work, const float* logits) {
  std::vector<double> scores(logits, logits + work.experts);
  if (work.scores == RouterScores::kSoftmax) softmax(&scores);
  if (work.scores == RouterScores::kSigmoid) {
    for (double& score : scores) score = 1 / (1 + std::exp(-score));
  }
  std::vector<double> rated = scores;
  for (std::int32_t i = 0; i < work.experts && work.bias != nullptr; ++i) {
    rated[static_cast<std::size_t>(i)] += work.bias[i];
  }
  const std::int32_t size = work.experts / work.num_groups;
  std::vector<double> groups;
  for (std::int32_t group = 0; group < work.num_groups; ++group) {
    std::vector<double> of_group(rated.begin() + group * size, rated.begin() + (group + 1) * size);
    std::sort(of_group.rbegin(), of_group.rend());
    groups.push_back(of_group[0] + (work.rates_groups_by_best || size == 1 ? 0 : of_group[1]));
  }
  const auto kept = largest_of(groups, work.topk_groups);
  for (std::int32_t i = 0; i < work.experts; ++i) {
    if (!std::binary_search(kept.begin(), kept.end(), i / size)) {
      rated[static_cast<std::size_t>(i)] = -std::numeric_limits<double>::infinity();
    }
  }
  Choice choice{.chosen = largest_of(rated, work.top_k), .weights = {}};
  for (const std::int32_t expert : choice.chosen) {
    choice.weights.push_back(scores[static_cast<std::size_t>(expert)]);
  }
  if (work.scores == RouterScores::kSoftmaxOfChosen) softmax(&choice.weights);
  const double sum = std::accumulate(choice.weights.begin(), choice.weights.end(), 0.0);
  for (std::size_t i = 0; i < choice.weights.size(); ++i) {
    if (work.norm_topk_prob) choice.weights[i] /= sum;
    choice.weights[i] *= work.scale;
    if (work.expert_scale != nullptr) choice.weights[i] *= work.expert_scale[choice.chosen[i]];
  }
  return choice;
}

BOOST_AUTO_TEST_SUITE(expert_kernels)

BOOST_DATA_TEST_CASE(tokens_are_routed_as_in_float64, data::xrange(12), index) {
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    constexpr RouterScores kScores[] = {RouterScores::kSoftmax, RouterScores::kSigmoid,
                                        RouterScores::kSoftmaxOfChosen};
    const std::int32_t num_groups = index % 2 == 0 ? 1 : 4;
    const std::int32_t experts = num_groups * random.integer(index == 1 ? 1 : 2, index == 0 ? 3 : 40);
    const std::int32_t topk_groups = random.integer(1, num_groups);
    const std::int64_t tokens = random.integer(1, 9);
    const auto logits = random_floats(tokens * experts, &random);
    const auto bias = random_floats(experts, &random, 0.3F);
    const auto scales = random_floats(experts, &random);
    RouteTokens work{.tokens = tokens,
                     .experts = experts,
                     .scores = kScores[index % 3],
                     .top_k = random.integer(1, std::min(32, experts / num_groups * topk_groups)),
                     .num_groups = num_groups,
                     .topk_groups = topk_groups,
                     .rates_groups_by_best = random.integer(0, 1) == 0,
                     .norm_topk_prob = random.integer(0, 1) == 0,
                     .scale = random.real(0.5F, 3.0F),
                     .bias = random.integer(0, 1) == 0 ? bias.data() : nullptr,
                     .expert_scale = random.integer(0, 1) == 0 ? scales.data() : nullptr,
                     .logits = logits.data()};
    Tensor<std::int32_t> chosen(tokens * work.top_k);
    Tensor<float> weights(tokens * work.top_k);
    work.chosen = chosen.data();
    work.weights = weights.data();
    enqueue(work, nullptr);
    for (std::int64_t token = 0; token < tokens; ++token) {
      const Choice expected = route(work, logits.data() + token * experts);
      BOOST_TEST(chosen.values(token * work.top_k, work.top_k) == expected.chosen,
                 boost::test_tools::per_element());
      for (std::int32_t k = 0; k < work.top_k; ++k) {
        const double weight = expected.weights[static_cast<std::size_t>(k)];
        BOOST_TEST(std::abs(weights[token * work.top_k + k] - weight) <= 1e-5 * std::abs(weight) + 1e-9);
      }
    }
    BOOST_TEST(chosen.rest_is_unchanged());
    BOOST_TEST(weights.rest_is_unchanged());
  }
}

BOOST_AUTO_TEST_CASE(of_equal_experts_the_first_are_chosen_and_nan_is_last) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> logits{1.0F, kNan, 2.0F, 2.0F, 1.0F, 1.0F, kNan, -5.0F};
  const auto choose = [&](std::int32_t top_k, std::int32_t num_groups) {
    std::vector<std::int32_t> chosen(static_cast<std::size_t>(top_k));
    std::vector<float> weights(static_cast<std::size_t>(top_k));
    enqueue(RouteTokens{.tokens = 1,
                        .experts = 8,
                        .scores = RouterScores::kSoftmaxOfChosen,
                        .top_k = top_k,
                        .num_groups = num_groups,
                        .topk_groups = 1,
                        .rates_groups_by_best = true,
                        .logits = logits.data(),
                        .chosen = chosen.data(),
                        .weights = weights.data()},
            nullptr);
    return chosen;
  };
  BOOST_TEST(choose(4, 1) == (std::vector<std::int32_t>{0, 2, 3, 4}), boost::test_tools::per_element());
  BOOST_TEST(choose(7, 1) == (std::vector<std::int32_t>{0, 1, 2, 3, 4, 5, 7}),
             boost::test_tools::per_element());
  // Groups of two: the second has the first 2.
  BOOST_TEST(choose(2, 4) == (std::vector<std::int32_t>{2, 3}), boost::test_tools::per_element());
}

/// Random choices of 8 experts, of which some have no token.
std::vector<std::int32_t> random_choices(std::int64_t slots, FreshRandom* random) {
  std::vector<std::int32_t> chosen;
  for (std::int64_t i = 0; i < slots; ++i)
    chosen.push_back(random->integer(0, 1) == 0 ? 3 : 2 * random->integer(0, 3));
  return chosen;
}

struct Slots {
  explicit Slots(const std::vector<std::int32_t>& chosen)
      : offsets(9), entries(chosen.size()), slots_of(chosen.size()), expert_of(chosen.size()) {
    enqueue(NumberSlots{.slots = static_cast<std::int64_t>(chosen.size()),
                        .experts = 8,
                        .chosen = chosen.data(),
                        .offsets = offsets.data(),
                        .entries = entries.data(),
                        .slots_of = slots_of.data(),
                        .expert_of = expert_of.data()},
            nullptr);
  }
  std::vector<std::int32_t> offsets;
  std::vector<std::int32_t> entries;
  std::vector<std::int32_t> slots_of;
  std::vector<std::int32_t> expert_of;
};

BOOST_DATA_TEST_CASE(slots_are_numbered_expert_by_expert, data::make({1, 31, 256, 700}), count) {
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    const auto chosen = random_choices(count, &random);
    const Slots slots(chosen);
    std::vector<std::int32_t> order(chosen.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
      return chosen[static_cast<std::size_t>(a)] < chosen[static_cast<std::size_t>(b)];
    });
    BOOST_TEST(slots.entries == order, boost::test_tools::per_element());
    for (std::size_t slot = 0; slot < order.size(); ++slot) {
      BOOST_TEST(std::cmp_equal(slots.slots_of[static_cast<std::size_t>(order[slot])], slot));
      BOOST_TEST(slots.expert_of[slot] == chosen[static_cast<std::size_t>(order[slot])]);
    }
    for (std::int32_t expert = 0; expert <= 8; ++expert) {
      const auto smaller =
          std::count_if(chosen.begin(), chosen.end(), [&](auto each) { return each < expert; });
      BOOST_TEST(slots.offsets[static_cast<std::size_t>(expert)] == smaller);
    }
  }
}

BOOST_DATA_TEST_CASE(experts_multiply_their_own_slots, data::make(kRowTypes) * data::make({1, 5, 90}), dtype,
                     tokens) {
  constexpr std::int32_t kIn = 72;
  constexpr std::int32_t kOut = 136;
  constexpr std::int32_t kTopK = 2;
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    const auto chosen = random_choices(std::int64_t{tokens} * kTopK, &random);
    const Slots slots(chosen);
    const auto weights = random_elements(dtype, std::int64_t{8} * kOut * kIn, &random);
    for (const bool gathers : {true, false}) {
      const std::int64_t rows = gathers ? tokens : tokens * kTopK;
      const auto x = random_elements(dtype, rows * kIn, &random);
      Tensor<std::uint16_t> y(std::int64_t{tokens} * kTopK * kOut);
      ExpertProduct work{.dtype = dtype,
                         .slots = std::int64_t{tokens} * kTopK,
                         .experts = 8,
                         .in_size = kIn,
                         .out_size = kOut,
                         .offsets = slots.offsets.data(),
                         .entries = gathers ? slots.entries.data() : nullptr,
                         .entries_per_row = kTopK,
                         .x = x.data(),
                         .weights = weights.data(),
                         .y = y.data()};
      enqueue(work, nullptr);
      std::int64_t wrong = 0;
      for (std::size_t slot = 0; slot < chosen.size(); ++slot) {
        const std::int32_t entry = slots.entries[slot];
        const std::int64_t expert = chosen[static_cast<std::size_t>(entry)];
        const std::int64_t row = gathers ? entry / kTopK : static_cast<std::int64_t>(slot);
        for (std::int64_t output = 0; output < kOut; ++output) {
          double sum = 0.0;
          double terms = 0.0;
          for (std::int64_t input = 0; input < kIn; ++input) {
            const double term = double{element(dtype, x[row * kIn + input])} *
                                element(dtype, weights[(expert * kOut + output) * kIn + input]);
            sum += term;
            terms += std::abs(term);
          }
          const auto bits = y[static_cast<std::int64_t>(slot) * kOut + output];
          wrong += static_cast<std::int64_t>(!is_rounded(sum, dtype, bits, terms * 0x1p-20));
        }
      }
      BOOST_TEST(wrong == 0);
      BOOST_TEST(y.rest_is_unchanged());
      // A token alone has the same bits.
      const std::int64_t token = random.integer(0, tokens - 1);
      const Slots own({chosen.begin() + token * kTopK, chosen.begin() + (token + 1) * kTopK});
      if (!gathers) continue;
      Tensor<std::uint16_t> alone(kTopK * kOut);
      work.slots = kTopK;
      work.offsets = own.offsets.data();
      work.entries = own.entries.data();
      work.x = x.data() + token * kIn;
      work.y = alone.data();
      if (reinterpret_cast<std::uintptr_t>(work.x) % 16 != 0) continue;
      enqueue(work, nullptr);
      for (std::int64_t k = 0; k < kTopK; ++k) {
        const std::int64_t before = slots.slots_of[static_cast<std::size_t>(token * kTopK + k)];
        BOOST_TEST(alone.values(own.slots_of[static_cast<std::size_t>(k)] * kOut, kOut) ==
                   y.values(before * kOut, kOut));
      }
    }
  }
}

/// Integers of experts are multiplied as QuantizedProductKernel multiplies those of one layer.
BOOST_DATA_TEST_CASE(experts_with_integers_multiply_as_a_layer_does,
                     data::make(kRowTypes) * data::make({8, 4}), dtype, bits) {
  constexpr std::int32_t kIn = 96;
  constexpr std::int32_t kOut = 72;
  constexpr std::int32_t kGroupSize = 64;  // the last group is smaller
  constexpr std::int32_t kGroups = 2;
  constexpr std::int32_t kTopK = 2;
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    for (const int tokens : {1, 45}) {
      const std::int64_t count = std::int64_t{tokens} * kTopK;
      const auto chosen = random_choices(count, &random);
      const Slots slots(chosen);
      const auto x = random_elements(dtype, std::int64_t{tokens} * kIn, &random);
      const std::int64_t expert_bytes = std::int64_t{kOut} * kIn * bits / 8;
      Tensor<std::uint8_t> weights(8 * expert_bytes);
      Tensor<std::uint8_t> zeros(8 * kOut * kGroups);
      for (std::int64_t i = 0; i < 8 * expert_bytes; ++i)
        weights[i] = static_cast<std::uint8_t>(random.integer(0, 255));
      for (std::int64_t i = 0; i < 8 * kOut * kGroups; ++i) {
        zeros[i] = static_cast<std::uint8_t>(random.integer(0, bits == 4 ? 15 : 255));
      }
      const auto scales = random_floats(std::int64_t{8} * kOut * kGroups, &random);
      const bool has_zeros = random.integer(0, 1) == 0;
      Tensor<std::uint16_t> y(count * kOut);
      enqueue(ExpertProduct{.dtype = dtype,
                            .slots = count,
                            .experts = 8,
                            .in_size = kIn,
                            .out_size = kOut,
                            .offsets = slots.offsets.data(),
                            .entries = slots.entries.data(),
                            .entries_per_row = kTopK,
                            .x = x.data(),
                            .weights = weights.data(),
                            .bits = bits,
                            .group_size = kGroupSize,
                            .scales = scales.data(),
                            .zeros = has_zeros ? zeros.data() : nullptr,
                            .y = y.data()},
              nullptr);
      const QuantizedProductKernel layer(
          {.dtype = dtype, .bits = bits, .in_size = kIn, .out_size = kOut, .group_size = kGroupSize});
      for (std::int64_t expert = 0; expert < 8; ++expert) {
        Tensor<std::uint16_t> all(std::int64_t{tokens} * kOut);
        const std::int64_t first = expert * kOut * kGroups;
        layer.enqueue(tokens,
                      {.x = x.data(),
                       .weights = weights.data() + expert * expert_bytes,
                       .scales = scales.data() + first,
                       .zeros = has_zeros ? zeros.data() + first : nullptr},
                      all.data(), nullptr);
        for (std::int64_t slot = 0; slot < count; ++slot) {
          if (slots.expert_of[static_cast<std::size_t>(slot)] != expert) continue;
          const std::int64_t token = slots.entries[static_cast<std::size_t>(slot)] / kTopK;
          BOOST_TEST(y.values(slot * kOut, kOut) == all.values(token * kOut, kOut));
        }
      }
      BOOST_TEST(y.rest_is_unchanged());
    }
  }
}

BOOST_DATA_TEST_CASE(slots_are_summed_in_order, data::make(kRowTypes) * data::make({true, false}), dtype,
                     adds) {
  constexpr std::int64_t kWidth = 264;
  constexpr std::int32_t kTopK = 3;
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    const std::int64_t tokens = random.integer(1, 7);
    const auto chosen = random_choices(tokens * kTopK, &random);
    const Slots slots(chosen);
    const auto weights = random_floats(tokens * kTopK, &random);
    const bool is_weighted = random.integer(0, 1) == 0;
    const auto y = random_elements(dtype, tokens * kTopK * kWidth, &random);
    const auto bias = random_floats(8 * kWidth, &random);
    const auto before = random_floats(tokens * kWidth, &random);
    Tensor<float> output = before;
    enqueue(SumSlots{.dtype = dtype,
                     .tokens = tokens,
                     .top_k = kTopK,
                     .width = kWidth,
                     .slots_of = slots.slots_of.data(),
                     .weights = is_weighted ? weights.data() : nullptr,
                     .y = y.data(),
                     .bias = adds ? bias.data() : nullptr,
                     .chosen = chosen.data(),
                     .adds = adds,
                     .output = output.data()},
            nullptr);
    std::int64_t wrong = 0;
    for (std::int64_t i = 0; i < tokens * kWidth; ++i) {
      double sum = adds ? double{before[i]} : 0.0;
      for (std::int64_t k = 0; k < kTopK; ++k) {
        const std::int64_t entry = i / kWidth * kTopK + k;
        const std::int64_t slot = slots.slots_of[static_cast<std::size_t>(entry)];
        const double added =
            adds ? bias[chosen[static_cast<std::size_t>(entry)] * kWidth + i % kWidth] : 0.0F;
        sum += double{is_weighted ? weights[entry] : 1.0F} *
               (element(dtype, y[slot * kWidth + i % kWidth]) + added);
      }
      wrong += static_cast<std::int64_t>(!(std::abs(output[i] - sum) <= 1e-5));
    }
    BOOST_TEST(wrong == 0);
    BOOST_TEST(output.rest_is_unchanged());
  }
}

/// Tiles have one expert and one adapter, are as long as possible, and follow one another.
BOOST_DATA_TEST_CASE(tiles_have_one_expert_and_one_adapter, data::make({1, 40, 1500}) * data::make({16, 64}),
                     tokens, tile_slots) {
  constexpr std::int32_t kTopK = 2;
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    const std::int64_t count = std::int64_t{tokens} * kTopK;
    const auto chosen = random_choices(count, &random);
    const Slots slots(chosen);
    // Ranges of tokens with the same adapter.
    constexpr std::int32_t kRanges = 4;
    std::vector<std::int32_t> token_slots;
    for (std::int32_t token = 0; token < tokens; ++token) {
      token_slots.push_back(std::vector{-1, 2, -1, 0}[static_cast<std::size_t>(token * kRanges / tokens)]);
    }
    const std::int64_t most = most_tiles(count, 8, kRanges, tile_slots);
    Tensor<std::int32_t> written(3 * (most + 1));
    auto* tiles = reinterpret_cast<SlotTile*>(written.data());
    enqueue(NumberTiles{.slots = count,
                        .top_k = kTopK,
                        .tile_slots = tile_slots,
                        .max_tiles = most,
                        .entries = slots.entries.data(),
                        .expert_of = slots.expert_of.data(),
                        .token_slots = token_slots.data(),
                        .tiles = tiles},
            nullptr);
    const auto key_of = [&](std::int64_t slot) {
      const auto at = static_cast<std::size_t>(slot);
      return std::pair(slots.expert_of[at], token_slots[static_cast<std::size_t>(slots.entries[at] / kTopK)]);
    };
    std::int64_t number = 0;
    for (std::int64_t slot = 0; slot < count; ++slot) {
      if (slot % tile_slots != 0 && key_of(slot) == key_of(slot - 1)) continue;
      BOOST_REQUIRE(number < most);
      BOOST_TEST(tiles[number].first == slot);
      BOOST_TEST(tiles[number].expert == key_of(slot).first);
      BOOST_TEST(tiles[number].adapter_slot == key_of(slot).second);
      ++number;
    }
    for (; number <= most; ++number) {
      BOOST_TEST(tiles[number].first == count);
      BOOST_TEST(tiles[number].adapter_slot == -1);
    }
    BOOST_TEST(written.rest_is_unchanged());
  }
}

BOOST_AUTO_TEST_CASE(rows_are_gathered_by_slot) {
  constexpr std::int64_t kWidth = 24;
  constexpr std::int32_t kTopK = 3;
  FreshRandom random;
  const auto chosen = random_choices(std::int64_t{13} * kTopK, &random);
  const Slots slots(chosen);
  const auto x = random_elements(DType::kBFloat16, 13 * kWidth, &random);
  Tensor<std::uint16_t> y(13 * kTopK * kWidth);
  enqueue(GatherSlots{.slots = 13 * kTopK,
                      .width = kWidth,
                      .entries = slots.entries.data(),
                      .entries_per_row = kTopK,
                      .x = x.data(),
                      .y = y.data()},
          nullptr);
  for (std::int64_t slot = 0; slot < 13 * kTopK; ++slot) {
    const std::int64_t row = slots.entries[static_cast<std::size_t>(slot)] / kTopK;
    BOOST_TEST(y.values(slot * kWidth, kWidth) == x.values(row * kWidth, kWidth));
  }
  BOOST_TEST(y.rest_is_unchanged());
}

BOOST_DATA_TEST_CASE(gathered_rows_may_have_weights, data::make(kRowTypes), dtype) {
  constexpr std::int64_t kWidth = 24;
  constexpr std::int32_t kTopK = 3;
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    const auto chosen = random_choices(std::int64_t{13} * kTopK, &random);
    const Slots slots(chosen);
    const auto x = random_elements(dtype, 13 * kWidth, &random);
    const auto weights = random_floats(13 * kTopK, &random);
    Tensor<std::uint16_t> y(13 * kTopK * kWidth);
    enqueue(GatherSlots{.dtype = dtype,
                        .slots = 13 * kTopK,
                        .width = kWidth,
                        .entries = slots.entries.data(),
                        .entries_per_row = kTopK,
                        .weights = weights.data(),
                        .x = x.data(),
                        .y = y.data()},
            nullptr);
    std::int64_t wrong = 0;
    for (std::int64_t i = 0; i < 13 * kTopK * kWidth; ++i) {
      const std::int32_t entry = slots.entries[static_cast<std::size_t>(i / kWidth)];
      const double value = double{weights[entry]} * element(dtype, x[entry / kTopK * kWidth + i % kWidth]);
      wrong += static_cast<std::int64_t>(!is_rounded(value, dtype, y[i], std::abs(value) * 0x1p-22));
    }
    BOOST_TEST(wrong == 0);
    BOOST_TEST(y.rest_is_unchanged());
  }
}

BOOST_AUTO_TEST_CASE(invalid_sizes_are_refused_by_name) {
  BOOST_CHECK_EXCEPTION(enqueue(RouteTokens{.tokens = 1, .experts = 2000}, nullptr), ConfigError,
                        says("RouteTokens: experts is 2000; expected 1 to 1024"));
  BOOST_CHECK_EXCEPTION(enqueue(RouteTokens{.tokens = 1, .experts = 9, .top_k = 4, .num_groups = 4}, nullptr),
                        ConfigError,
                        says("RouteTokens: num_groups does not divide experts; top_k is 4; expected 1 to 2"));
  BOOST_CHECK_EXCEPTION(enqueue(NumberSlots{.slots = -1, .experts = 0}, nullptr), ConfigError,
                        says("NumberSlots: slots is -1; expected 0 to 2147483647; experts is 0"));
  BOOST_CHECK_EXCEPTION(
      enqueue(ExpertProduct{.dtype = DType::kFloat32, .slots = 1, .experts = 1, .in_size = 12, .out_size = 4},
              nullptr),
      ConfigError,
      says("ExpertProduct: dtype is float32; expected float16 or bfloat16; in_size is 12; expected"));
  BOOST_CHECK_EXCEPTION(
      enqueue(ExpertProduct{.experts = 1, .in_size = 40, .out_size = 8, .bits = 5, .group_size = 24},
              nullptr),
      ConfigError,
      says("ExpertProduct: bits is none of 0, 4 and 8; in_size does not fit the integers; group_size is not "
           "a"));
  BOOST_CHECK_EXCEPTION(
      enqueue(SumSlots{.tokens = 1, .top_k = 33, .width = 4}, nullptr), ConfigError,
      says("SumSlots: top_k is 33; expected 1 to 32; width is 4; expected a multiple of 8"));
  BOOST_CHECK_EXCEPTION(enqueue(NumberTiles{.slots = 1, .top_k = 40, .tile_slots = 0}, nullptr), ConfigError,
                        says("NumberTiles: top_k is 40; expected 1 to 32; tile_slots is 0; expected 1 to"));
  BOOST_CHECK_EXCEPTION(enqueue(GatherSlots{.slots = 1, .width = 12, .entries_per_row = 0}, nullptr),
                        ConfigError, says("GatherSlots: width is 12; expected a multiple of 8"));
  enqueue(RouteTokens{.experts = 1}, nullptr);
  enqueue(NumberTiles{}, nullptr);
  enqueue(GatherSlots{.width = 8}, nullptr);
  enqueue(NumberSlots{.experts = 1}, nullptr);
  enqueue(ExpertProduct{.experts = 1, .in_size = 8, .out_size = 8}, nullptr);
  enqueue(SumSlots{.width = 8}, nullptr);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::cuda::experts_test
