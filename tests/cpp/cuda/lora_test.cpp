#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/lora/modules.h"
#include "cuda/kernels/lora/step.h"
#include "lora_case.h"
#include "print_dtype.h"

namespace adaptrt::cuda::lora_test {
namespace {

namespace data = boost::unit_test::data;

constexpr DType kDTypes[] = {DType::kFloat16, DType::kBFloat16};

/// `count` sequences of one token, each with a different adapter of this rank.
LoraShape decode(DType dtype, std::int32_t count, std::int32_t rank) {
  LoraShape shape{.dtype = dtype, .max_rank = rank};
  for (std::int32_t i = 0; i < count; ++i) {
    shape.ranks.push_back({rank});
    shape.lengths.push_back(1);
    shape.slots.push_back(i);
  }
  return shape;
}

void check(const LoraShape& shape) {
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    const LoraCase step(shape, &random);
    const Elements y = step.run();
    BOOST_TEST(step.wrong_elements(y) == 0);
    BOOST_TEST((step.run_as_long_step() == y));
  }
}

BOOST_AUTO_TEST_SUITE(lora_kernel)

BOOST_DATA_TEST_CASE(ranks_are_exact,
                     data::make(kDTypes) * data::make({1, 2, 4, 7, 8, 12, 16, 24, 30, 33, 64, 100, 256}),
                     dtype, rank) {
  for (const bool integers : {false, true}) {
    LoraShape shape = decode(dtype, 2, rank);
    shape.max_rank = 256;
    if (integers) shape.numbers = Numbers::kIntegers;
    check(shape);
  }
}

BOOST_DATA_TEST_CASE(as_many_adapters_as_tokens, data::make(kDTypes) * data::make({1, 3, 64}), dtype, count) {
  LoraShape shape = decode(dtype, count, 8);
  shape.in = 136;
  shape.out_sizes = {48, 24, 24};
  for (auto& ranks : shape.ranks) ranks = {8, 4, 8};
  shape.numbers = Numbers::kIntegers;
  check(shape);
}

/// Blocks and warps of expand end within a part, and warps of shrink have several stages or none.
BOOST_DATA_TEST_CASE(wide_parts, data::make({16, 17, 40}) * data::make({1, 12}), rank, length) {
  check({.dtype = DType::kFloat16,
         .in = 1320,
         .out_sizes = {1208, 8, 264},
         .max_rank = 40,
         .ranks = {{rank, 0, rank}, {8, rank, 4}},
         .lengths = {length, 1, 1},
         .slots = {0, -1, 1},
         .dora = true});
}

/// There are enough token tiles that a block processes several tiles of the rank's rows in turn.
BOOST_AUTO_TEST_CASE(high_ranks_of_many_tiles) {
  LoraShape shape = decode(DType::kBFloat16, 70, 128);
  shape.in = 64;
  shape.out_sizes = {8, 8, 8};
  shape.max_rank = 128;
  for (auto& ranks : shape.ranks) ranks = {128, 40, 128};
  shape.numbers = Numbers::kIntegers;
  check(shape);
}

BOOST_DATA_TEST_CASE(runs_of_tokens, data::make(kDTypes) * data::make({1, 8, 9, 16, 17, 63, 64, 65, 512}),
                     dtype, length) {
  check({.dtype = dtype,
         .in = 200,
         .out_sizes = {40},
         .max_rank = 72,
         .ranks = {{length == 512 ? 16 : 72}},
         .lengths = {length},
         .slots = {0},
         .dora = true});
}

/// Sequences with and without adapters, empty sequences, and ranks that differ by part or are missing.
LoraShape mixed(DType dtype, bool many_tokens) {
  return {.dtype = dtype,
          .in = 192,
          .out_sizes = {72, 24, 32},
          .max_rank = 80,
          .ranks = {{16, 8, 80}, {0, 64, 3}, {0, 0, 0}, {1, 0, 40}},
          .lengths = {0, 3, 20, 0, 1, many_tokens ? 180 : 19, 5, 1, 1, many_tokens ? 66 : 9, 0, 7, 1},
          .slots = {2, -1, 0, 3, 0, 1, 1, 2, 2, -1, 3, 3, 0},
          .dora = true};
}

BOOST_DATA_TEST_CASE(mixed_batches,
                     data::make(kDTypes) * data::make({false, true}) * data::make({false, true}), dtype,
                     many_tokens, integers) {
  LoraShape shape = mixed(dtype, many_tokens);
  if (integers) shape.numbers = Numbers::kIntegers;
  check(shape);
  shape.shifts = true;
  check(shape);
  shape.dora = false;
  check(shape);
  shape.shifts = false;
  check(shape);
}

BOOST_DATA_TEST_CASE(odd_widths_and_addresses, data::make(kDTypes) * data::make({false, true}), dtype,
                     many_tokens) {
  LoraShape shape = mixed(dtype, many_tokens);
  shape.numbers = Numbers::kIntegers;
  shape.shifts = true;
  shape.in = 97;
  shape.out_sizes = {71, 1, 33};
  check(shape);
  shape.odd_addresses = true;
  check(shape);
  shape.in = 96;
  shape.out_sizes = {72, 8, 32};
  check(shape);
}

BOOST_DATA_TEST_CASE(every_slice_of_the_input_is_summed, data::make({1, 31, 64, 65, 512, 520, 1031}), in) {
  for (const int length : {2, 30}) {
    check({.in = in,
           .out_sizes = {8},
           .max_rank = 16,
           .ranks = {{16}},
           .lengths = {length},
           .slots = {0},
           .numbers = Numbers::kIntegers});
  }
}

/// The bits are the same alone, in a batch, and if a range of many tokens uses a different path.
BOOST_DATA_TEST_CASE(a_token_does_not_depend_on_the_others, data::make(kDTypes), dtype) {
  FreshRandom random;
  LoraShape shape = mixed(dtype, true);
  shape.in = 700;
  shape.shifts = true;
  shape.numbers = Numbers::kCancelling;
  const LoraCase step(shape, &random);
  const Elements together = step.run();
  const auto sequences = static_cast<std::int64_t>(shape.lengths.size());
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    for (std::int64_t sequence = 0; sequence < sequences; ++sequence) {
      const Elements alone = step.run(sequence, sequence + 1);
      const std::uint16_t* same = together.data() + step.first_token(sequence) * step.out();
      BOOST_TEST(std::equal(same, same + alone.size(), alone.data()));
    }
    BOOST_TEST((step.run_in_place() == together));
    BOOST_TEST((step.run_tiled(step.tokens() + 1) == together));
  }
}

BOOST_DATA_TEST_CASE(tiles_of_experts_have_the_same_bits, data::make(kDTypes) * data::make({false, true}),
                     dtype, many_tokens) {
  FreshRandom random;
  LoraShape shape = mixed(dtype, many_tokens);
  shape.shifts = true;
  shape.decode_tokens = many_tokens ? 0 : LoraKernel::kDecodeTokens;
  const LoraCase step(shape, &random);
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    BOOST_TEST((step.run_as_experts() == step.run()));
  }
}

BOOST_DATA_TEST_CASE(padding_of_a_rank_is_not_summed, data::make({1, 40}), length) {
  check({.in = 64,
         .out_sizes = {16},
         .ranks = {{12}},
         .lengths = {length},
         .slots = {0},
         .numbers = Numbers::kInfinite});
}

BOOST_AUTO_TEST_CASE(a_batch_of_the_base_model_is_the_base) {
  FreshRandom random;
  const LoraCase step({.out_sizes = {9, 8}, .ranks = {{0, 0}}, .lengths = {4, 40, 1}, .slots = {-1, 0, -1}},
                      &random);
  BOOST_TEST((step.run() == step.base()));
}

bool refuses(const std::function<void()>& call, const std::vector<std::string>& parts) {
  try {
    call();
  } catch (const ConfigError& error) {
    for (const auto& part : parts) {
      if (std::string(error.what()).find(part) == std::string::npos) return false;
    }
    return true;
  }
  return false;
}

BOOST_AUTO_TEST_CASE(invalid_arguments_are_refused) {
  BOOST_TEST(refuses([] { LoraKernel({.dtype = DType::kFloat32, .layer = -1, .max_rank = 0}); },
                     {"float32", "layer -1", "max_rank 0", "0 module_ids"}));
  BOOST_TEST(refuses(
      [] { LoraKernel({.module_ids = {kNumLoraModules, 1}, .out_sizes = {0}, .max_rank = 8}); },
      {"module id " + std::to_string(kNumLoraModules), "out size 0", "2 module_ids and 1 out_sizes"}));
  // Modules of experts need no place in a row of the tables.
  BOOST_CHECK_NO_THROW(
      LoraKernel({.module_ids = {kNumLoraModules}, .out_sizes = {8}, .max_rank = 8, .expert_entry = 0}));
  const LoraKernel kernel({.layer = 3, .module_ids = {1}, .out_sizes = {8}, .max_rank = 9});
  BOOST_TEST(
      refuses([&] { kernel.enqueue({.tokens = -1, .in = 0, .layers = 3}, {}, nullptr, nullptr, nullptr); },
              {"tokens -1", "in 0", "layers 3"}));
  BOOST_TEST(
      refuses([] { LoraKernel({.module_ids = {1}, .out_sizes = {8}, .max_rank = 9, .expert_entry = -2}); },
              {"expert_entry -2 must be at least 0"}));
  const LoraKernel experts({.module_ids = {1}, .out_sizes = {8}, .max_rank = 9, .expert_entry = 0});
  BOOST_TEST(
      refuses([&] { experts.enqueue({.tokens = 1, .in = 8, .layers = 1}, {}, nullptr, nullptr, nullptr); },
              {"tiles 0", "tiles are for experts, and needed by them"}));
  BOOST_TEST(kernel.workspace_bytes(10) == 10 * 16 * 2);
}

BOOST_AUTO_TEST_CASE(the_table_is_as_wide_as_there_are_modules) {
  // No plugin acts on modules from kNewTokens on.
  const auto is_in_tables = [](const LoraModuleInfo& info) { return info.module < LoraModule::kNewTokens; };
  BOOST_TEST(lora::kNumModules == std::ranges::count_if(lora_modules(), is_in_tables));
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::cuda::lora_test
