#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "adaptrt/core/dtype.h"
#include "adaptrt/cpu/kernel_table.h"
#include "kernel_tables.h"

namespace adaptrt::recurrences_test {
namespace {

using Values = std::vector<float>;

double sigmoid(double x) {
  return 1.0 / (1.0 + std::exp(-x));
}

std::size_t at(std::int64_t index) {
  return static_cast<std::size_t>(index);
}

/// Rows of a convolution with room after each row, which must stay as it is.
struct Convolution {
  std::int64_t rows;
  std::int64_t width;
  std::int64_t taps;
  std::int64_t stride = width + 3;
  std::int64_t tap_stride = width + 2;
  Values x;
  Values weight;
  Values bias;
  Values state;

  Convolution(std::int64_t num_rows, std::int64_t columns, std::int64_t num_taps, FreshRandom* random)
      : rows(num_rows), width(columns), taps(num_taps) {
    x = random->vector(rows * stride, -2.0F, 2.0F);
    weight = random->vector(taps * tap_stride);
    if (taps % 2 == 0) bias = random->vector(width);
    state = random->vector((taps - 1) * tap_stride);
  }

  /// Runs rows [begin, end) and columns [first, last).
  void run(const KernelTable& table, std::int64_t begin, std::int64_t end, std::int64_t first,
           std::int64_t last) {
    table.causal_convolution({.x = x.data() + begin * stride + first,
                              .stride = stride,
                              .rows = end - begin,
                              .width = last - first,
                              .weight = weight.data() + first,
                              .taps = taps,
                              .state = state.data() + first,
                              .tap_stride = tap_stride,
                              .bias = bias.empty() ? nullptr : bias.data() + first});
  }
};

constexpr std::int64_t kWidths[] = {1, 3, 4, 8, 15, 16, 17, 33, 40};

BOOST_AUTO_TEST_SUITE(recurrences)

BOOST_DATA_TEST_CASE(convolution_is_the_sum_over_taps, kernel_tables(), name) {
  const auto& table = kernel_table(name);
  FreshRandom random;
  for (const std::int64_t width : kWidths) {
    for (const std::int64_t taps : {1, 2, 4, 7}) {
      for (const std::int64_t rows : {0, 1, 3, 9}) {
        Convolution convolution(rows, width, taps, &random);
        const Values x = convolution.x;
        const Values before = convolution.state;
        const std::int64_t stride = convolution.stride;
        const std::int64_t tap_stride = convolution.tap_stride;
        const auto input = [&](std::int64_t row, std::int64_t column) {
          return row < 0 ? before[at((row + taps - 1) * tap_stride + column)] : x[at(row * stride + column)];
        };
        convolution.run(table, 0, rows, 0, width);
        for (std::int64_t row = 0; row < rows; ++row) {
          for (std::int64_t column = 0; column < stride; ++column) {
            const float found = convolution.x[at(row * stride + column)];
            if (column >= width) {
              BOOST_TEST_REQUIRE(found == x[at(row * stride + column)]);
              continue;
            }
            double sum = convolution.bias.empty() ? 0.0 : static_cast<double>(convolution.bias[at(column)]);
            for (std::int64_t tap = 0; tap < taps; ++tap) {
              sum += static_cast<double>(convolution.weight[at(tap * tap_stride + column)]) *
                     static_cast<double>(input(row - taps + 1 + tap, column));
            }
            check_near(found, sum * sigmoid(sum), 4e-6);
          }
        }
        for (std::int64_t tap = 0; tap + 1 < taps; ++tap) {
          for (std::int64_t column = 0; column < tap_stride; ++column) {
            const float expected =
                column < width ? input(rows - taps + 1 + tap, column) : before[at(tap * tap_stride + column)];
            BOOST_TEST_REQUIRE(convolution.state[at(tap * tap_stride + column)] == expected);
          }
        }
      }
    }
  }
}

BOOST_DATA_TEST_CASE(convolution_in_pieces_has_the_same_bits, kernel_tables(), name) {
  const auto& table = kernel_table(name);
  FreshRandom random;
  Convolution whole(11, 37, 4, &random);
  Convolution pieces = whole;
  whole.run(table, 0, 11, 0, 37);
  for (const auto& [first, last] : {std::pair{0, 5}, {5, 24}, {24, 37}}) {
    for (const auto& [begin, end] : {std::pair{0, 1}, {1, 3}, {3, 11}}) {
      pieces.run(table, begin, end, first, last);
    }
  }
  BOOST_TEST((whole.x == pieces.x));
  BOOST_TEST((whole.state == pieces.state));
}

/// Rows [before | after | x] of a convolution between gates, with room after each row.
struct Gated {
  std::int64_t rows;
  std::int64_t width;
  std::int64_t taps;
  std::int64_t stride = 3 * width + 2;
  std::int64_t tap_stride = width + 2;
  std::int64_t out_stride = width + 3;
  Values input;
  Values weight;
  Values bias;
  Values state;
  Values out;

  Gated(std::int64_t num_rows, std::int64_t columns, std::int64_t num_taps, FreshRandom* random)
      : rows(num_rows), width(columns), taps(num_taps) {
    input = random->vector(rows * stride, -2.0F, 2.0F);
    weight = random->vector(taps * tap_stride);
    bias = random->vector(width);
    state = random->vector((taps - 1) * tap_stride);
    out.assign(at(rows * out_stride), kPoison);
  }

  /// Runs rows [begin, end) and columns [first, last).
  void run(const KernelTable& table, std::int64_t begin, std::int64_t end, std::int64_t first,
           std::int64_t last) {
    const float* row = input.data() + begin * stride + first;
    table.gated_convolution({.before = row,
                             .after = row + width,
                             .x = row + 2 * width,
                             .stride = stride,
                             .rows = end - begin,
                             .width = last - first,
                             .weight = weight.data() + first,
                             .bias = bias.empty() ? nullptr : bias.data() + first,
                             .taps = taps,
                             .state = state.data() + first,
                             .tap_stride = tap_stride,
                             .out = reinterpret_cast<std::byte*>(out.data() + begin * out_stride + first),
                             .out_stride = out_stride,
                             .out_type = DType::kFloat32});
  }

  /// before * x, or what the state has of it.
  [[nodiscard]] double product(std::int64_t row, std::int64_t column) const {
    if (row < 0) return state[at((row + taps - 1) * tap_stride + column)];
    const float* values = input.data() + row * stride + column;
    return static_cast<double>(values[0]) * static_cast<double>(values[2 * width]);
  }
};

BOOST_DATA_TEST_CASE(gated_convolution_is_the_sum_over_taps_between_gates, kernel_tables(), name) {
  const auto& table = kernel_table(name);
  FreshRandom random;
  for (const std::int64_t width : kWidths) {
    for (const std::int64_t taps : {1, 3, 4}) {
      for (const std::int64_t rows : {0, 1, 2, 9}) {
        const Gated before(rows, width, taps, &random);
        Gated after = before;
        if (rows == 2) after.bias.clear();
        after.run(table, 0, rows, 0, width);
        for (std::int64_t row = 0; row < rows; ++row) {
          for (std::int64_t column = 0; column < before.out_stride; ++column) {
            const float found = after.out[at(row * before.out_stride + column)];
            if (column >= width) {
              BOOST_TEST_REQUIRE(found == kPoison);
              continue;
            }
            double sum = after.bias.empty() ? 0.0 : static_cast<double>(after.bias[at(column)]);
            for (std::int64_t tap = 0; tap < taps; ++tap) {
              sum += static_cast<double>(before.weight[at(tap * before.tap_stride + column)]) *
                     before.product(row - taps + 1 + tap, column);
            }
            sum *= static_cast<double>(before.input[at(row * before.stride + width + column)]);
            check_near(found, sum, 1e-5);
          }
        }
        for (std::int64_t tap = 0; tap + 1 < taps; ++tap) {
          for (std::int64_t column = 0; column < before.tap_stride; ++column) {
            const float found = after.state[at(tap * before.tap_stride + column)];
            if (column >= width) {
              BOOST_TEST_REQUIRE(found == before.state[at(tap * before.tap_stride + column)]);
              continue;
            }
            check_near(found, before.product(rows - taps + 1 + tap, column), 1e-6);
          }
        }
      }
    }
  }
}

BOOST_DATA_TEST_CASE(gated_convolution_in_pieces_has_the_same_bits, kernel_tables(), name) {
  const auto& table = kernel_table(name);
  FreshRandom random;
  Gated whole(11, 37, 4, &random);
  Gated pieces = whole;
  whole.run(table, 0, 11, 0, 37);
  for (const auto& [first, last] : {std::pair{0, 5}, {5, 24}, {24, 37}}) {
    for (const auto& [begin, end] : {std::pair{0, 1}, {1, 3}, {3, 11}}) {
      pieces.run(table, begin, end, first, last);
    }
  }
  BOOST_TEST((whole.out == pieces.out));
  BOOST_TEST((whole.state == pieces.state));
}

/// One value head with room after each row, which must stay as it is.
struct Delta {
  std::int64_t rows;
  std::int64_t key_dim;
  std::int64_t width;
  std::int64_t stride = 2 * key_dim + width + 3;  // [query | key | value]
  std::int64_t state_stride = width + 1;
  std::int64_t out_stride = width + 2;
  Values x;
  Values gates;  // [rows, 3]: beta, something else, decay
  Values state;
  Values out;

  Delta(std::int64_t num_rows, std::int64_t key_size, std::int64_t columns, FreshRandom* random)
      : rows(num_rows), key_dim(key_size), width(columns) {
    const float bound = 1.0F / std::sqrt(static_cast<float>(key_dim));
    x = random->vector(rows * stride, -bound, bound);
    gates = random->vector(rows * 3, 0.0F, 1.0F);
    state = random->vector(key_dim * state_stride);
    out.assign(at(rows * out_stride), kPoison);
  }

  /// Runs rows [begin, end) and columns [first, last).
  void run(const KernelTable& table, std::int64_t begin, std::int64_t end, std::int64_t first,
           std::int64_t last) {
    const float* row = x.data() + begin * stride;
    table.gated_delta({.query = row,
                       .key = row + key_dim,
                       .value = row + 2 * key_dim + first,
                       .stride = stride,
                       .beta = gates.data() + begin * 3,
                       .decay = gates.data() + begin * 3 + 2,
                       .gate_stride = 3,
                       .rows = end - begin,
                       .key_dim = key_dim,
                       .width = last - first,
                       .state = state.data() + first,
                       .state_stride = state_stride,
                       .out = out.data() + begin * out_stride + first,
                       .out_stride = out_stride});
  }
};

/// Compares with the recurrence in float64, whose state is float64 too.
void check_delta(const Delta& before, const Delta& after) {
  std::vector<double> state(before.state.begin(), before.state.end());
  const auto element = [&](std::int64_t i, std::int64_t column) -> double& {
    return state[at(i * before.state_stride + column)];
  };
  for (std::int64_t row = 0; row < before.rows; ++row) {
    const float* query = before.x.data() + row * before.stride;
    const float* key = query + before.key_dim;
    const float* value = key + before.key_dim;
    const double beta = before.gates[at(row * 3)];
    const double decay = before.gates[at(row * 3 + 2)];
    for (std::int64_t column = 0; column < before.width; ++column) {
      double known = 0.0;
      for (std::int64_t i = 0; i < before.key_dim; ++i) {
        element(i, column) *= decay;
        known += element(i, column) * static_cast<double>(key[i]);
      }
      const double change = (static_cast<double>(value[column]) - known) * beta;
      double sum = 0.0;
      for (std::int64_t i = 0; i < before.key_dim; ++i) {
        element(i, column) += static_cast<double>(key[i]) * change;
        sum += element(i, column) * static_cast<double>(query[i]);
      }
      check_near(after.out[at(row * before.out_stride + column)], sum, 1e-5);
    }
    for (std::int64_t column = before.width; column < before.out_stride; ++column) {
      BOOST_TEST_REQUIRE(after.out[at(row * before.out_stride + column)] == kPoison);
    }
  }
  for (std::int64_t i = 0; i < before.key_dim; ++i) {
    for (std::int64_t column = 0; column < before.width; ++column) {
      check_near(after.state[at(i * before.state_stride + column)], element(i, column), 1e-5);
    }
    const std::int64_t outside = i * before.state_stride + before.width;
    BOOST_TEST_REQUIRE(after.state[at(outside)] == before.state[at(outside)]);
  }
}

BOOST_DATA_TEST_CASE(gated_delta_is_the_recurrence, kernel_tables(), name) {
  const auto& table = kernel_table(name);
  FreshRandom random;
  for (const std::int64_t width : kWidths) {
    for (const std::int64_t key_dim : {1, 3, 8, 17}) {
      for (const std::int64_t rows : {0, 1, 9}) {
        const Delta before(rows, key_dim, width, &random);
        Delta after = before;
        after.run(table, 0, rows, 0, width);
        check_delta(before, after);
      }
    }
  }
}

BOOST_DATA_TEST_CASE(gated_delta_in_pieces_has_the_same_bits, kernel_tables(), name) {
  const auto& table = kernel_table(name);
  FreshRandom random;
  Delta whole(9, 11, 70, &random);
  Delta pieces = whole;
  whole.run(table, 0, 9, 0, 70);
  for (const auto& [first, last] : {std::pair{0, 16}, {16, 21}, {21, 70}}) {
    for (const auto& [begin, end] : {std::pair{0, 1}, {1, 3}, {3, 9}}) {
      pieces.run(table, begin, end, first, last);
    }
  }
  BOOST_TEST((whole.out == pieces.out));
  BOOST_TEST((whole.state == pieces.state));
}

/// One head of a scan with room after each row, which must stay as it is.
struct Scan {
  std::int64_t rows;
  std::int64_t state_dim;
  std::int64_t width;
  std::int64_t stride = 2 * state_dim + width + 3;  // [b | c | x], time, something else
  std::int64_t state_stride = width + 1;
  std::int64_t out_stride = width + 2;
  Values values;
  Values state;
  Values out;
  float rate = -1.3F;
  float skip = 0.7F;

  Scan(std::int64_t num_rows, std::int64_t state_size, std::int64_t columns, FreshRandom* random)
      : rows(num_rows), state_dim(state_size), width(columns) {
    const float bound = 1.0F / std::sqrt(static_cast<float>(state_dim));
    values = random->vector(rows * stride, -bound, bound);
    for (std::int64_t row = 0; row < rows; ++row) {
      float& time = values[at(row * stride + 2 * state_dim + width)];
      time = 2.0F * std::abs(time);
    }
    state = random->vector(state_dim * state_stride);
    out.assign(at(rows * out_stride), kPoison);
  }

  /// Runs rows [begin, end) and columns [first, last).
  void run(const KernelTable& table, std::int64_t begin, std::int64_t end, std::int64_t first,
           std::int64_t last) {
    const float* row = values.data() + begin * stride;
    table.selective_scan({.x = row + 2 * state_dim + first,
                          .b = row,
                          .c = row + state_dim,
                          .time = row + 2 * state_dim + width,
                          .stride = stride,
                          .rows = end - begin,
                          .state_dim = state_dim,
                          .width = last - first,
                          .rate = rate,
                          .skip = skip,
                          .state = state.data() + first,
                          .state_stride = state_stride,
                          .out = out.data() + begin * out_stride + first,
                          .out_stride = out_stride});
  }
};

/// Compares with the recurrence in float64, whose state is float64 too.
void check_scan(const Scan& before, const Scan& after) {
  std::vector<double> state(before.state.begin(), before.state.end());
  for (std::int64_t row = 0; row < before.rows; ++row) {
    const float* b = before.values.data() + row * before.stride;
    const float* c = b + before.state_dim;
    const float* x = c + before.state_dim;
    const double time = x[before.width];
    const double decay = std::exp(static_cast<double>(before.rate) * time);
    for (std::int64_t column = 0; column < before.width; ++column) {
      double sum = static_cast<double>(before.skip) * static_cast<double>(x[column]);
      for (std::int64_t i = 0; i < before.state_dim; ++i) {
        double& element = state[at(i * before.state_stride + column)];
        element = decay * element + static_cast<double>(b[i]) * time * static_cast<double>(x[column]);
        sum += static_cast<double>(c[i]) * element;
      }
      check_near(after.out[at(row * before.out_stride + column)], sum, 1e-5);
    }
    for (std::int64_t column = before.width; column < before.out_stride; ++column) {
      BOOST_TEST_REQUIRE(after.out[at(row * before.out_stride + column)] == kPoison);
    }
  }
  for (std::int64_t i = 0; i < before.state_dim; ++i) {
    for (std::int64_t column = 0; column < before.width; ++column) {
      const std::int64_t place = i * before.state_stride + column;
      check_near(after.state[at(place)], state[at(place)], 1e-5);
    }
    const std::int64_t outside = i * before.state_stride + before.width;
    BOOST_TEST_REQUIRE(after.state[at(outside)] == before.state[at(outside)]);
  }
}

BOOST_DATA_TEST_CASE(selective_scan_is_the_recurrence, kernel_tables(), name) {
  const auto& table = kernel_table(name);
  FreshRandom random;
  for (const std::int64_t width : kWidths) {
    for (const std::int64_t state_dim : {1, 3, 8, 17}) {
      for (const std::int64_t rows : {0, 1, 9}) {
        const Scan before(rows, state_dim, width, &random);
        Scan after = before;
        after.run(table, 0, rows, 0, width);
        check_scan(before, after);
      }
    }
  }
}

BOOST_DATA_TEST_CASE(selective_scan_in_pieces_has_the_same_bits, kernel_tables(), name) {
  const auto& table = kernel_table(name);
  FreshRandom random;
  Scan whole(9, 11, 70, &random);
  Scan pieces = whole;
  whole.run(table, 0, 9, 0, 70);
  for (const auto& [first, last] : {std::pair{0, 16}, {16, 21}, {21, 70}}) {
    for (const auto& [begin, end] : {std::pair{0, 1}, {1, 3}, {3, 9}}) {
      pieces.run(table, begin, end, first, last);
    }
  }
  BOOST_TEST((whole.out == pieces.out));
  BOOST_TEST((whole.state == pieces.state));
}

BOOST_DATA_TEST_CASE(multiplies_by_the_sigmoid_of_a_gate, kernel_tables(), name) {
  const auto& table = kernel_table(name);
  FreshRandom random;
  for (const std::int64_t n : kWidths) {
    const Values gate = random.vector(n, -20.0F, 20.0F);
    const Values x = random.vector(n, -3.0F, 3.0F);
    Values out = x;
    out.push_back(kPoison);
    table.multiply_by_sigmoid(gate.data(), n, reinterpret_cast<std::byte*>(out.data()), DType::kFloat32);
    for (std::size_t i = 0; i < at(n); ++i) {
      const double expected = static_cast<double>(x[i]) * sigmoid(gate[i]);
      check_near(out[i], expected, 1e-6 * std::abs(expected));
    }
    BOOST_TEST(out.back() == kPoison);

    std::vector<std::uint16_t> halves(at(n) + 1, 0xffff);
    table.scale_and_store(x.data(), 1.0F, n, reinterpret_cast<std::byte*>(halves.data()), DType::kBFloat16);
    const std::vector<std::uint16_t> rounded = halves;
    table.multiply_by_sigmoid(gate.data(), n, reinterpret_cast<std::byte*>(halves.data()), DType::kBFloat16);
    for (std::size_t i = 0; i < at(n); ++i) {
      const double expected = static_cast<double>(bfloat16_to_float(rounded[i])) * sigmoid(gate[i]);
      check_near(bfloat16_to_float(halves[i]), expected, 0.00391 * std::abs(expected));
    }
    BOOST_TEST(halves.back() == 0xffff);
  }
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::recurrences_test
