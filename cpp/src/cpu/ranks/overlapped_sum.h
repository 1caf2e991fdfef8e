#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "lowered_op.h"
#include "ranks/rank_sums.h"

namespace adaptrt {

/// Returns the sum over ranks of op `number`'s output, if the sum comes next or if only linear ops with other
/// rows come before it. Otherwise nullopt.
[[nodiscard]] std::optional<FusedAllReduce> find_all_reduce(std::span<const Op> ops, std::size_t number);

/// A sum over ranks that overlaps with the op that computes its terms. Ranks exchange a chunk of columns when
/// all of its rows are computed, while the op computes other columns, and while the ops between the op and
/// the sum run. The number of chunks depends only on sizes that are the same on all ranks. In memory, chunks
/// follow one another, each with its columns of all rows.
///
/// All ranks exchange in the same order: the terms of a chunk, then the sums of the previous chunk, if there
/// are such exchanges.
class OverlappedSum {
 public:
  /// `context` must outlive this object.
  explicit OverlappedSum(const CpuContext& context) : context_(context) {}

  /// Begins the sum of an op's output of `rows` rows, before the op runs. Returns this, or nullptr if the sum
  /// is too small to be split and comes next; then the op writes its rows as usual.
  OverlappedSum* begin(const FusedAllReduce& all_reduce, std::int64_t rows);

  /// True from begin() to finish() for that op.
  [[nodiscard]] bool is_under_way(const AllReduceOp& op) const { return op_ == &op; }
  /// True if a sum is in progress.
  [[nodiscard]] bool is_under_way() const { return op_ != nullptr; }

  /// Place of a column: the columns of its chunk, and the number of the first of them.
  struct Place {
    Rows rows;
    std::int64_t first_column;
    /// After the chunk's last column.
    std::int64_t end_column;
  };
  [[nodiscard]] Place place_of(std::int64_t column) const;

  /// Reports that this number of floats was computed in the chunk with the column. Several threads may call
  /// it.
  void add_made(std::int64_t column, std::int64_t floats);

  /// Begins the exchanges that are ready and lets messages progress. Does not wait. The step's thread calls
  /// it inside or between its loops.
  void go_on();

  /// Discards the exchanges of a failed step.
  void forget() { op_ = nullptr; }

  /// Begins the remaining exchanges of a sum whose terms are computed, if there is one. Call it before an
  /// exchange of another op, because all ranks begin exchanges in the same order.
  void begin_rest();

  /// Completes the sum's output. All of its terms must be computed.
  void finish();

 private:
  static constexpr std::size_t kMostChunks = 8;
  friend std::int64_t overlapped_sum_room(std::int64_t count, std::int64_t ranks);

  struct Chunk {
    std::int64_t first_column = 0;
    std::int64_t width = 0;
    std::atomic<std::int64_t> made = 0;
    RankSumExchanges exchanges;
  };

  [[nodiscard]] bool is_second_next() const;
  /// Begins the next exchange. Returns false if its data is not ready; with `waits`, waits for the data.
  bool begin_next(bool waits);

  const AllReduceOp* op_ = nullptr;
  const CpuContext& context_;
  std::int64_t rows_ = 0;
  Rows terms_;
  std::int64_t columns_per_chunk_ = 0;
  std::array<Chunk, kMostChunks> chunks_;
  std::size_t count_ = 0;
  /// Chunks whose first and whose second exchange have begun.
  std::size_t begun_ = 0;
  std::size_t second_begun_ = 0;
  ExchangeNumber latest_ = 0;
};

/// Floats of StepMemory::rank_room() that a sum of up to `count` floats needs, in chunks or as a whole.
[[nodiscard]] std::int64_t overlapped_sum_room(std::int64_t count, std::int64_t ranks);

}  // namespace adaptrt
