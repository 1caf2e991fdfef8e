#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/cuda/product_kernel.h"
#include "adaptrt/cuda/row_kernels.h"
#include "adaptrt/cuda/sparse_kernels.h"
#include "lora_case.h"
#include "print_dtype.h"
#include "rows_case.h"

namespace adaptrt::cuda::sparse_test {
namespace {

namespace data = boost::unit_test::data;

using Elements = Tensor<std::uint16_t>;

std::uint16_t rounded(DType dtype, float value) {
  return dtype == DType::kFloat16 ? float_to_float16(value) : float_to_bfloat16(value);
}

/// Vectors of neurons. `resident` fourths of them are in device memory, in random order, and the others in
/// host memory. The unused places are NaN.
struct Vectors {
  Vectors(const Elements& all, std::int64_t neurons, int resident, FreshRandom* random)
      : size(all.size() / neurons), slots(neurons), on_device(all.size()), on_host(all.size()) {
    std::vector<std::int32_t> order;
    for (std::int32_t slot = 0; slot < neurons; ++slot) order.push_back(slot);
    for (std::int64_t i = neurons - 1; i > 0; --i) {
      std::swap(order[static_cast<std::size_t>(i)],
                order[static_cast<std::size_t>(random->integer(0, static_cast<int>(i)))]);
    }
    for (std::int64_t i = 0; i < neurons; ++i) {
      const bool is_resident = i * 7 % 4 < resident;
      slots[i] = is_resident ? order[static_cast<std::size_t>(i)] : -1;
      std::uint16_t* to = is_resident ? on_device.data() + slots[i] * size : on_host.data() + i * size;
      std::copy_n(all.data() + i * size, size, to);
    }
  }
  [[nodiscard]] NeuronVectors view() const {
    return {.slots = slots.data(), .resident = on_device.data(), .pinned = on_host.data()};
  }

  std::int64_t size;
  Tensor<std::int32_t> slots;
  Elements on_device;
  Elements on_host;
};

/// A transposed copy of a matrix [rows, columns].
Elements transposed(const Elements& matrix, std::int64_t rows, std::int64_t columns) {
  Elements result(rows * columns);
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < columns; ++j) result[j * rows + i] = matrix[i * columns + j];
  }
  return result;
}

/// A gate of which each element is open with a probability of `percent`. Closed ones are at most threshold.
Elements random_gate(DType dtype, std::int64_t size, int percent, float threshold, FreshRandom* random) {
  Elements gate(size);
  for (std::int64_t i = 0; i < size; ++i) {
    const bool is_open = random->integer(0, 99) < percent;
    gate[i] = rounded(dtype, is_open ? threshold + random->real(0.1F, 2) : random->real(-2, 0));
  }
  return gate;
}

Elements multiply(DType dtype, const Elements& x, std::int64_t tokens, const Elements& weights,
                  std::int64_t in, std::int64_t out) {
  Elements y(tokens * out);
  const ProductKernel kernel(
      {.dtype = dtype, .in_size = static_cast<std::int32_t>(in), .out_size = static_cast<std::int32_t>(out)});
  kernel.enqueue(tokens, {.x = x.data(), .weights = weights.data()}, y.data(), nullptr);
  return y;
}

/// An MLP, and its layers one after the other.
struct Mlp {
  Mlp(DType type, std::int64_t num_tokens, std::int64_t num_neurons, std::int64_t width, int percent,
      FreshRandom* random)
      : dtype(type),
        tokens(num_tokens),
        neurons(num_neurons),
        size(width),
        x(random_elements(dtype, tokens * size, random)),
        up(random_elements(dtype, neurons * size, random)),
        down(random_elements(dtype, neurons * size, random)),
        gate(random_gate(dtype, tokens * neurons, percent, threshold, random)),
        masks(neuron_groups(neurons)) {}

  void mark() {
    enqueue(MarkActive{.dtype = dtype,
                       .tokens = tokens,
                       .neurons = neurons,
                       .gate = gate.data(),
                       .threshold = threshold,
                       .masks = masks.data()},
            nullptr);
  }
  [[nodiscard]] bool is_active(std::int64_t neuron) const {
    for (std::int64_t token = 0; token < tokens; ++token) {
      if (!(element(dtype, gate[token * neurons + neuron]) <= threshold)) return true;
    }
    return false;
  }
  [[nodiscard]] Elements gated(const Elements& linear) const {
    Elements output(tokens * neurons);
    enqueue(Finish{.dtype = dtype,
                   .tokens = tokens,
                   .width = neurons,
                   .product = gate.data(),
                   .linear = linear.data(),
                   .epilogue = LinearEpilogue::kReluMul,
                   .threshold = threshold,
                   .output = output.data()},
            nullptr);
    return output;
  }
  [[nodiscard]] Elements dense() const {
    return multiply(dtype, gated(multiply(dtype, x, tokens, up, size, neurons)), tokens, down, neurons, size);
  }
  [[nodiscard]] Elements sparse_up(int resident, FreshRandom* random) const {
    const Vectors rows(up, neurons, resident, random);
    Elements y(tokens * neurons);
    enqueue(SparseUp{.dtype = dtype,
                     .tokens = tokens,
                     .in_size = size,
                     .neurons = neurons,
                     .x = x.data(),
                     .masks = masks.data(),
                     .rows = rows.view(),
                     .y = y.data()},
            nullptr);
    BOOST_TEST(y.rest_is_unchanged());
    return y;
  }
  [[nodiscard]] Elements sparse(int resident, FreshRandom* random) const {
    const Elements input = gated(sparse_up(resident, random));
    const Vectors columns(transposed(down, size, neurons), neurons, resident, random);
    Elements y(tokens * size);
    enqueue(SparseDown{.dtype = dtype,
                       .tokens = tokens,
                       .neurons = neurons,
                       .out_size = size,
                       .x = input.data(),
                       .masks = masks.data(),
                       .columns = columns.view(),
                       .y = y.data()},
            nullptr);
    BOOST_TEST(y.rest_is_unchanged());
    return y;
  }

  static constexpr float threshold = 0.25F;
  DType dtype;
  std::int64_t tokens;
  std::int64_t neurons;
  std::int64_t size;
  Elements x;
  Elements up;    ///< [neurons, size]
  Elements down;  ///< [size, neurons]
  Elements gate;
  Tensor<std::uint16_t> masks;
};

void expect_equal(const Elements& found, const Elements& expected) {
  BOOST_CHECK_EQUAL_COLLECTIONS(found.data(), found.data() + found.size(), expected.data(),
                                expected.data() + expected.size());
}

BOOST_AUTO_TEST_SUITE(sparse_kernels)

BOOST_DATA_TEST_CASE(masks_have_the_active_neurons, data::make(kRowTypes) * data::make({8, 24, 160, 2064}),
                     dtype, neurons) {
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    for (const std::int64_t tokens : {1, 3, 8}) {
      Mlp mlp(dtype, tokens, neurons, 8, 20, &random);
      // The threshold itself closes; NaN opens.
      mlp.gate[0] = rounded(dtype, Mlp::threshold);
      mlp.gate[neurons - 1] = rounded(dtype, std::numeric_limits<float>::quiet_NaN());
      mlp.mark();
      std::int64_t wrong = 0;
      for (std::int64_t i = 0; i < 16 * mlp.masks.size(); ++i) {
        const bool found = ((mlp.masks[i / 16] >> (i % 16)) & 1) != 0;
        wrong += static_cast<std::int64_t>(found != (i < neurons && mlp.is_active(i)));
      }
      BOOST_TEST(wrong == 0);
      BOOST_TEST(mlp.is_active(neurons - 1));
      BOOST_TEST(mlp.masks.rest_is_unchanged());
    }
  }
}

BOOST_AUTO_TEST_CASE(biases_open_and_close_gates) {
  FreshRandom random;
  Mlp mlp(DType::kFloat16, 2, 24, 8, 30, &random);
  Tensor<float> bias(24);
  for (std::int64_t i = 0; i < 24; ++i) bias[i] = i % 3 == 0 ? 4.0F : i % 3 == 1 ? -4.0F : 0.0F;
  enqueue(MarkActive{.dtype = mlp.dtype,
                     .tokens = 2,
                     .neurons = 24,
                     .gate = mlp.gate.data(),
                     .bias = bias.data(),
                     .threshold = Mlp::threshold,
                     .masks = mlp.masks.data()},
          nullptr);
  for (std::int64_t i = 0; i < 24; ++i) {
    const bool expected = i % 3 == 0 || (i % 3 == 2 && mlp.is_active(i));
    BOOST_TEST(((mlp.masks[i / 16] >> (i % 16)) & 1) == static_cast<int>(expected));
  }
}

/// percent: open gates of a row.
BOOST_DATA_TEST_CASE(results_have_the_bits_of_the_dense_product,
                     data::make(kRowTypes) * data::make({1, 2, 5, 8}) * data::make({0, 10, 60, 100}), dtype,
                     tokens, percent) {
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    for (const auto& [neurons, size] : {std::pair{8, 8}, {200, 72}, {336, 136}}) {
      Mlp mlp(dtype, tokens, neurons, size, percent, &random);
      mlp.mark();
      const Elements expected = mlp.dense();
      for (const int resident : {0, 2, 4}) {
        BOOST_TEST_CONTEXT(neurons << " neurons of " << size << ", " << resident << " of 4 on the device") {
          expect_equal(mlp.sparse(resident, &random), expected);
        }
      }
    }
  }
}

BOOST_DATA_TEST_CASE(results_match_float64, data::make(kRowTypes), dtype) {
  FreshRandom random;
  constexpr std::int64_t kNeurons = 152;
  constexpr std::int64_t kSize = 88;
  Mlp mlp(dtype, 3, kNeurons, kSize, 15, &random);
  mlp.mark();
  const Elements up = mlp.sparse_up(2, &random);
  const Elements input = mlp.gated(up);
  const Elements y = mlp.sparse(2, &random);
  std::int64_t wrong = 0;
  for (std::int64_t token = 0; token < 3; ++token) {
    for (std::int64_t i = 0; i < kNeurons; ++i) {
      if (!mlp.is_active(i)) continue;
      double sum = 0;
      for (std::int64_t k = 0; k < kSize; ++k) {
        sum += static_cast<double>(element(dtype, mlp.x[token * kSize + k])) *
               element(dtype, mlp.up[i * kSize + k]);
      }
      wrong += static_cast<std::int64_t>(!is_rounded(sum, dtype, up[token * kNeurons + i], 1e-3));
    }
    for (std::int64_t o = 0; o < kSize; ++o) {
      double sum = 0;
      for (std::int64_t i = 0; i < kNeurons; ++i) {
        sum += static_cast<double>(element(dtype, input[token * kNeurons + i])) *
               element(dtype, mlp.down[o * kNeurons + i]);
      }
      wrong += static_cast<std::int64_t>(!is_rounded(sum, dtype, y[token * kSize + o], 1e-2));
    }
  }
  BOOST_TEST(wrong == 0);
}

/// A group is 16 neurons. Inactive neurons must not be read: their weights are NaN.
BOOST_DATA_TEST_CASE(weights_of_inactive_neurons_are_not_read, data::make({0, 1, 2, 3, 4, 5, 9}), active) {
  FreshRandom random;
  constexpr std::int64_t kNeurons = 216;
  constexpr std::int64_t kSize = 72;
  Mlp mlp(DType::kBFloat16, 1, kNeurons, kSize, 0, &random);
  for (int i = 0; i < active; ++i) {
    mlp.gate[random.integer(0, kNeurons - 1)] = rounded(mlp.dtype, 1.5F);
  }
  mlp.mark();
  const Elements expected = mlp.dense();
  for (std::int64_t i = 0; i < kNeurons; ++i) {
    if (mlp.is_active(i)) continue;
    for (std::int64_t k = 0; k < kSize; ++k) mlp.up[i * kSize + k] = mlp.down[k * kNeurons + i] = 0xffff;
  }
  expect_equal(mlp.sparse(1, &random), expected);
  const Elements up = mlp.sparse_up(1, &random);
  for (std::int64_t i = 0; i < kNeurons; ++i) BOOST_TEST(!std::isnan(element(mlp.dtype, up[i])));
}

BOOST_AUTO_TEST_CASE(sums_of_zeros_are_positive) {
  FreshRandom random;
  Mlp mlp(DType::kFloat16, 2, 48, 16, 100, &random);
  for (std::int64_t i = 0; i < mlp.up.size(); ++i) mlp.up[i] = 0x8000;
  mlp.mark();
  const Elements found = mlp.sparse(2, &random);
  for (std::int64_t i = 0; i < found.size(); ++i) BOOST_TEST(found[i] == 0);
  expect_equal(found, mlp.dense());
}

BOOST_DATA_TEST_CASE(a_row_does_not_depend_on_the_others, data::make(kRowTypes), dtype) {
  FreshRandom random;
  constexpr std::int64_t kNeurons = 264;
  constexpr std::int64_t kSize = 72;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    Mlp crowd(dtype, 8, kNeurons, kSize, 20, &random);
    crowd.mark();
    const Elements all = crowd.sparse(2, &random);
    for (std::int64_t row = 0; row < 8; ++row) {
      Mlp alone(dtype, 1, kNeurons, kSize, 0, &random);
      std::copy_n(crowd.x.data() + row * kSize, kSize, alone.x.data());
      std::copy_n(crowd.gate.data() + row * kNeurons, kNeurons, alone.gate.data());
      std::copy_n(crowd.up.data(), crowd.up.size(), alone.up.data());
      std::copy_n(crowd.down.data(), crowd.down.size(), alone.down.data());
      alone.mark();
      const Elements found = alone.sparse(1, &random);
      BOOST_CHECK_EQUAL_COLLECTIONS(found.data(), found.data() + kSize, all.data() + row * kSize,
                                    all.data() + (row + 1) * kSize);
    }
  }
}

BOOST_AUTO_TEST_CASE(invalid_arguments_are_refused_by_name) {
  const auto says = [](const std::string& text) {
    return [text](const ConfigError& error) {
      return std::string(error.what()).find(text) != std::string::npos;
    };
  };
  BOOST_CHECK_EXCEPTION(enqueue(MarkActive{.dtype = DType::kFloat32, .tokens = 9, .neurons = 12}, nullptr),
                        ConfigError,
                        says("MarkActive: dtype is float32; expected float16 or bfloat16; tokens is 9; "
                             "expected 0 to 8; neurons is "
                             "12; expected a multiple of 8 from 8 to 131072"));
  BOOST_CHECK_EXCEPTION(enqueue(SparseUp{.tokens = 1, .in_size = 4, .neurons = 8}, nullptr), ConfigError,
                        says("SparseUp: in_size is 4; expected a multiple of 8"));
  BOOST_CHECK_EXCEPTION(
      enqueue(SparseDown{.tokens = -1, .neurons = 8, .out_size = 0}, nullptr), ConfigError,
      says("SparseDown: tokens is -1; expected 0 to 8; out_size is 0; expected a multiple"));
  BOOST_CHECK_EXCEPTION(
      enqueue(Finish{.tokens = 1, .width = 8, .linear = &says, .epilogue = LinearEpilogue::kRelu}, nullptr),
      ConfigError, says("linear is given without a gate"));
  // Nothing is written for 0 tokens.
  enqueue(MarkActive{.tokens = 0, .neurons = 8}, nullptr);
  enqueue(SparseUp{.tokens = 0, .in_size = 8, .neurons = 8}, nullptr);
  enqueue(SparseDown{.tokens = 0, .neurons = 8, .out_size = 8}, nullptr);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::cuda::sparse_test
