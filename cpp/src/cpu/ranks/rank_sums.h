#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "context.h"

namespace adaptrt {

[[nodiscard]] inline std::span<const std::byte> bytes_of(const float* floats, std::int64_t count) {
  return std::as_bytes(std::span(floats, static_cast<std::size_t>(count)));
}

[[nodiscard]] inline std::span<std::byte> bytes_of(float* floats, std::int64_t count) {
  return std::as_writable_bytes(std::span(floats, static_cast<std::size_t>(count)));
}

/// A sum over ranks of a stage, of as many floats on each.
struct RankSum {
  /// [rows, width], this rank's; the output may be in the same place.
  float* terms = nullptr;
  std::int64_t rows = 1;
  std::int64_t width = 0;
  float* output = nullptr;
  /// Floats from one row of the output to the next.
  std::int64_t output_stride = 0;
  /// The sum is added to the output.
  bool add = false;
  /// The ranks whose numbers are this one's and multiples of it more or less.
  std::int32_t rank_stride = 1;
  /// rank_sum_room() floats, for data from other ranks.
  float* room = nullptr;

  [[nodiscard]] std::int64_t count() const { return rows * width; }
};

/// The exchanges of a RankSum. For two ranks, and for few floats, there is one exchange, in which ranks send
/// each other everything. Otherwise there are two: each rank receives a share of all terms, and then the sums
/// of all shares.
///
/// Order of calls: begin(); with two exchanges, end_first() and begin_second(); finish().
class RankSumExchanges {
 public:
  RankSumExchanges() = default;
  /// `context` outlives this.
  RankSumExchanges(const RankSum& sum, const CpuContext& context);

  [[nodiscard]] bool has_second() const { return in_shares_; }
  void begin();
  [[nodiscard]] bool first_has_ended() const;
  void end_first() const;
  /// Sums this rank's share, in the calling thread only or in all threads.
  void begin_second(bool in_all_threads);
  /// Waits for the exchange that was begun last, and computes the output.
  void finish() const;
  /// The exchange that was begun last.
  [[nodiscard]] ExchangeNumber latest() const { return latest_; }

 private:
  /// The communicator's number of a rank.
  [[nodiscard]] std::int32_t number_of(std::int32_t rank) const;
  [[nodiscard]] std::int64_t size_of_share(std::int32_t rank) const;
  /// Place for another rank's terms of this rank's share.
  [[nodiscard]] float* room_of(std::int32_t rank) const;
  /// Terms of any rank, this one included, for this rank's share.
  [[nodiscard]] const float* terms_of(std::int32_t rank) const;
  /// The sums of all shares, one after another.
  [[nodiscard]] float* sums() const;

  RankSum sum_;
  const CpuContext* context_ = nullptr;
  /// How many there are, and which of them this is.
  std::int32_t ranks_ = 0;
  std::int32_t rank_ = 0;
  bool in_shares_ = false;
  std::int64_t share_ = 0;  ///< floats of one; all of them where there are none
  ExchangeNumber latest_ = 0;
};

/// output[i] = ((x_0[i] + x_1[i]) + x_2[i]) + ..., in the order of the ranks, wherever it is made: the same
/// bits on every rank, however many floats there are.
void sum_over_ranks(const RankSum& sum, const CpuContext& context);

/// Floats of RankSum::room that up to `count` floats need.
[[nodiscard]] std::int64_t rank_sum_room(std::int64_t count, std::int64_t ranks);

}  // namespace adaptrt
