// Layers about a ReLU: what is left out changes no bit.

#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "adaptrt/engine/step_profile.h"
#include "adaptrt/kernels/kernel_table.h"
#include "emulated_tiles/kernel_tables.h"
#include "engine/random_model.h"

namespace adaptrt::testing {
namespace {

namespace data = boost::unit_test::data;

constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16};
constexpr LinearEpilogue kActivations[] = {LinearEpilogue::kRelu, LinearEpilogue::kReluMul,
                                           LinearEpilogue::kReluMulRelu};
constexpr float kOpen = 20.0F;
constexpr float kClosed = -20.0F;

ModelOptions options_of(DType dtype, LinearEpilogue activation, float gate_bias, bool is_sparse) {
  return {.dtype = dtype,
          .shape = {.hidden_size = 72, .attention = {4, 2, 12}},
          .intermediate_size = 320,
          .biases = true,
          .activation = activation,
          .threshold = activation == LinearEpilogue::kReluMul ? 0.25F : 0.0F,
          .gate_bias = gate_bias,
          .is_sparse = is_sparse,
          .max_rank = 9};
}

std::unique_ptr<Engine> engine_of(const RandomModel& model, const std::string& kernels, int threads,
                                  std::shared_ptr<StepProfile> profile = nullptr) {
  auto made = make_cpu_engine(model.program, std::make_shared<ThreadPool>(threads), kernel_table(kernels),
                              std::move(profile));
  made->allocate_kv_blocks(64);
  return made;
}

/// So many sequences of one token each, every other one with an adapter.
StepArrays decoding(std::int64_t sequences, const std::vector<DeviceAdapter>& adapters) {
  std::vector<Piece> pieces;
  for (std::int64_t i = 0; i < sequences; ++i) {
    const auto number = static_cast<std::size_t>(i);
    pieces.push_back({.tokens = {static_cast<std::int32_t>(7 * i + 3)},
                      .blocks = {static_cast<std::int32_t>(i)},
                      .adapter = i % 3 == 2 ? nullptr : &adapters[number % adapters.size()]});
  }
  return StepArrays(pieces);
}

BOOST_AUTO_TEST_SUITE(sparse)

BOOST_DATA_TEST_CASE(sparse_layers_have_the_bits_of_dense_ones,
                     kernel_tables() * data::make({0, 1}) * data::make({0, 1, 2}) *
                         data::make({kClosed, -1.3F, 0.0F, kOpen}),
                     kernels, dtype_index, activation_index, gate_bias) {
  const DType dtype = kDTypes[dtype_index];
  const LinearEpilogue activation = kActivations[activation_index];
  RandomModel dense(options_of(dtype, activation, gate_bias, false));
  RandomModel sparse(options_of(dtype, activation, gate_bias, true));
  const std::vector<DeviceAdapter> adapters{sparse.adapter(5, true, 0, true), sparse.adapter(6, false, 3)};
  for (const int threads : {1, 3}) {
    const auto dense_engine = engine_of(dense, kernels, threads);
    const auto sparse_engine = engine_of(sparse, kernels, threads);
    for (const std::int64_t sequences : {1, 2, 3, 4, 5, 8}) {
      const StepArrays arrays = decoding(sequences, adapters);
      const auto expected = logits_of(dense_engine.get(), arrays.input());
      const auto found = logits_of(sparse_engine.get(), arrays.input());
      BOOST_TEST_REQUIRE(std::isfinite(expected.front()));
      BOOST_TEST_REQUIRE(std::memcmp(found.data(), expected.data(), found.size() * sizeof(float)) == 0,
                         sequences << " sequences, " << threads << " threads");
    }
  }
}

// Of the gated layer and of what reads it, by how much is left out; both are as large.
BOOST_DATA_TEST_CASE(a_profile_counts_what_is_read, data::make({kClosed, kOpen}), gate_bias) {
  RandomModel model(options_of(DType::kFloat32, LinearEpilogue::kReluMul, gate_bias, true));
  const auto profile = std::make_shared<StepProfile>(1);
  const auto engine = engine_of(model, "", 1, profile);
  const auto bytes_of = [&](std::int64_t sequences) {
    const std::vector<DeviceAdapter> adapters{model.adapter(5, false)};
    logits_of(engine.get(), decoding(sequences, adapters).input());
    std::int64_t bytes = 0;
    const auto steps = profile->take_steps();
    for (const OpRecord& record : steps.front().ops) {
      const auto& op = model.program.body[static_cast<std::size_t>(record.index)];
      const bool is_linear = record.section == StepSection::kBody && std::holds_alternative<LinearOp>(op);
      if (is_linear) bytes += record.cost.weight_bytes;
    }
    return bytes;
  };
  constexpr std::int64_t kLayer = 72 * 320 * 4;
  const std::int64_t closed = gate_bias == kClosed ? 2 * 2 * kLayer : 0;  // two of both layers
  BOOST_TEST(bytes_of(1) == bytes_of(8) - closed);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing
