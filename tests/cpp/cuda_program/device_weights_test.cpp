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
  DeviceWeights weights(device, *stream, 16);
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
  DeviceWeights weights(device, *stream, 16);
  std::vector<std::uint16_t> values(9 * 8);
  std::iota(values.begin(), values.end(), std::uint16_t{1});
  const std::vector<LinearPart> head{{matrix_of(values, 9, 8), {}}};
  const void* embedding = weights.matrix(head[0].weight);
  BOOST_TEST(weights.matrices(head) == embedding);
  weights.finish();
  values.resize(16 * 8);
  BOOST_TEST(read<std::uint16_t>(embedding, 16 * 8) == values, boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(there_may_be_no_bias_and_no_vector) {
  HostDevice device(std::size_t{1} << 20);
  const auto stream = device.make_stream();
  DeviceWeights weights(device, *stream, 16);
  const std::vector<std::uint16_t> values(8);
  const std::vector<LinearPart> parts{{matrix_of(values, 1, 8), {}}};
  BOOST_TEST(weights.biases(parts) == nullptr);
  BOOST_TEST(weights.vector({}) == nullptr);
}

BOOST_AUTO_TEST_CASE(staging_memory_is_given_back) {
  HostDevice device(std::size_t{1} << 20);
  const auto stream = device.make_stream();
  DeviceWeights weights(device, *stream, 16);
  BOOST_TEST(device.num_allocations() == 2U);
  weights.finish();
  BOOST_TEST(device.num_allocations() == 0U);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace adaptrt::testing
