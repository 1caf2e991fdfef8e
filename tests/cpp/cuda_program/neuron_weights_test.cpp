#include "cuda_program/neuron_weights.h"

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace adaptrt::testing::neuron_weights_test {
namespace {

/// Two MLPs of 4 neurons of 2 * 100 bytes, and one of 6 neurons of 2 * 50.
const WeightSizes kSizes{.outside = 1000,
                         .sections = {300, 200},
                         .mlps = {{.count = 4, .vector_bytes = 100, .section = 2048},
                                  {.count = 6, .vector_bytes = 50, .section = 1024},
                                  {.count = 4, .vector_bytes = 100, .section = 2048}}};
/// Bytes of everything but the neurons: other weights, two slots, tables, and what alignment may take.
constexpr std::size_t kFixed = 1500 + 2 * 2048 + 3 * 256 + 3 * 512;

NeuronPlan plan_of(std::size_t neuron_bytes, const std::vector<std::vector<std::uint32_t>>& usage = {}) {
  return plan_neurons(kSizes, kFixed + neuron_bytes, usage).value();
}

BOOST_AUTO_TEST_SUITE(neuron_weights)

BOOST_AUTO_TEST_CASE(an_even_share_of_each_mlp_stays) {
  BOOST_TEST((plan_of(0) == NeuronPlan{{-1, -1, -1, -1}, {-1, -1, -1, -1, -1, -1}, {-1, -1, -1, -1}}));
  // Half of 2200 bytes.
  BOOST_TEST((plan_of(1100) == NeuronPlan{{-1, 0, -1, 1}, {-1, 0, -1, 1, -1, 2}, {-1, 0, -1, 1}}));
  BOOST_TEST((plan_of(1099) == NeuronPlan{{-1, -1, -1, 0}, {-1, -1, 0, -1, -1, 1}, {-1, -1, -1, 0}}));
}

BOOST_AUTO_TEST_CASE(mlps_that_fit_stay_whole) {
  const std::vector<std::int32_t> whole;
  const std::vector<std::int32_t> cold(4, -1);
  BOOST_TEST((plan_of(2047) == NeuronPlan{{-1, 0, 1, 2}, {-1, 0, 1, 2, 3, 4}, {-1, 0, 1, 2}}));
  BOOST_TEST((plan_of(2048) == NeuronPlan{whole, {-1, -1, -1, -1, -1, -1}, cold}));
  // Half of the 1400 bytes of the two other ones.
  BOOST_TEST((plan_of(2048 + 700) == NeuronPlan{whole, {-1, 0, -1, 1, -1, 2}, {-1, 0, -1, 1}}));
  // The sizes of the largest MLP count. A smaller one leaves more for neurons.
  BOOST_TEST((plan_of(2 * 2048) == NeuronPlan{whole, whole, {0, 1, 2, 3}}));
  // One MLP is divided even if there is more memory.
  BOOST_TEST((plan_of(99'999) == NeuronPlan{whole, whole, {0, 1, 2, 3}}));
}

BOOST_AUTO_TEST_CASE(the_most_used_neurons_stay) {
  const std::vector<std::vector<std::uint32_t>> usage{{5, 1, 9, 0}, {}, {2, 9, 9, 3}};
  BOOST_TEST((plan_of(199, usage) == plan_of(0)));
  BOOST_TEST(
      (plan_of(200, usage) == NeuronPlan{{-1, -1, 0, -1}, {-1, -1, -1, -1, -1, -1}, {-1, -1, -1, -1}}));
  BOOST_TEST((plan_of(800, usage) == NeuronPlan{{0, -1, 1, -1}, {-1, -1, -1, -1, -1, -1}, {-1, 0, 1, -1}}));
  // Neurons without counts come last, with those of 0, in order.
  BOOST_TEST((plan_of(1800, usage) == NeuronPlan{{0, 1, 2, 3}, {0, 1, -1, -1, -1, -1}, {0, 1, 2, 3}}));
  // A missing MLP is one of which nothing is known, and so are all if no MLP has counts.
  BOOST_TEST((plan_of(200, {{}, {0, 0, 0, 0, 0, 4}}) ==
              NeuronPlan{{-1, -1, -1, -1}, {-1, -1, -1, -1, -1, 0}, {-1, -1, -1, -1}}));
  BOOST_TEST((plan_of(1100, {{}, {}}) == plan_of(1100)));
}

BOOST_AUTO_TEST_CASE(other_weights_and_two_slots_come_first) {
  BOOST_TEST(!plan_neurons(kSizes, kFixed - 1, {}).has_value());
  BOOST_TEST(plan_neurons(kSizes, kFixed, {}).has_value());
  BOOST_TEST(!plan_neurons({.outside = 10}, 1000, {}).has_value());
}

BOOST_AUTO_TEST_CASE(matrices_are_transposed) {
  for (const auto& [rows, columns] : {std::pair{1, 1}, {8, 130}, {64, 64}, {65, 3}, {200, 72}}) {
    const auto size = static_cast<std::size_t>(rows * columns);
    std::vector<std::uint16_t> matrix(size);
    std::vector<std::uint16_t> found(size + 1, 0xffff);
    for (std::size_t i = 0; i < size; ++i) matrix[i] = static_cast<std::uint16_t>(i);
    transpose(reinterpret_cast<const std::byte*>(matrix.data()), rows, columns,
              reinterpret_cast<std::byte*>(found.data()));
    bool is_right = found.back() == 0xffff;
    for (int i = 0; i < rows; ++i) {
      for (int j = 0; j < columns; ++j) {
        is_right = is_right && found[static_cast<std::size_t>(j * rows + i)] ==
                                   matrix[static_cast<std::size_t>(i * columns + j)];
      }
    }
    BOOST_TEST(is_right);
  }
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::neuron_weights_test
