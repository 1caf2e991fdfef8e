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

/// The sum over ranks of what op `number` makes, if it comes next, or after linear ops that have other rows;
/// nullopt: there is none.
[[nodiscard]] std::optional<FusedAllReduce> find_all_reduce(std::span<const Op> ops, std::size_t number);

/// A sum over ranks that goes on while the op makes its terms: chunks of columns are exchanged when all of
/// their rows are made, while the op makes other columns, and the ops between it and the sum theirs. How many
/// there are follows from sizes that are the same on all ranks. In memory, a chunk's columns of all rows
/// follow those of the chunk before it.
///
/// Ranks exchange all in one order: the terms of a chunk, and then the sums of the chunk before it, where
/// there are such exchanges.
class OverlappedSum {
 public:
  /// `context` outlives it.
  explicit OverlappedSum(const CpuContext& context) : context_(context) {}

  /// Begins the sum of what an op makes of `rows` rows, before the op runs. Returns this; nullptr where the
  /// sum is too small to be cut and comes next: then the op writes rows as they are.
  OverlappedSum* begin(const FusedAllReduce& all_reduce, std::int64_t rows);

  /// From begin() to finish(), of that op.
  [[nodiscard]] bool is_under_way(const AllReduceOp& op) const { return op_ == &op; }
  /// Of any.
  [[nodiscard]] bool is_under_way() const { return op_ != nullptr; }

  /// Where a column is: the columns of its chunk, and the number of the first of them.
  struct Place {
    Rows rows;
    std::int64_t first_column;
    /// Behind the chunk's last one.
    std::int64_t end_column;
  };
  [[nodiscard]] Place place_of(std::int64_t column) const;

  /// So many floats of the chunk that has the column are made. From several threads.
  void add_made(std::int64_t column, std::int64_t floats);

  /// Begins what can begin and lets messages go on, without a wait. From the thread that runs the step,
  /// within its loops or between them.
  void go_on();

  /// What a step that has failed has left of one.
  void forget() { op_ = nullptr; }

  /// Begins all that is left of one whose terms are made, if there is one: before an exchange of another op,
  /// because ranks begin exchanges in one order.
  void begin_rest();

  /// The sum's output, once all of its terms are made.
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
  /// Begins the next exchange; false where it needs what is not there yet, which `waits` waits for.
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

/// Floats of StepMemory::rank_room() that the sum of up to `count` floats needs, cut or not.
[[nodiscard]] std::int64_t overlapped_sum_room(std::int64_t count, std::int64_t ranks);

}  // namespace adaptrt
