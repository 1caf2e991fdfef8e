#include "cuda_program/device_weights.h"

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "support/host_device.h"

namespace adaptrt::testing {
namespace {

PanelMatrix matrix_of(const std::vector<std::uint16_t>& values, std::int64_t n, std::int64_t k) {
  return {reinterpret_cast<const std::byte*>(values.data()), DType::kBFloat16, n, k};
}

template <typename T>
std::vector<T> read(const void* address, std::size_t count) {
  std::vector<T> values(count);
  std::memcpy(values.data(), address, count * sizeof(T));
  return values;
}

}  // namespace

BOOST_AUTO_TEST_SUITE(device_weights)

// The staging memory is smaller than each of the weights, and each is no multiple of it.
BOOST_AUTO_TEST_CASE(weights_are_copied_in_pieces) {
  HostDevice device(std::size_t{1} << 20, StreamTime::kLate);
  const auto stream = device.make_stream();
  ResidentWeights weights(device, *stream, 16);
  std::vector<std::uint16_t> first(3 * 8);
  std::vector<std::uint16_t> second(2 * 8);
  std::iota(first.begin(), first.end(), std::uint16_t{1});
  std::iota(second.begin(), second.end(), std::uint16_t{1000});
  const std::vector<float> bias{1.5F, -2.0F};
  const std::vector<LinearPart> parts{{matrix_of(first, 3, 8), {}},
                                      {matrix_of(second, 2, 8), {bias.data(), 2}}};
  const void* both = weights.matrices(parts);
  const float* biases = weights.biases(parts);
  const void* again = weights.matrices(parts);
  const void* one = weights.matrix(parts[1].weight);
  const float* vector = weights.vector({bias.data(), 2});
  weights.finish();
  std::vector<std::uint16_t> expected = first;
  expected.insert(expected.end(), second.begin(), second.end());
  BOOST_TEST(read<std::uint16_t>(both, 40) == expected, boost::test_tools::per_element());
  BOOST_TEST(read<float>(biases, 5) == (std::vector<float>{0, 0, 0, 1.5F, -2.0F}),
             boost::test_tools::per_element());
  BOOST_TEST(read<std::uint16_t>(one, 16) == second, boost::test_tools::per_element());
  BOOST_TEST(read<float>(vector, 2) == bias, boost::test_tools::per_element());
  BOOST_TEST(again == both);
  BOOST_TEST(weights.take().size() == 4U);
}

// Products have a multiple of 8 outputs. The embedding may be the same matrix.
BOOST_AUTO_TEST_CASE(matrices_end_with_rows_of_zeros) {
  HostDevice device(std::size_t{1} << 20);
  const auto stream = device.make_stream();
  ResidentWeights weights(device, *stream, 16);
  std::vector<std::uint16_t> values(9 * 8);
  std::iota(values.begin(), values.end(), std::uint16_t{1});
  const std::vector<LinearPart> head{{matrix_of(values, 9, 8), {}}};
  const void* embedding = weights.matrix(head[0].weight);
  BOOST_TEST(weights.matrices(head) == embedding);
  weights.finish();
  values.resize(16 * 8);
  BOOST_TEST(read<std::uint16_t>(embedding, 16 * 8) == values, boost::test_tools::per_element());
}

// Integers, scales and zero points of all parts, each followed by those of rows of zeros.
BOOST_AUTO_TEST_CASE(quantised_parts_are_joined) {
  HostDevice device(std::size_t{1} << 20);
  const auto stream = device.make_stream();
  ResidentWeights weights(device, *stream, 16);
  // [n][k / 2] integers, [n][2] scales, [n][2] zero points, for k of 32 in groups of 16.
  const auto bytes_of = [](std::int64_t n, int first) {
    std::vector<std::byte> bytes;
    for (std::int64_t i = 0; i < n * 16; ++i) bytes.push_back(static_cast<std::byte>(first + i));
    for (std::int64_t i = 0; i < n * 2; ++i) {
      const float scale = static_cast<float>(first) + static_cast<float>(i) / 4;
      const auto* from = reinterpret_cast<const std::byte*>(&scale);
      bytes.insert(bytes.end(), from, from + sizeof scale);
    }
    for (std::int64_t i = 0; i < n * 2; ++i) bytes.push_back(static_cast<std::byte>(first + 7 * i));
    return bytes;
  };
  const std::vector<std::byte> first = bytes_of(3, 20);
  const std::vector<std::byte> second = bytes_of(2, 90);
  for (const bool has_zeros : {true, false}) {
    const auto part_of = [&](const std::vector<std::byte>& bytes, std::int64_t n) {
      return LinearPart{{.data = bytes.data(),
                         .dtype = DType::kBFloat16,
                         .n = n,
                         .k = 32,
                         .quantization = {.algo = QuantAlgo::kW4A16,
                                          .group_size = 16,
                                          .zero_points = has_zeros,
                                          .scale_type = DType::kFloat32}},
                        {}};
    };
    const std::vector<LinearPart> parts{part_of(first, 3), part_of(second, 2)};
    const QuantizedMatrices found = weights.quantized_matrices(parts);
    weights.finish();
    const auto expect_joined = [&](const void* address, std::size_t begin, std::size_t row_bytes) {
      std::vector<std::byte> expected(first.begin() + static_cast<std::ptrdiff_t>(begin * 3),
                                      first.begin() + static_cast<std::ptrdiff_t>((begin + row_bytes) * 3));
      expected.insert(expected.end(), second.begin() + static_cast<std::ptrdiff_t>(begin * 2),
                      second.begin() + static_cast<std::ptrdiff_t>((begin + row_bytes) * 2));
      expected.resize(8 * row_bytes);
      BOOST_TEST((read<std::byte>(address, expected.size()) == expected));
    };
    expect_joined(found.weights, 0, 16);
    expect_joined(found.scales, 16, 8);
    if (has_zeros) {
      expect_joined(found.zeros, 24, 2);
    } else {
      BOOST_TEST(found.zeros == nullptr);
    }
  }
}

BOOST_AUTO_TEST_CASE(there_may_be_no_bias_and_no_vector) {
  HostDevice device(std::size_t{1} << 20);
  const auto stream = device.make_stream();
  ResidentWeights weights(device, *stream, 16);
  const std::vector<std::uint16_t> values(8);
  const std::vector<LinearPart> parts{{matrix_of(values, 1, 8), {}}};
  BOOST_TEST(weights.biases(parts) == nullptr);
  BOOST_TEST(weights.vector({}) == nullptr);
}

BOOST_AUTO_TEST_CASE(staging_memory_is_given_back) {
  HostDevice device(std::size_t{1} << 20);
  const auto stream = device.make_stream();
  ResidentWeights weights(device, *stream, 16);
  BOOST_TEST(device.num_allocations() == 2U);
  weights.finish();
  BOOST_TEST(device.num_allocations() == 0U);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace adaptrt::testing
