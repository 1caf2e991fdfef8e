#pragma once

#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "emulated_tiles/kernel_tables.h"

namespace adaptrt {

/// A value that no kernel may leave or read.
inline constexpr float kPoison = -12345678.0F;

using testing::kernel_table;
using testing::kernel_tables;

inline void check_near(float found, double expected, double bound) {
  BOOST_TEST_REQUIRE(std::abs(found - expected) <= bound,
                     found << " is not " << expected << " within " << bound);
}

/// Different random numbers in every run; the seed is printed so that a failure can be repeated.
class FreshRandom {
 public:
  FreshRandom() : seed_(std::random_device{}()), engine_(seed_) {}
  [[nodiscard]] std::uint32_t seed() const { return seed_; }
  float between(float low, float high) { return std::uniform_real_distribution<float>(low, high)(engine_); }
  std::vector<float> vector(std::int64_t size, float low = -1.0F, float high = 1.0F) {
    std::vector<float> values(static_cast<std::size_t>(size));
    for (auto& value : values) value = between(low, high);
    return values;
  }

 private:
  std::uint32_t seed_;
  std::mt19937 engine_;
};

}  // namespace adaptrt
