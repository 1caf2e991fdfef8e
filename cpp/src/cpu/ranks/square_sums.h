#pragma once

#include <cstdint>

#include "context.h"

namespace adaptrt {

/// Returns the sum of squares, in an order that does not depend on other rows.
[[nodiscard]] float sum_of_squares(const float* x, std::int64_t size);

/// Sums of squares of rows whose columns are split among consecutive ranks of the stage. They are in the
/// context's rank_room().
class SquareSums {
 public:
  /// per_row: number of sums of a row. `context` must outlive this object.
  SquareSums(const CpuContext& context, std::int32_t num_ranks, std::int64_t per_row);

  /// Place of this rank's sums of a row, in a step of `rows` rows.
  [[nodiscard]] float* own(std::int64_t row, std::int64_t rows) const {
    return sums_of(rank_, rows) + row * per_row_;
  }
  /// Sends the sums of all rows to the other ranks and receives theirs.
  void exchange(std::int64_t rows) const;
  /// Returns the ranks' sums number `which` of a row, added in the order of the ranks.
  [[nodiscard]] float total(std::int64_t row, std::int64_t rows, std::int64_t which = 0) const;

  /// Floats of rank_room() for `rows` rows.
  [[nodiscard]] static std::int64_t room(std::int64_t rows, std::int64_t num_ranks, std::int64_t per_row) {
    return rows * num_ranks * per_row;
  }

 private:
  [[nodiscard]] float* sums_of(std::int32_t rank, std::int64_t rows) const;

  const CpuContext& context_;
  std::int32_t num_ranks_;
  std::int64_t per_row_;
  /// The communicator's number of the first rank, and this rank's number after it.
  std::int32_t first_;
  std::int32_t rank_;
};

}  // namespace adaptrt
