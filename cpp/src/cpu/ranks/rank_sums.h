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

/// A sum over the ranks of a stage; each rank has the same number of floats.
struct RankSum {
  /// [rows, width]: this rank's term. The output may be in the same place.
  float* terms = nullptr;
  std::int64_t rows = 1;
  std::int64_t width = 0;
  float* output = nullptr;
  /// Floats from one row of the output to the next.
  std::int64_t output_stride = 0;
  /// True: the sum is added to the output.
  bool add = false;
  /// Distance between the numbers of the ranks that take part.
  std::int32_t rank_stride = 1;
  /// rank_sum_room() floats, for data from other ranks.
  float* room = nullptr;

  [[nodiscard]] std::int64_t count() const { return rows * width; }
};

/// The exchanges of a RankSum. Two ranks, or ranks with few floats, send each other everything in one
/// exchange. Otherwise there are two exchanges: first each rank receives one share of all terms, then the
/// sums of all shares.
///
/// Order of calls: begin(); with two exchanges, end_first() and begin_second(); finish().
class RankSumExchanges {
 public:
  RankSumExchanges() = default;
  /// `context` must outlive this object.
  RankSumExchanges(const RankSum& sum, const CpuContext& context);

  [[nodiscard]] bool has_second() const { return in_shares_; }
  void begin();
  [[nodiscard]] bool first_has_ended() const;
  void end_first() const;
  /// Sums this rank's share, in the calling thread only or in all threads.
  void begin_second(bool in_all_threads);
  /// Waits for the last exchange, and computes the output.
  void finish() const;
  /// The last exchange.
  [[nodiscard]] ExchangeNumber latest() const { return latest_; }

 private:
  /// The communicator's number of a rank.
  [[nodiscard]] std::int32_t number_of(std::int32_t rank) const;
  [[nodiscard]] std::int64_t size_of_share(std::int32_t rank) const;
  /// Memory for another rank's terms of this rank's share.
  [[nodiscard]] float* room_of(std::int32_t rank) const;
  /// Terms of any rank, including this one, for this rank's share.
  [[nodiscard]] const float* terms_of(std::int32_t rank) const;
  /// The sums of all shares, one after another.
  [[nodiscard]] float* sums() const;

  RankSum sum_;
  const CpuContext* context_ = nullptr;
  /// Number of ranks that take part, and this rank's number among them.
  std::int32_t ranks_ = 0;
  std::int32_t rank_ = 0;
  bool in_shares_ = false;
  std::int64_t share_ = 0;  ///< floats of a share; all floats if there are no shares
  ExchangeNumber latest_ = 0;
};

/// output[i] = ((x_0[i] + x_1[i]) + x_2[i]) + ..., in the order of the ranks. The bits are the same on every
/// rank, and do not depend on the number of floats.
void sum_over_ranks(const RankSum& sum, const CpuContext& context);

/// Floats of RankSum::room that up to `count` floats need.
[[nodiscard]] std::int64_t rank_sum_room(std::int64_t count, std::int64_t ranks);

}  // namespace adaptrt
