// Memory of the engine: in steady state, steps of one kind allocate nothing.

#include "support/allocations.h"

#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <memory>
#include <numeric>
#include <ostream>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "adaptrt/cpu/cpu_engine.h"
#include "cpu/random_model.h"
#include "cpu/step_arrays.h"

namespace adaptrt::testing::allocations_test {
namespace {

namespace data = boost::unit_test::data;

struct Case {
  std::string name;
  ModelOptions options;
  bool dynamic_positions = false;
};

std::ostream& operator<<(std::ostream& out, const Case& some) {
  return out << some.name;
}

std::vector<Case> cases() {
  constexpr Quantization kWithZeroPoints{.algo = QuantAlgo::kW4A16, .group_size = 16, .zero_points = true};
  constexpr Quantization kActOrder{
      .algo = QuantAlgo::kW4A16, .group_size = 16, .zero_points = true, .act_order = true};
  return {{"float32", {}},
          {"bfloat16", {.dtype = DType::kBFloat16, .biases = true, .head_norms = true}},
          {"float16", {.dtype = DType::kFloat16, .sliding_window = 20}},
          {"w8a16", {.dtype = DType::kBFloat16, .quantization = {.algo = QuantAlgo::kW8A16}}},
          {"w4a16 with zero points", {.dtype = DType::kBFloat16, .quantization = kWithZeroPoints}},
          {"w4a16 with act-order", {.dtype = DType::kBFloat16, .quantization = kActOrder}},
          {"w8a8", {.dtype = DType::kBFloat16, .quantization = {.algo = QuantAlgo::kW8A8}}},
          {"w4a8", {.dtype = DType::kBFloat16, .quantization = {.algo = QuantAlgo::kW4A8, .group_size = 16}}},
          {"int8 KV cache", {.dtype = DType::kBFloat16, .int8_kv_cache = true}},
          {"experts", {.dtype = DType::kBFloat16, .num_experts = 6, .routing = {.top_k = 2}}},
          {"dynamic positions", {}, true}};
}

constexpr std::int32_t kSequences = 4;
constexpr std::int32_t kChunk = 24;
constexpr std::int32_t kBlocks = 8;  // per sequence
constexpr std::int32_t kStepsBefore = 2;
constexpr std::int32_t kSteps = 5;

/// Step `number` of every sequence: `tokens` tokens of each, after those of the earlier steps.
StepArrays step_of(std::int32_t number, std::int32_t tokens, std::int32_t first_position,
                   const std::vector<const DeviceAdapter*>& adapters) {
  std::vector<Piece> pieces;
  for (std::int32_t sequence = 0; sequence < kSequences; ++sequence) {
    Piece piece{.tokens = std::vector<std::int32_t>(static_cast<std::size_t>(tokens), 1 + sequence),
                .first_position = first_position + number * tokens,
                .prompt_length = 120,
                .blocks = std::vector<std::int32_t>(kBlocks),
                .adapter = adapters[static_cast<std::size_t>(sequence) % adapters.size()]};
    std::iota(piece.blocks.begin(), piece.blocks.end(), sequence * kBlocks);
    pieces.push_back(std::move(piece));
  }
  StepArrays arrays(pieces);
  arrays.logit_rows.clear();
  for (std::int32_t end : arrays.offsets) {
    if (end > 0) arrays.logit_rows.push_back(end - 1);
  }
  return arrays;
}

/// Runs steps of `tokens` tokens per sequence; all except the first few must allocate nothing.
void check_steps(Engine& engine, std::int32_t tokens, std::int32_t first_position,
                 const std::vector<const DeviceAdapter*>& adapters) {
  const LogitsSink sink = [](std::int64_t, std::int64_t, const float*) {};
  for (std::int32_t number = 0; number < kSteps; ++number) {
    const StepArrays arrays = step_of(number, tokens, first_position, adapters);
    const StepInput input = arrays.input();
    AllocationWatch watch;
    engine.step(input, sink);
    const std::int64_t count = watch.stop();
    if (number < kStepsBefore) continue;
    BOOST_TEST(count == 0, "step " << number << " of " << tokens << " tokens a sequence allocates " << count
                                   << " times, first by\n"
                                   << watch.first_calls());
  }
}

/// Runs prefill chunks of every sequence, then decode steps; sequences take the `adapters` in turn.
void check_engine(const Program& program, const std::vector<const DeviceAdapter*>& adapters) {
  const auto engine = make_cpu_engine(program, std::make_shared<ThreadPool>(2));
  engine->allocate_kv_blocks(kSequences * kBlocks);
  check_steps(*engine, kChunk, 0, adapters);
  check_steps(*engine, 1, kSteps * kChunk, adapters);
}

RandomModel model_of(const Case& some, std::int32_t max_rank) {
  ModelOptions options = some.options;
  options.max_rank = max_rank;
  RandomModel model(options);
  if (some.dynamic_positions) {
    auto& rope = std::get<RopeTableOp>(model.program.body[1]);
    rope.kind = RopeKind::kDynamic;
    rope.factor = 2.0F;
    rope.original_max_position = 30;
  }
  return model;
}

[[maybe_unused]] [[gnu::noinline]] std::vector<int> make_for_the_name() {
  return std::vector<int>(100);
}

BOOST_AUTO_TEST_SUITE(allocations)

// Under an emulator, addr2line reads the emulator's file.
#if !defined(ADAPTRT_EMULATED)
BOOST_AUTO_TEST_CASE(an_allocation_is_named) {
  AllocationWatch watch;
  const auto made = make_for_the_name();
  BOOST_TEST(watch.stop() > 0);
  const std::string calls = watch.first_calls();
  // A compiler may make a copy of the function for this caller.
  const bool is_named = calls.find("make_for_the_name") != std::string::npos ||
                        calls.find("an_allocation_is_named") != std::string::npos;
  BOOST_TEST(is_named, calls);
}
#endif

BOOST_DATA_TEST_CASE(steady_steps_of_the_base_model_allocate_nothing, data::make(cases()), some) {
  const RandomModel model = model_of(some, 0);
  check_engine(model.program, {nullptr});
}

BOOST_DATA_TEST_CASE(steady_steps_with_adapters_allocate_nothing, data::make(cases()), some) {
  RandomModel model = model_of(some, 6);
  const DeviceAdapter lora = model.adapter(1, false);
  const DeviceAdapter dora = model.adapter(2, true);
  check_engine(model.program, {&lora});
  check_engine(model.program, {&dora});
  check_engine(model.program, {&lora, nullptr, &dora});
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::allocations_test
