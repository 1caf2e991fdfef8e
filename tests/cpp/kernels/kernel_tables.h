#pragma once

#include <boost/test/data/monomorphic.hpp>
#include <cstdint>
#include <ostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "adaptrt/kernels/kernel_table.h"

namespace adaptrt {

/// A value that no kernel may leave behind or read.
inline constexpr float kPoison = -12345678.0F;

/// Every table that this CPU can run, as a dataset.
inline auto kernel_tables() {
  std::vector<std::string> names;
  for (const auto* table : available_kernels()) names.emplace_back(table->name);
  return boost::unit_test::data::make(std::move(names));
}

/// Fresh random numbers in every run; the seed is printed so that a failure can be repeated.
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
