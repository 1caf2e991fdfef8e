#include <algorithm>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "adaptrt/core/dtype.h"
#include "adaptrt/cpu/kernel_table.h"
#include "kernel_tables.h"

namespace adaptrt::activations_test {
namespace {

using Kernel = void (*)(const ActivatedTile&);

constexpr std::int64_t kWidths[] = {1, 5, 15, 16, 17, 31, 48, 64};
constexpr std::int64_t kRows = 3, kStride = 64;

/// A function and the kernel's maximum error for float32 and bfloat16 results: relative to the result, and
/// relative to the product of the factors (x, linear) without Phi.
struct Bounds {
  double relative;
  double of_factors;
};

struct Activation {
  Kernel kernel;
  std::function<double(double)> exact;
  Bounds float32;
};

double phi(double x) {
  return 0.5 * std::erfc(-x / std::sqrt(2.0));
}

std::vector<Activation> activations(const KernelTable& table) {
  const double few_roundings = kExpRelativeError + 4e-7;
  return {
      {table.silu, [](double x) { return x / (1.0 + std::exp(-x)); }, {few_roundings, 0.0}},
      // Phi has an error below 1.5e-7, so the product has that error times x.
      {table.gelu, [](double x) { return x * phi(x); }, {0.0, 5e-7}},
      {table.gelu_tanh,
       [](double x) {
         const double u = std::sqrt(2.0 / 3.14159265358979) * (x + 0.044715 * x * x * x);
         return 0.5 * x * (1.0 + std::tanh(u));
       },
       {0.0, 5e-7}},
      {table.relu, [](double x) { return std::max(x, 0.0); }, {2e-7, 0.0}},
      // A rounded sum with the bias is squared, which doubles its relative error.
      {table.relu_squared, [](double x) { return x > 0.0 ? x * x : 0.0; }, {4e-7, 0.0}},
  };
}

/// A tile of random numbers with one far below and one far above zero.
struct RandomTile {
  explicit RandomTile(FreshRandom* random)
      : x(random->vector(kRows * kStride, -12.0F, 12.0F)),
        linear(random->vector(kRows * kStride)),
        bias(random->vector(kStride)),
        linear_bias(random->vector(kStride)) {
    x[0] = -200.0F;
    x[kStride] = 200.0F;
  }

  std::vector<float> x, linear, bias, linear_bias;
};

struct Operands {
  bool has_linear;
  bool has_bias;
  bool has_linear_bias;
};

constexpr Operands kOperands[] = {{false, false, false}, {false, true, false}, {true, false, false},
                                  {true, true, false},   {true, false, true},  {true, true, true}};

ActivatedTile tile_of(const RandomTile& from, Operands operands, std::int64_t width, DType type) {
  return {.x = from.x.data(),
          .linear = operands.has_linear ? from.linear.data() : nullptr,
          .stride = kStride,
          .bias = operands.has_bias ? from.bias.data() : nullptr,
          .linear_bias = operands.has_linear_bias ? from.linear_bias.data() : nullptr,
          .rows = kRows,
          .width = width,
          .out_type = type};
}

/// Calls check(index of out, x, factor) for each element, with biases added in float32 as kernels do.
template <class Check>
void for_each_element(const ActivatedTile& tile, const Check& check) {
  for (std::int64_t r = 0; r < tile.rows; ++r) {
    for (std::int64_t i = 0; i < tile.width; ++i) {
      const std::int64_t index = r * tile.stride + i;
      const float x = tile.bias == nullptr ? tile.x[index] : tile.x[index] + tile.bias[i];
      float factor = 1.0F;
      if (tile.linear != nullptr) {
        factor = tile.linear_bias == nullptr ? tile.linear[index] : tile.linear[index] + tile.linear_bias[i];
      }
      check(index, x, factor);
    }
  }
}

BOOST_DATA_TEST_CASE(activations_match_float64, kernel_tables(), name) {
  FreshRandom random;
  const RandomTile from(&random);
  for (const Activation& activation : activations(kernel_table(name))) {
    for (const std::int64_t width : kWidths) {
      for (const Operands operands : kOperands) {
        auto tile = tile_of(from, operands, width, DType::kFloat32);
        std::vector<float> out(kRows * kStride, kPoison);
        tile.out = reinterpret_cast<std::byte*>(out.data());
        tile.out_stride = kStride * sizeof(float);
        activation.kernel(tile);
        for_each_element(tile, [&](std::int64_t i, float x, float factor) {
          const double expected = activation.exact(x) * factor;
          check_near(out[i], expected,
                     activation.float32.relative * std::abs(expected) +
                         activation.float32.of_factors * std::abs(x * factor) + 1e-35);
        });
        for (std::int64_t i = width; i < kStride; ++i) BOOST_TEST(out[i] == kPoison);

        // Shorter polynomials: the error is within 3e-4 of the function, plus Phi(-5) of its factors in Phi's
        // tail.
        std::vector<std::uint16_t> narrow(kRows * kStride, 0x7fc0);
        tile.out = reinterpret_cast<std::byte*>(narrow.data());
        tile.out_stride = kStride * sizeof(std::uint16_t);
        tile.out_type = DType::kBFloat16;
        activation.kernel(tile);
        for_each_element(tile, [&](std::int64_t i, float x, float factor) {
          const double expected = activation.exact(x) * factor;
          check_near(bfloat16_to_float(narrow[i]), expected,
                     (0x1p-8 + 3e-4) * std::abs(expected) + 3e-7 * std::abs(x * factor) + 1e-35);
        });
        for (std::int64_t i = width; i < kStride; ++i) BOOST_TEST(narrow[i] == 0x7fc0);
      }
    }
  }
}

BOOST_DATA_TEST_CASE(an_activation_may_take_the_place_of_its_input, kernel_tables(), name) {
  FreshRandom random;
  const RandomTile from(&random);
  for (const Activation& activation : activations(kernel_table(name))) {
    for (const DType type : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      const auto row_bytes = kStride * static_cast<std::int64_t>(size_of(type));
      auto tile = tile_of(from, {true, true, true}, kStride, type);
      std::vector<std::byte> apart(kRows * row_bytes);
      tile.out = apart.data();
      tile.out_stride = row_bytes;
      activation.kernel(tile);
      auto in_place = from.x;
      tile.x = in_place.data();
      tile.out = reinterpret_cast<std::byte*>(in_place.data());
      tile.out_stride = kStride * sizeof(float);
      activation.kernel(tile);
      for (std::int64_t r = 0; r < kRows; ++r) {
        BOOST_TEST(std::memcmp(tile.out + r * tile.out_stride, apart.data() + r * row_bytes, row_bytes) == 0);
      }
    }
  }
}

BOOST_DATA_TEST_CASE(activations_keep_nan, kernel_tables(), name) {
  const std::vector<float> x(kStride, std::nanf(""));
  for (const Activation& activation : activations(kernel_table(name))) {
    std::vector<float> out(kStride);
    ActivatedTile tile{.x = x.data(), .stride = kStride, .rows = 1, .width = kStride};
    tile.out = reinterpret_cast<std::byte*>(out.data());
    tile.out_stride = kStride * sizeof(float);
    activation.kernel(tile);
    BOOST_TEST(std::ranges::all_of(out, [](float value) { return std::isnan(value); }));
    tile.out_type = DType::kBFloat16;
    activation.kernel(tile);
    const auto* narrow = reinterpret_cast<const std::uint16_t*>(out.data());
    BOOST_TEST(std::all_of(narrow, narrow + kStride,
                           [](std::uint16_t value) { return std::isnan(bfloat16_to_float(value)); }));
  }
}

constexpr Operands kGatedOperands[] = {{true, false, false}, {true, true, false}, {true, true, true}};

BOOST_DATA_TEST_CASE(clamped_gates_match_float64, kernel_tables(), name) {
  FreshRandom random;
  RandomTile from(&random);
  for (float& factor : from.linear) factor *= 9.0F;  // beyond the bounds of 7 on both sides
  for (const std::int64_t width : kWidths) {
    for (const Operands operands : kGatedOperands) {
      for (const DType type : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
        auto tile = tile_of(from, operands, width, type);
        const auto element = static_cast<std::int64_t>(size_of(type));
        std::vector<std::byte> out(static_cast<std::size_t>(kRows * kStride * element), std::byte{0x7e});
        tile.out = out.data();
        tile.out_stride = kStride * element;
        kernel_table(name).clamped_silu_mul(tile);
        for_each_element(tile, [&](std::int64_t i, float x, float factor) {
          const double gate = std::min(x, 7.0F);
          const double up = std::clamp(factor, -7.0F, 7.0F);
          const double expected = gate / (1.0 + std::exp(-1.702 * gate)) * (up + 1.0);
          const double rounding = type == DType::kFloat32 ? 3e-6 : type == DType::kFloat16 ? 0x1p-11 : 0x1p-8;
          const double relative = rounding + (type == DType::kBFloat16 ? 3e-4 : 3e-6);
          check_near(load_as_float(out.data(), type, static_cast<std::size_t>(i)), expected,
                     relative * std::abs(expected) + (type == DType::kFloat16 ? 0x1p-24 : 1e-34));
        });
        for (std::int64_t i = width * element; i < kStride * element; ++i) {
          BOOST_TEST((out[static_cast<std::size_t>(i)] == std::byte{0x7e}));
        }
      }
    }
  }
}

BOOST_DATA_TEST_CASE(clamped_gates_keep_nan, kernel_tables(), name) {
  std::vector<float> numbers(2 * kStride, 1.0F);
  const auto made = [&](const float* x, const float* linear) {
    std::vector<float> out(kStride);
    kernel_table(name).clamped_silu_mul({.x = x,
                                         .linear = linear,
                                         .stride = kStride,
                                         .rows = 1,
                                         .width = kStride,
                                         .out = reinterpret_cast<std::byte*>(out.data()),
                                         .out_stride = kStride * sizeof(float)});
    return std::ranges::all_of(out, [](float value) { return std::isnan(value); });
  };
  std::fill_n(numbers.begin(), kStride, std::nanf(""));
  BOOST_TEST(made(numbers.data(), numbers.data() + kStride));
  BOOST_TEST(made(numbers.data() + kStride, numbers.data()));
  BOOST_TEST(!made(numbers.data() + kStride, numbers.data() + kStride));
}

BOOST_DATA_TEST_CASE(gates_of_low_scores_are_closed, kernel_tables(), name) {
  const KernelTable& table = kernel_table(name);
  const float not_a_number = std::nanf("");
  for (const std::int64_t width : kWidths) {
    FreshRandom random;
    auto scores = random.vector(width + 1);
    auto gates = random.vector(width + 1, -3.0F, 3.0F);
    scores[0] = 0.25F;  // equal to the threshold
    gates[static_cast<std::size_t>(width / 2)] = not_a_number;
    if (width > 4) scores[3] = not_a_number;
    const auto before = gates;
    table.close_gates(scores.data(), 0.25F, width, gates.data());
    for (std::int64_t i = 0; i <= width; ++i) {
      const auto at = static_cast<std::size_t>(i);
      if (i < width && scores[at] < 0.25F) {
        BOOST_TEST(gates[at] == std::numeric_limits<float>::lowest(), "seed " << random.seed());
      } else {
        BOOST_TEST((gates[at] == before[at] || (std::isnan(gates[at]) && std::isnan(before[at]))));
      }
    }
  }
}

BOOST_DATA_TEST_CASE(xielu_is_its_definition, kernel_tables(), name) {
  const auto& table = kernel_table(name);
  FreshRandom random;
  const XieluParameters of{.positive = 0.8F, .negative = 1.3F, .linear = 0.5F, .bound = -1e-6F};
  for (const std::int64_t n : kWidths) {
    std::vector<float> x = random.vector(n, -8.0F, 8.0F);
    const std::vector<float> borders = {0.0F, -0.5F, -0.49999997F, -1e-6F, -1e-7F, -1e-4F, -90.0F, 1e-5F};
    for (std::size_t i = 0; i < std::min(x.size(), borders.size()); ++i) x[i] = borders[i];
    std::vector<float> out(x.size() + 1, kPoison);
    table.xielu(of, x.data(), n, reinterpret_cast<std::byte*>(out.data()), DType::kFloat32);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double value = x[i];
      const double linear = static_cast<double>(of.linear) * value;
      const double bend = std::expm1(std::min(value, static_cast<double>(of.bound))) - value;
      const double curve = value > 0.0 ? static_cast<double>(of.positive) * value * value
                                       : static_cast<double>(of.negative) * bend;
      // The two terms may cancel each other.
      check_near(out[i], curve + linear, 6e-7 * (std::abs(curve) + std::abs(linear)) + 1e-12);
    }
    BOOST_TEST(out.back() == kPoison);
  }
}

}  // namespace
}  // namespace adaptrt::activations_test
