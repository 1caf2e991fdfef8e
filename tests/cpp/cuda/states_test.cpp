// Kernels of linear attention, compared with their definitions in float64, and in steps and crowds.

#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/cuda/state_kernels.h"
#include "print_dtype.h"
#include "rows_case.h"

namespace adaptrt::cuda::states_test {
namespace {

namespace data = boost::unit_test::data;

constexpr std::int64_t kRows = 40;

double sigmoid(double x) {
  return 1 / (1 + std::exp(-x));
}

double softplus(double x) {
  return std::log1p(std::exp(x));
}

std::size_t at(std::int64_t index) {
  return static_cast<std::size_t>(index);
}

/// Input rows of an op and its weights. A case has the op's outputs [rows, width()] as float32, and its
/// definition in float64.
struct ConvolutionCase {
  static constexpr std::int64_t kWidth = 130;
  static constexpr std::int64_t kStride = 140;

  ConvolutionCase(std::int64_t number, bool biased, FreshRandom* random)
      : taps(number),
        has_bias(biased),
        values(random_floats(kRows * kStride, random)),
        weight(random_floats(number * kWidth, random, 1)),
        bias(random_floats(kWidth, random, 1)) {}

  [[nodiscard]] std::int64_t width() const { return kWidth; }
  [[nodiscard]] std::int64_t state_size() const { return (taps - 1) * kWidth; }
  [[nodiscard]] double tolerance() const { return 1e-5; }

  [[nodiscard]] std::vector<float> run(const SequenceStates& states) const {
    Tensor<float> copy = values;
    enqueue(CausalConvolution{.states = states,
                              .width = kWidth,
                              .stride = kStride,
                              .taps = taps,
                              .weight = weight.data(),
                              .bias = has_bias ? bias.data() : nullptr,
                              .values = copy.data()},
            nullptr);
    std::vector<float> outputs;
    for (std::int64_t row = 0; row < kRows; ++row) {
      const auto of_row = copy.values(row * kStride, kWidth);
      outputs.insert(outputs.end(), of_row.begin(), of_row.end());
      BOOST_TEST((copy.values(row * kStride + kWidth, kStride - kWidth) ==
                  values.values(row * kStride + kWidth, kStride - kWidth)));
    }
    return outputs;
  }

  /// Advances a state by a row. Returns the row's outputs.
  [[nodiscard]] std::vector<double> next(std::int64_t row, std::vector<double>* state) const {
    std::vector<double> outputs;
    for (std::int64_t column = 0; column < kWidth; ++column) {
      const double sum = next_sum(column, values[row * kStride + column], state);
      outputs.push_back(sum * sigmoid(sum));
    }
    return outputs;
  }

  [[nodiscard]] double next_sum(std::int64_t column, double input, std::vector<double>* state) const {
    state->resize(at(taps * kWidth));
    (*state)[at((taps - 1) * kWidth + column)] = input;
    double sum = has_bias ? bias[column] : 0.0F;
    for (std::int64_t tap = 0; tap < taps; ++tap) {
      sum += weight[tap * kWidth + column] * (*state)[at(tap * kWidth + column)];
    }
    for (std::int64_t tap = 1; tap < taps; ++tap) {
      (*state)[at((tap - 1) * kWidth + column)] = (*state)[at(tap * kWidth + column)];
    }
    return sum;
  }

  std::int64_t taps;
  bool has_bias;
  Tensor<float> values;
  Tensor<float> weight;
  Tensor<float> bias;
};

struct GatedConvolutionCase : ConvolutionCase {
  GatedConvolutionCase(DType type, std::int64_t number, bool biased, FreshRandom* random)
      : ConvolutionCase(number, biased, random),
        dtype(type),
        input(random_floats(kRows * 3 * kWidth, random, 1)) {}

  [[nodiscard]] double tolerance() const { return dtype == DType::kFloat16 ? 0x1p-10 : 0x1p-7; }

  [[nodiscard]] std::vector<float> run(const SequenceStates& states) const {
    Tensor<std::uint16_t> output(kRows * kWidth);
    enqueue(GatedConvolution{.dtype = dtype,
                             .states = states,
                             .width = kWidth,
                             .taps = taps,
                             .weight = weight.data(),
                             .bias = has_bias ? bias.data() : nullptr,
                             .input = input.data(),
                             .output = output.data()},
            nullptr);
    BOOST_TEST(output.rest_is_unchanged());
    std::vector<float> outputs;
    for (std::int64_t i = 0; i < output.size(); ++i) outputs.push_back(element(dtype, output[i]));
    return outputs;
  }

  [[nodiscard]] std::vector<double> next(std::int64_t row, std::vector<double>* state) const {
    std::vector<double> outputs;
    for (std::int64_t column = 0; column < kWidth; ++column) {
      const float* x = input.data() + 3 * row * kWidth + column;
      outputs.push_back(x[kWidth] * next_sum(column, double{x[0]} * x[2 * kWidth], state));
    }
    return outputs;
  }

  DType dtype;
  Tensor<float> input;
};

struct DeltaCase {
  DeltaCase(const DeltaShape& heads, FreshRandom* random)
      : shape(heads),
        stride(2 * heads.key_size() + heads.value_size() + 3),
        qkv(random_floats(kRows * stride, random)),
        gates(random_floats(kRows * 2 * heads.num_value_heads, random)),
        log_decay(random_floats(heads.num_value_heads, random, 2)),
        time_bias(random_floats(heads.num_value_heads, random, 25)) {}

  [[nodiscard]] std::int64_t width() const { return shape.value_size(); }
  [[nodiscard]] std::int64_t state_size() const { return shape.state_size(); }
  [[nodiscard]] double tolerance() const { return 2e-5; }

  [[nodiscard]] std::vector<float> run(const SequenceStates& states) const {
    Tensor<float> output(kRows * width());
    enqueue(GatedDelta{.states = states,
                       .shape = shape,
                       .stride = stride,
                       .qkv = qkv.data(),
                       .gates = gates.data(),
                       .log_decay = log_decay.data(),
                       .time_bias = time_bias.data(),
                       .update_scale = kUpdateScale,
                       .output = output.data()},
            nullptr);
    BOOST_TEST(output.rest_is_unchanged());
    return output.values(0, output.size());
  }

  [[nodiscard]] std::vector<double> next(std::int64_t row, std::vector<double>* state) const {
    std::vector<double> outputs;
    const float* of_row = qkv.data() + row * stride;
    for (std::int64_t head = 0; head < shape.num_value_heads; ++head) {
      const std::int64_t key_head = head / (shape.num_value_heads / shape.num_key_heads);
      const auto q = normalized(of_row + key_head * shape.key_dim);
      const auto k = normalized(of_row + shape.key_size() + key_head * shape.key_dim);
      const float* gate = gates.data() + 2 * row * shape.num_value_heads + head;
      const double beta = kUpdateScale * sigmoid(gate[0]);
      const double time = softplus(double{gate[shape.num_value_heads]} + time_bias[head]);
      const double decay = std::exp(-std::exp(log_decay[head]) * time);
      for (std::int64_t column = 0; column < shape.value_dim; ++column) {
        const auto element_at = [&](std::int64_t i) -> double& {
          return (*state)[at((head * shape.key_dim + i) * shape.value_dim + column)];
        };
        double known = 0;
        for (std::int64_t i = 0; i < shape.key_dim; ++i) known += k[at(i)] * decay * element_at(i);
        const double value = of_row[2 * shape.key_size() + head * shape.value_dim + column];
        double out = 0;
        for (std::int64_t i = 0; i < shape.key_dim; ++i) {
          element_at(i) = decay * element_at(i) + k[at(i)] * (value - known) * beta;
          out += q[at(i)] * element_at(i) / std::sqrt(static_cast<double>(shape.key_dim));
        }
        outputs.push_back(out);
      }
    }
    return outputs;
  }

  [[nodiscard]] std::vector<double> normalized(const float* x) const {
    double squares = 1e-6;
    for (std::int64_t i = 0; i < shape.key_dim; ++i) squares += double{x[i]} * x[i];
    std::vector<double> result;
    for (std::int64_t i = 0; i < shape.key_dim; ++i) result.push_back(x[i] / std::sqrt(squares));
    return result;
  }

  static constexpr float kUpdateScale = 1.5F;
  DeltaShape shape;
  std::int64_t stride;
  Tensor<float> qkv;
  Tensor<float> gates;
  Tensor<float> log_decay;
  Tensor<float> time_bias;
};

struct ScanCase {
  ScanCase(const ScanShape& heads, FreshRandom* random)
      : shape(heads),
        stride(heads.value_size() + 2 * heads.group_size() + heads.num_heads + 3),
        values(random_floats(kRows * stride, random, 2)),
        log_decay(random_floats(heads.num_heads, random, 2)),
        time_bias(random_floats(heads.num_heads, random, 2)),
        skip(random_floats(heads.num_heads, random)) {}

  [[nodiscard]] std::int64_t width() const { return shape.value_size(); }
  [[nodiscard]] std::int64_t state_size() const { return shape.state_size(); }
  [[nodiscard]] double tolerance() const { return 2e-5; }

  [[nodiscard]] std::vector<float> run(const SequenceStates& states) const {
    Tensor<float> output(kRows * width());
    enqueue(SelectiveScan{.states = states,
                          .shape = shape,
                          .stride = stride,
                          .values = values.data(),
                          .log_decay = log_decay.data(),
                          .time_bias = time_bias.data(),
                          .skip = skip.data(),
                          .time_min = kTimeMin,
                          .time_max = kTimeMax,
                          .output = output.data()},
            nullptr);
    BOOST_TEST(output.rest_is_unchanged());
    return output.values(0, output.size());
  }

  [[nodiscard]] std::vector<double> next(std::int64_t row, std::vector<double>* state) const {
    std::vector<double> outputs;
    const float* of_row = values.data() + row * stride;
    for (std::int64_t head = 0; head < shape.num_heads; ++head) {
      const float* b =
          of_row + shape.value_size() + head / (shape.num_heads / shape.num_groups) * shape.state_dim;
      const float* c = b + shape.group_size();
      const double dt = of_row[shape.value_size() + 2 * shape.group_size() + head];
      const double time = std::clamp(softplus(dt + time_bias[head]), double{kTimeMin}, double{kTimeMax});
      const double decay = std::exp(-std::exp(log_decay[head]) * time);
      for (std::int64_t column = 0; column < shape.head_dim; ++column) {
        const double x = of_row[head * shape.head_dim + column];
        double out = skip[head] * x;
        for (std::int64_t i = 0; i < shape.state_dim; ++i) {
          double& element = (*state)[at((head * shape.state_dim + i) * shape.head_dim + column)];
          element = decay * element + b[i] * x * time;
          out += c[i] * element;
        }
        outputs.push_back(out);
      }
    }
    return outputs;
  }

  static constexpr float kTimeMin = 0.4F;
  static constexpr float kTimeMax = 2.5F;
  ScanShape shape;
  std::int64_t stride;
  Tensor<float> values;
  Tensor<float> log_decay;
  Tensor<float> time_bias;
  Tensor<float> skip;
};

Tensor<std::int32_t> integers(const std::vector<std::int32_t>& values) {
  Tensor<std::int32_t> tensor(static_cast<std::int64_t>(values.size()));
  std::copy(values.begin(), values.end(), tensor.data());
  return tensor;
}

template <typename Found, typename Expected>
std::int64_t count_wrong(const Found& found, const Expected& expected, double tolerance) {
  double range = 1;
  for (const double value : expected) range = std::max(range, std::abs(value));
  std::int64_t wrong = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    wrong += static_cast<std::int64_t>(!(std::abs(found[i] - expected[i]) <= range * tolerance));
  }
  return wrong;
}

/// Runs three sequences, one of which has no slot, and compares outputs and states.
template <typename Case>
void check_definition(const Case& op, FreshRandom* random) {
  const std::vector<std::int32_t> ends{0, 20, 21, 40};
  const std::vector<std::int32_t> places{2, -1, 0};
  const auto offsets = integers(ends);
  const auto slots = integers(places);
  const std::int64_t slot_stride = op.state_size() + 5;
  const Tensor<float> before = random_floats(3 * slot_stride, random, 1);
  for (const bool advances : {false, true}) {
    Tensor<float> states = before;
    const auto outputs = op.run({.sequences = 3,
                                 .sequence_offsets = offsets.data(),
                                 .slots = slots.data(),
                                 .states = states.data(),
                                 .slot_stride = slot_stride,
                                 .advances = advances});
    Tensor<float> after = before;
    for (std::size_t i = 0; i < places.size(); ++i) {
      std::vector<double> state(at(op.state_size()), 0.0);
      const std::int64_t first = places[i] * slot_stride;
      if (places[i] >= 0) std::copy_n(before.data() + first, op.state_size(), state.begin());
      std::vector<double> expected;
      for (std::int64_t row = ends[i]; row < ends[i + 1]; ++row) {
        const auto of_row = op.next(row, &state);
        expected.insert(expected.end(), of_row.begin(), of_row.end());
      }
      BOOST_TEST(count_wrong(outputs.data() + ends[i] * op.width(), expected, op.tolerance()) == 0);
      if (places[i] < 0 || !advances) continue;
      state.resize(at(op.state_size()));
      BOOST_TEST(count_wrong(states.data() + first, state, 2e-5) == 0);
      std::copy_n(states.data() + first, op.state_size(), after.data() + first);
    }
    // Nothing else changed.
    BOOST_TEST((states.values(0, states.size()) == after.values(0, after.size())));
    BOOST_TEST(states.rest_is_unchanged());
  }
}

/// Runs a sequence as a whole, and in pieces beside another one.
template <typename Case>
void check_pieces(const Case& op) {
  const auto run = [&](Tensor<float>* states, std::int32_t begin, std::int32_t end) {
    const auto offsets = integers({begin, end, static_cast<std::int32_t>(kRows)});
    const auto slots = integers({1, -1});
    auto outputs = op.run({.sequences = 2,
                           .sequence_offsets = offsets.data(),
                           .slots = slots.data(),
                           .states = states->data(),
                           .slot_stride = op.state_size()});
    return std::vector<float>(outputs.begin() + begin * op.width(), outputs.begin() + end * op.width());
  };
  Tensor<float> whole_states(2 * op.state_size());
  std::fill_n(whole_states.data(), whole_states.size(), 0.0F);
  Tensor<float> states = whole_states;
  const auto whole = run(&whole_states, 0, 39);
  std::vector<float> found;
  for (const auto& [begin, end] : {std::pair{0, 5}, {5, 6}, {6, 8}, {8, 25}, {25, 39}}) {
    const auto piece = run(&states, begin, end);
    found.insert(found.end(), piece.begin(), piece.end());
  }
  BOOST_TEST((found == whole));
  BOOST_TEST((states.values(0, states.size()) == whole_states.values(0, states.size())));
}

template <typename Case>
void check(const Case& op, FreshRandom* random) {
  check_definition(op, random);
  check_pieces(op);
}

auto says(const std::string& text) {
  return
      [text](const ConfigError& error) { return std::string(error.what()).find(text) != std::string::npos; };
}

BOOST_AUTO_TEST_SUITE(state_kernels)

BOOST_DATA_TEST_CASE(convolutions_are_their_definitions, data::xrange(1, 5) * data::make({false, true}), taps,
                     has_bias) {
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    check(ConvolutionCase(taps, has_bias, &random), &random);
    for (const DType dtype : kRowTypes) check(GatedConvolutionCase(dtype, taps, has_bias, &random), &random);
  }
}

BOOST_AUTO_TEST_CASE(the_gated_delta_rule_is_its_definition) {
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    check(DeltaCase({2, 6, 10, 34}, &random), &random);
    check(DeltaCase({1, 1, 128, 24}, &random), &random);
    check(DeltaCase({2, 2, 130, 8}, &random), &random);
  }
}

BOOST_AUTO_TEST_CASE(the_selective_scan_is_its_definition) {
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    check(ScanCase({6, 34, 2, 10}, &random), &random);
    check(ScanCase({1, 24, 1, 128}, &random), &random);
    check(ScanCase({2, 8, 2, 256}, &random), &random);
  }
}

BOOST_DATA_TEST_CASE(gated_norms_are_their_definitions, data::make(kRowTypes) * data::make({false, true}),
                     dtype, gate_first) {
  constexpr std::int64_t kWidth = 90;
  constexpr std::int64_t kGateStride = 101;
  constexpr float kEpsilon = 1e-3F;
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    const auto input = random_floats(kRows * kWidth, &random);
    const auto gate = random_floats(kRows * kGateStride, &random);
    // A mean for each group of each head; for each head; for the row.
    for (const auto& [weight_size, group] : {std::pair{45, 9}, {15, 15}, {90, 90}}) {
      const auto weight = random_floats(weight_size, &random);
      Tensor<std::uint16_t> output(kRows * kWidth);
      enqueue(GatedRmsNorm{.dtype = dtype,
                           .rows = kRows,
                           .width = kWidth,
                           .group = group,
                           .weight_size = weight_size,
                           .gate_stride = kGateStride,
                           .input = input.data(),
                           .gate = gate.data(),
                           .weight = weight.data(),
                           .epsilon = kEpsilon,
                           .gate_first = gate_first,
                           .output = output.data()},
              nullptr);
      std::int64_t wrong = 0;
      for (std::int64_t first = 0; first < kRows * kWidth; first += group) {
        std::vector<double> gates;
        double squares = 0;
        for (std::int64_t i = first; i < first + group; ++i) {
          const double z = gate[(i / kWidth + 1) * kGateStride - kWidth + i % kWidth];
          gates.push_back(z * sigmoid(z));
          const double x = input[i] * (gate_first ? gates.back() : 1.0);
          squares += x * x;
        }
        const double factor = 1 / std::sqrt(squares / static_cast<double>(group) + kEpsilon);
        for (std::int64_t i = 0; i < group; ++i) {
          const double expected =
              input[first + i] * gates[at(i)] * factor * weight[(first + i) % kWidth % weight_size];
          wrong += static_cast<std::int64_t>(
              !is_rounded(expected, dtype, output[first + i], std::abs(expected) * 0x1p-18));
        }
      }
      BOOST_TEST(wrong == 0);
      BOOST_TEST(output.rest_is_unchanged());
    }
  }
}

BOOST_DATA_TEST_CASE(gates_of_attention_are_sigmoids, data::make(kRowTypes), dtype) {
  constexpr std::int64_t kWidth = 40;
  constexpr std::int64_t kGateStride = 104;
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    const auto gate = random_elements(dtype, kRows * kGateStride, &random);
    const auto before = random_elements(dtype, kRows * kWidth, &random);
    Tensor<std::uint16_t> output = before;
    enqueue(SigmoidGate{.dtype = dtype,
                        .rows = kRows,
                        .width = kWidth,
                        .gate_stride = kGateStride,
                        .gate = gate.data(),
                        .output = output.data()},
            nullptr);
    std::int64_t wrong = 0;
    for (std::int64_t i = 0; i < kRows * kWidth; ++i) {
      const double z = element(dtype, gate[(i / kWidth + 1) * kGateStride - kWidth + i % kWidth]);
      const double expected = element(dtype, before[i]) * sigmoid(z);
      wrong +=
          static_cast<std::int64_t>(!is_rounded(expected, dtype, output[i], std::abs(expected) * 0x1p-20));
    }
    BOOST_TEST(wrong == 0);
    BOOST_TEST(output.rest_is_unchanged());
  }
}

BOOST_AUTO_TEST_CASE(sizes_without_a_kernel_are_refused) {
  const auto refuses = [](const auto& work, const std::string& text) {
    BOOST_CHECK_EXCEPTION(enqueue(work, nullptr), ConfigError, says(text));
  };
  refuses(CausalConvolution{.states = {}, .width = 8, .stride = 8, .taps = 5}, "taps is 5; expected 1 to 4");
  refuses(CausalConvolution{.states = {}, .width = 8, .stride = 7, .taps = 2}, "stride is below width");
  refuses(GatedConvolution{.states = {}, .width = 8, .taps = 0}, "taps is 0; expected 1 to 4");
  refuses(GatedConvolution{.dtype = DType::kFloat32, .states = {}, .width = 8, .taps = 1},
          "dtype is float32");
  refuses(GatedDelta{.states = {}, .shape = {1, 1, 257, 8}, .stride = 600},
          "key_dim is 257; expected 1 to 256");
  refuses(GatedDelta{.states = {}, .shape = {2, 3, 8, 8}, .stride = 600}, "not a multiple of num_key_heads");
  refuses(GatedDelta{.states = {}, .shape = {1, 1, 8, 8}, .stride = 23}, "stride is below q, k and v");
  refuses(SelectiveScan{.states = {}, .shape = {1, 8, 1, 257}, .stride = 600},
          "state_dim is 257; expected 1 to 256");
  refuses(SelectiveScan{.states = {}, .shape = {3, 8, 2, 8}, .stride = 600}, "not a multiple of num_groups");
  refuses(SelectiveScan{.states = {}, .shape = {1, 8, 1, 8}, .stride = 24}, "stride is below x, B, C and dt");
  refuses(GatedRmsNorm{.rows = 1, .width = 12, .group = 4, .weight_size = 6, .gate_stride = 12},
          "weight_size is not a multiple of group");
  refuses(GatedRmsNorm{.rows = 1, .width = 12, .group = 4, .weight_size = 8, .gate_stride = 12},
          "width is not a multiple of weight_size");
  refuses(GatedRmsNorm{.rows = 1, .width = 12, .group = 4, .weight_size = 4, .gate_stride = 11},
          "gate_stride is below width");
  refuses(SigmoidGate{.rows = 1, .width = 12, .gate_stride = 16}, "width is 12; expected a multiple of 8");
  refuses(SigmoidGate{.rows = 1, .width = 16, .gate_stride = 8}, "gate_stride is below width");
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::cuda::states_test
