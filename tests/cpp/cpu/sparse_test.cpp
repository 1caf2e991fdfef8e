// ReLU-gated layers: skipping inactive neurons changes no bit.

#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "adaptrt/cpu/cpu_engine.h"
#include "adaptrt/cpu/kernel_table.h"
#include "adaptrt/engine/step_profile.h"
#include "cpu/random_model.h"
#include "cpu/step_arrays.h"
#include "emulated_tiles/kernel_tables.h"
#include "support/sanitized.h"

namespace adaptrt::testing::sparse_test {
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

/// Makes `sequences` sequences of one token each, every second one with an adapter.
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

/// The outputs of down are whole panels, so that it has columns.
ModelOptions with_columns(ModelOptions options) {
  options.shape = {.hidden_size = 192, .attention = {4, 2, 12}};
  return options;
}

/// Compares batches of several sizes, with the adapters of `sparse` in both models.
void require_same_bits(RandomModel* dense, RandomModel* sparse, const std::string& kernels) {
  const std::vector<DeviceAdapter> adapters{sparse->adapter(5, true, 0, true), sparse->adapter(6, false, 3)};
  for (const int threads : kSanitizedPart ? std::vector{3} : std::vector{1, 3}) {
    const auto dense_engine = engine_of(*dense, kernels, threads);
    const auto sparse_engine = engine_of(*sparse, kernels, threads);
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

BOOST_AUTO_TEST_SUITE(sparse)

BOOST_DATA_TEST_CASE(sparse_layers_have_the_bits_of_dense_ones,
                     kernel_tables() * data::make({0, 1}) * data::make({0, 1, 2}) *
                         data::make({kClosed, -1.3F, 0.0F, kOpen}),
                     kernels, dtype_index, activation_index, gate_bias) {
  const DType dtype = kDTypes[dtype_index];
  const LinearEpilogue activation = kActivations[activation_index];
  RandomModel dense(options_of(dtype, activation, gate_bias, false));
  RandomModel sparse(options_of(dtype, activation, gate_bias, true));
  require_same_bits(&dense, &sparse, kernels);
}

// With widths in whole panels, down has columns.
BOOST_DATA_TEST_CASE(columns_have_the_bits_of_panels,
                     kernel_tables() * data::make({0, 1, 2}) * data::make({0, 1, 2}) *
                         data::make({kClosed, -1.3F, 0.0F, kOpen}),
                     kernels, dtype_index, activation_index, gate_bias) {
  const DType dtype = dtype_index == 2 ? DType::kFloat16 : kDTypes[dtype_index];
  const LinearEpilogue activation = kActivations[activation_index];
  if (dtype == DType::kFloat16 && is_relu_gated(activation)) return;  // no such rows exist
  RandomModel dense(with_columns(options_of(dtype, activation, gate_bias, false)));
  RandomModel sparse(with_columns(options_of(dtype, activation, gate_bias, true)));
  require_same_bits(&dense, &sparse, kernels);
}

ModelOptions predicted_options(DType dtype, LinearEpilogue activation, float least_score, bool is_sparse) {
  ModelOptions options = options_of(dtype, activation, 0.5F, is_sparse);
  options.predictor_rank = 24;
  options.least_score = least_score;
  return options;
}

// Scores close some gates, nearly none, or all: skipping them changes no bit.
BOOST_DATA_TEST_CASE(gates_that_are_not_read_change_no_bit,
                     kernel_tables() * data::make({0, 1}) * data::make({0, 1, 2}) *
                         data::make({-50.0F, 0.0F, 0.4F, 50.0F}),
                     kernels, dtype_index, activation_index, least_score) {
  const DType dtype = kDTypes[dtype_index];
  const LinearEpilogue activation = kActivations[activation_index];
  RandomModel dense(predicted_options(dtype, activation, least_score, false));
  RandomModel sparse(predicted_options(dtype, activation, least_score, true));
  require_same_bits(&dense, &sparse, kernels);
}

/// Returns W x.
std::vector<double> product(const PanelMatrix& weight, const std::vector<double>& x) {
  const std::vector<float> values = unpack(weight);
  std::vector<double> y(static_cast<std::size_t>(weight.n));
  for (std::size_t i = 0; i < y.size(); ++i) {
    for (std::size_t k = 0; k < x.size(); ++k) y[i] += static_cast<double>(values[i * x.size() + k]) * x[k];
  }
  return y;
}

std::vector<double> normed(const RmsNormOp& op, const std::vector<double>& x) {
  double squares = 0.0;
  for (const double value : x) squares += value * value;
  const double factor = 1.0 / std::sqrt(squares / static_cast<double>(x.size()) + op.epsilon);
  std::vector<double> y = x;
  for (std::size_t i = 0; i < y.size(); ++i) y[i] *= factor * op.weight.data[i];
  return y;
}

/// Op numbers of a RandomModel with one layer and a predictor after attention.
constexpr std::size_t kNorm = 7, kFirst = 8 + 1, kSecond = 8 + 2, kGated = 8 + 3, kDown = 8 + 4;

/// Returns the logits of a token if attention adds nothing.
std::vector<double> logits_by_formula(const Program& program, std::int32_t token) {
  const auto linear = [&](std::size_t at) -> const LinearOp& { return std::get<LinearOp>(program.body[at]); };
  const PanelMatrix& table = std::get<EmbeddingOp>(program.body[0]).table;
  const std::vector<float> rows = unpack(table);
  std::vector<double> x(rows.begin() + token * table.k, rows.begin() + (token + 1) * table.k);
  const LinearOp& gated = linear(kGated);
  const LinearOp& down = linear(kDown);
  std::vector<double> inner = product(linear(kFirst).parts[0].weight, x);
  for (double& value : inner) value = std::max(value, 0.0);
  const std::vector<double> scores = product(linear(kSecond).parts[0].weight, inner);
  const std::vector<double> h = normed(std::get<RmsNormOp>(program.body[kNorm]), x);
  const std::vector<double> gates = product(gated.parts[0].weight, h);
  std::vector<double> made = product(gated.parts[1].weight, h);
  int closed_by_score = 0;
  for (std::size_t i = 0; i < made.size(); ++i) {
    BOOST_TEST_REQUIRE(std::abs(scores[i] - gated.least_score) > 1e-6);
    const double gate = gates[i] + gated.parts[0].bias.data[i];
    const bool is_open = gate > gated.threshold;
    if (is_open && scores[i] < gated.least_score) ++closed_by_score;
    made[i] += gated.parts[1].bias.data[i];
    made[i] = is_open && scores[i] >= gated.least_score ? gate * made[i] : 0.0;
  }
  BOOST_TEST(closed_by_score > 20);
  const std::vector<double> added = product(down.parts[0].weight, made);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] += added[i] + down.parts[0].bias.data[i];
  return product(table, normed(std::get<RmsNormOp>(program.head[0]), x));
}

// One sequence uses the path for few rows, eight use the path that reads everything.
BOOST_DATA_TEST_CASE(predicted_gates_follow_their_formula, kernel_tables() * data::make({1, 8}), kernels,
                     sequences) {
  ModelOptions options = predicted_options(DType::kFloat32, LinearEpilogue::kReluMul, 0.2F, true);
  options.num_layers = 1;
  options.max_rank = 0;
  RandomModel model(options);
  LinearPart& dense = std::get<LinearOp>(model.program.body[kNorm - 1]).parts[0];  // of attention
  const std::vector<float> zeros(static_cast<std::size_t>(dense.weight.n * dense.weight.k));
  dense = {.weight = model.storage().matrix(DType::kFloat32, dense.weight.n, dense.weight.k, zeros),
           .bias = {}};
  const auto engine = engine_of(model, kernels, 2);
  StepArrays arrays = decoding(sequences, {DeviceAdapter{}});
  std::ranges::fill(arrays.adapters, nullptr);
  const auto found = logits_of(engine.get(), arrays.input());
  for (std::int64_t row = 0; row < sequences; ++row) {
    const auto expected = logits_by_formula(model.program, arrays.tokens[static_cast<std::size_t>(row)]);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const float logit = found[static_cast<std::size_t>(row) * expected.size() + i];
      BOOST_TEST_REQUIRE(std::abs(logit - expected[i]) < 2e-4 * std::max(1.0, std::abs(expected[i])));
    }
  }
}

// Bytes read of the gated layer and of the layer after it, for many or no closed gates; both have the same
// size.
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
  const std::int64_t closed = gate_bias == kClosed ? 2 * 2 * kLayer : 0;  // two parts in both layers
  BOOST_TEST(bytes_of(1) == bytes_of(8) - closed);
}

// All scores are too low: nothing is read of the gated layer, nor of an ungated ReLU layer.
BOOST_DATA_TEST_CASE(a_profile_counts_gates_that_are_read, data::make({0, 1}), activation_index) {
  const LinearEpilogue activation = kActivations[activation_index];
  RandomModel model(predicted_options(DType::kFloat32, activation, 50.0F, true));
  const auto profile = std::make_shared<StepProfile>(1);
  const auto engine = engine_of(model, "", 1, profile);
  const std::vector<DeviceAdapter> adapters{model.adapter(5, false)};
  const auto bytes_of = [&](std::int64_t sequences) {
    logits_of(engine.get(), decoding(sequences, adapters).input());
    std::int64_t bytes = 0;
    const auto steps = profile->take_steps();
    for (const OpRecord& record : steps.front().ops) {
      if (record.section != StepSection::kBody) continue;
      const auto* op = std::get_if<LinearOp>(&model.program.body[static_cast<std::size_t>(record.index)]);
      if (op != nullptr && op->scores != kNoBuffer) bytes += record.cost.weight_bytes;
    }
    return bytes;
  };
  const std::int64_t parts = is_gated(activation) ? 2 : 1;
  constexpr std::int64_t kLayers = 2, kBias = 320 * 4, kWeight = 72 * 320 * 4;
  BOOST_TEST(bytes_of(1) == kLayers * parts * kBias);
  BOOST_TEST(bytes_of(8) == kLayers * parts * (kBias + kWeight));
}

// After a step with open gates, some steps read the gated layers completely; then one checks again.
BOOST_AUTO_TEST_CASE(open_gates_are_asked_for_again_after_some_steps) {
  RandomModel model(options_of(DType::kFloat32, LinearEpilogue::kReluMul, kOpen, true));
  DeviceAdapter closing = model.adapter(5, false, 2);
  const std::vector<float> shifts(320, 3 * kClosed);
  for (const Op& op : model.program.body) {
    const auto* linear = std::get_if<LinearOp>(&op);
    if (linear == nullptr || !is_relu_gated(linear->epilogue)) continue;
    closing.sites[static_cast<std::size_t>(linear->lora_site)].parts[0].shift =
        model.storage().vector(shifts).data;
  }
  const auto profile = std::make_shared<StepProfile>(1);
  const auto engine = engine_of(model, "", 1, profile);
  const auto bytes_of = [&](const StepArrays& arrays) {
    logits_of(engine.get(), arrays.input());
    std::int64_t bytes = 0;
    const auto steps = profile->take_steps();
    for (const OpRecord& record : steps.front().ops) {
      if (record.section != StepSection::kBody) continue;
      const auto* op = std::get_if<LinearOp>(&model.program.body[static_cast<std::size_t>(record.index)]);
      if (op != nullptr && is_relu_gated(op->epilogue)) bytes += record.cost.weight_bytes;
    }
    return bytes;
  };
  const std::vector<DeviceAdapter> adapters{closing};
  const StepArrays closed = decoding(1, adapters);
  StepArrays open = closed;
  open.adapters = {nullptr};
  constexpr std::int64_t kUp = 72 * 320 * 4;
  const std::int64_t whole = bytes_of(open);
  for (int step = 0; step < 15; ++step) BOOST_TEST(bytes_of(closed) == whole);
  for (int step = 0; step < 3; ++step) BOOST_TEST(bytes_of(closed) == whole - 2 * kUp);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::sparse_test
