#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "step.h"

namespace adaptrt {

[[nodiscard]] inline std::span<const std::byte> bytes_of(const float* floats, std::int64_t count) {
  return std::as_bytes(std::span(floats, static_cast<std::size_t>(count)));
}

[[nodiscard]] inline std::span<std::byte> bytes_of(float* floats, std::int64_t count) {
  return std::as_writable_bytes(std::span(floats, static_cast<std::size_t>(count)));
}

/// A sum over the ranks of a stage, of as many floats on each.
struct RankSum {
  float* terms = nullptr;  ///< this rank's; the output may be in the same place
  std::int64_t count = 0;
  float* output = nullptr;
  /// The sum is added to the output.
  bool add = false;
  /// Of rank_sum_room() floats, for what comes of the others.
  float* room = nullptr;
};

/// output[i] = ((x_0[i] + x_1[i]) + x_2[i]) + ..., in the order of the ranks, wherever it is made: the same
/// bits on every rank, however many floats there are.
void sum_over_ranks(const RankSum& sum, const Step& step);

/// Floats of RankSum::room that up to `count` floats need.
[[nodiscard]] std::int64_t rank_sum_room(std::int64_t count, std::int64_t ranks);

}  // namespace adaptrt
