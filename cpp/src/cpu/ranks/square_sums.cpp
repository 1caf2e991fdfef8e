#include "ranks/square_sums.h"

#include <array>
#include <cstddef>

#include "ranks/rank_sums.h"

namespace adaptrt {

float sum_of_squares(const float* x, std::int64_t size) {
  constexpr std::int64_t kLanes = 16;
  std::array<float, kLanes> lanes{};
  const std::int64_t whole = size / kLanes * kLanes;
  for (std::int64_t i = 0; i < whole; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[static_cast<std::size_t>(lane)] += x[i + lane] * x[i + lane];
    }
  }
  float sum = 0.0F;
  for (const float lane : lanes) sum += lane;
  for (std::int64_t i = whole; i < size; ++i) sum += x[i] * x[i];
  return sum;
}

SquareSums::SquareSums(const CpuContext& context, std::int32_t num_ranks, std::int64_t per_row)
    : context_(context),
      num_ranks_(num_ranks),
      per_row_(per_row),
      first_(context.stage_communicator->rank() / num_ranks * num_ranks),
      rank_(context.stage_communicator->rank() % num_ranks) {}

float* SquareSums::sums_of(std::int32_t rank, std::int64_t rows) const {
  return context_.memory.rank_room() + rank * rows * per_row_;
}

void SquareSums::exchange(std::int64_t rows) const {
  RankMessages& messages = context_.rank_messages;
  messages.clear();
  const float* own = sums_of(rank_, rows);
  for (std::int32_t rank = 0; rank < num_ranks_; ++rank) {
    if (rank == rank_) continue;
    messages.sent.push_back({first_ + rank, bytes_of(own, rows * per_row_)});
    messages.received.push_back({first_ + rank, bytes_of(sums_of(rank, rows), rows * per_row_)});
  }
  context_.stage_communicator->exchange(messages.sent, messages.received);
}

float SquareSums::total(std::int64_t row, std::int64_t rows, std::int64_t which) const {
  float sum = 0.0F;
  for (std::int32_t rank = 0; rank < num_ranks_; ++rank) sum += sums_of(rank, rows)[row * per_row_ + which];
  return sum;
}

}  // namespace adaptrt
