// An engine with quantised weights gives the results of one with the dequantised weights.

#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstdint>
#include <memory>
#include <variant>
#include <vector>

#include "adaptrt/cpu/cpu_engine.h"
#include "cpu/random_model.h"
#include "cpu/step_arrays.h"

namespace adaptrt::testing::quantized_engine_test {
namespace {

namespace data = boost::unit_test::data;

constexpr Quantization kQuantizations[] = {
    {.algo = QuantAlgo::kW8A16},
    {.algo = QuantAlgo::kW4A16},
    {.algo = QuantAlgo::kW4A16, .group_size = 16, .zero_points = true},
    {.algo = QuantAlgo::kW8A8},
    {.algo = QuantAlgo::kW8A16, .zero_points = true},
    {.algo = QuantAlgo::kW8A16, .group_size = 16, .zero_points = true, .act_order = true},
    {.algo = QuantAlgo::kW4A16, .group_size = 8, .act_order = true},
    {.algo = QuantAlgo::kW4A8, .group_size = 16},
    {.algo = QuantAlgo::kW4A8, .group_size = 16, .zero_points = true},
};

/// Returns the program with its quantised matrices (or only those with a codebook) replaced by their values.
Program dequantized(Program program, Storage* storage, bool only_codebooks = false) {
  for (auto* ops : {&program.body, &program.head}) {
    for (auto& op : *ops) {
      const auto replace = [&](std::vector<LinearPart>* parts) {
        for (auto& part : *parts) {
          if (part.weight.quantization.is_codebook() != only_codebooks) continue;
          part.weight = storage->matrix(program.dtype, part.weight.n, part.weight.k, unpack(part.weight));
        }
      };
      if (auto* linear = std::get_if<LinearOp>(&op)) replace(&linear->parts);
      if (auto* experts = std::get_if<ExpertsOp>(&op)) {
        replace(&experts->gate_up);
        replace(&experts->down);
      }
    }
  }
  return program;
}

std::vector<float> run(const Program& program, const std::vector<Piece>& pieces) {
  const auto engine = make_cpu_engine(program, std::make_shared<ThreadPool>(2));
  engine->allocate_kv_blocks(8);
  return logits_of(engine.get(), StepArrays(pieces).input());
}

BOOST_AUTO_TEST_SUITE(quantized_engine)

BOOST_DATA_TEST_CASE(logits_are_those_of_the_values_that_the_weights_stand_for,
                     data::xrange(std::size(kQuantizations)) * data::make({0, 4}), index, num_experts) {
  // Rounded activations may choose another expert.
  if (num_experts > 0 && rounds_activations(kQuantizations[index].algo)) return;
  RandomModel model({.dtype = DType::kFloat32,
                     .num_experts = num_experts,
                     .routing = {.top_k = 2},
                     .biases = true,
                     .max_rank = 5,
                     .quantization = kQuantizations[index]});
  const DeviceAdapter lora = model.adapter(1, false);
  const DeviceAdapter dora = model.adapter(2, true);
  Random random(3);
  std::vector<Piece> pieces;
  for (const auto* adapter : {static_cast<const DeviceAdapter*>(nullptr), &lora, &dora}) {
    Piece piece{.tokens = std::vector<std::int32_t>(21),
                .prompt_length = 21,
                .blocks = {static_cast<std::int32_t>(2 * pieces.size()),
                           static_cast<std::int32_t>(2 * pieces.size() + 1)},
                .adapter = adapter};
    for (auto& token : piece.tokens) token = static_cast<std::int32_t>(random.below(61));
    pieces.push_back(piece);
  }
  const auto expected = run(dequantized(model.program, &model.storage()), pieces);
  const auto actual = run(model.program, pieces);
  float greatest = 0.0F;
  for (const float logit : expected) greatest = std::max(greatest, std::abs(logit));
  // Weight-only sums differ only in rounding. int8 activations have an error of up to half of 1 / 127 of
  // their row's maximum, in each of four layers before the logits, two layers deep.
  const float tolerance = rounds_activations(kQuantizations[index].algo) ? 0.1F : 2e-5F;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    BOOST_TEST_REQUIRE(std::abs(actual[i] - expected[i]) <= tolerance * greatest, "logit " << i);
  }
}

/// An engine type for weights with a codebook, and the type that their values are rounded to.
struct CodebookTypes {
  DType dtype;
  DType value_type;
};
constexpr CodebookTypes kCodebooks[] = {{DType::kFloat32, DType::kFloat32},
                                        {DType::kFloat32, DType::kBFloat16},
                                        {DType::kFloat16, DType::kFloat16},
                                        {DType::kBFloat16, DType::kBFloat16}};

BOOST_DATA_TEST_CASE(numbers_of_a_table_give_the_bits_of_their_values,
                     data::make({0, 1, 2, 3}) * data::make({1, 2, 3, 5}) * data::make({0, 4}), index, code,
                     num_experts) {
  const auto [dtype, value_type] = kCodebooks[index];
  RandomModel model({.dtype = dtype,
                     .intermediate_size = 136,
                     .num_experts = num_experts,
                     .routing = {.top_k = 2},
                     .biases = true,
                     .max_rank = 5,
                     .quantization = {.algo = code == 3 || code == 5 ? QuantAlgo::kW8A16 : QuantAlgo::kW4A16,
                                      .group_size = code == 5 ? 0 : 8,
                                      .scale_type = DType::kFloat32,
                                      .code = static_cast<WeightCode>(code),
                                      .value_type = value_type}});
  const DeviceAdapter dora = model.adapter(2, true);
  Random random(3);
  std::vector<Piece> pieces;
  for (const std::int32_t size : {21, 1, 30}) {
    Piece piece{.tokens = std::vector<std::int32_t>(static_cast<std::size_t>(size)),
                .prompt_length = size,
                .adapter = size == 1 ? &dora : nullptr};
    for (int block = 0; block < 2; ++block) {
      piece.blocks.push_back(static_cast<std::int32_t>(2 * pieces.size()) + block);
    }
    for (auto& token : piece.tokens) token = static_cast<std::int32_t>(random.below(61));
    pieces.push_back(piece);
  }
  const auto expected = run(dequantized(model.program, &model.storage(), true), pieces);
  BOOST_TEST(run(model.program, pieces) == expected, boost::test_tools::per_element());
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::quantized_engine_test
