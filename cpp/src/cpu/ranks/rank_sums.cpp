#include "ranks/rank_sums.h"

#include <algorithm>
#include <array>

namespace adaptrt {
namespace {

/// Maximum number of floats that a rank sends to all others together in one round, in which each rank gets
/// everything. Above it, there are two rounds, and each rank sums a share.
constexpr std::int64_t kFloatsSentWhole = 1 << 15;
/// Floats that a thread sums at a time.
constexpr std::int64_t kFloatsSummed = 1024;
/// Minimum number of floats that a thread processes at once.
constexpr std::int64_t kFloatsPerChunk = 16384;

std::int64_t share_of(std::int64_t count, std::int64_t ranks) {
  return (count + ranks - 1) / ranks;
}

/// Rows of floats to write or to add to.
struct SumOutput {
  float* data;
  std::int64_t width;
  std::int64_t stride;
  bool add;
};

/// Floats [begin, end) of `output` = (or +=, with `add`) term_of(0) + term_of(1) + ...
template <class TermOf>
void add_up(std::int32_t terms, const TermOf& term_of, const KernelTable& kernels, std::int64_t begin,
            std::int64_t end, const SumOutput& output) {
  std::array<float, kFloatsSummed> sum;
  for (std::int64_t first = begin; first < end;) {
    const std::int64_t column = first % output.width;
    const std::int64_t size = std::min({kFloatsSummed, end - first, output.width - column});
    std::copy_n(term_of(0) + first, size, sum.begin());
    for (std::int32_t term = 1; term < terms; ++term) kernels.add(term_of(term) + first, size, sum.data());
    float* to = output.data + first / output.width * output.stride + column;
    if (output.add) {
      kernels.add(sum.data(), size, to);
    } else {
      std::copy_n(sum.begin(), size, to);
    }
    first += size;
  }
}

}  // namespace

RankSumExchanges::RankSumExchanges(const RankSum& sum, const CpuContext& context)
    : sum_(sum),
      context_(&context),
      ranks_(context.stage_communicator->size() / sum.rank_stride),
      rank_(context.stage_communicator->rank() / sum.rank_stride),
      in_shares_(ranks_ > 2 && sum.count() * (ranks_ - 1) > kFloatsSentWhole),
      share_(in_shares_ ? share_of(sum.count(), ranks_) : sum.count()) {}

void RankSumExchanges::begin() {
  const float* terms = sum_.terms;
  RankMessages& messages = context_->rank_messages;
  messages.clear();
  for (std::int32_t rank = 0; rank < ranks_; ++rank) {
    if (rank == rank_) continue;
    const float* sent = in_shares_ ? terms + rank * share_ : terms;
    messages.sent.push_back({number_of(rank), bytes_of(sent, size_of_share(rank))});
    messages.received.push_back({number_of(rank), bytes_of(room_of(rank), size_of_share(rank_))});
  }
  latest_ = context_->stage_communicator->begin_exchange(messages.sent, messages.received);
}

bool RankSumExchanges::first_has_ended() const {
  return context_->stage_communicator->has_ended(latest_);
}

void RankSumExchanges::end_first() const {
  context_->stage_communicator->end_exchange(latest_);
}

void RankSumExchanges::begin_second(bool in_all_threads) {
  const std::int64_t own_size = size_of_share(rank_);
  float* own = sums() + rank_ * share_;
  const auto body = [&](std::int64_t begin, std::int64_t end, int) {
    const SumOutput output{.data = own, .width = own_size, .stride = own_size, .add = false};
    add_up(ranks_, [&](std::int32_t rank) { return terms_of(rank); }, context_->kernels, begin, end, output);
  };
  if (in_all_threads) {
    context_->threads.parallel_for(own_size, kFloatsPerChunk, body);
  } else {
    body(0, own_size, 0);
  }
  RankMessages& messages = context_->rank_messages;
  messages.clear();
  for (std::int32_t rank = 0; rank < ranks_; ++rank) {
    if (rank == rank_) continue;
    messages.sent.push_back({number_of(rank), bytes_of(static_cast<const float*>(own), own_size)});
    messages.received.push_back({number_of(rank), bytes_of(sums() + rank * share_, size_of_share(rank))});
  }
  latest_ = context_->stage_communicator->begin_exchange(messages.sent, messages.received);
}

void RankSumExchanges::finish() const {
  context_->stage_communicator->end_exchange(latest_);
  const auto body = [&](std::int64_t begin, std::int64_t end, int) {
    const SumOutput output{sum_.output, sum_.width, sum_.output_stride, sum_.add};
    if (in_shares_) {
      add_up(1, [&](std::int32_t) { return sums(); }, context_->kernels, begin, end, output);
    } else {
      add_up(
          ranks_, [&](std::int32_t rank) { return terms_of(rank); }, context_->kernels, begin, end, output);
    }
  };
  context_->threads.parallel_for(sum_.count(), kFloatsPerChunk, body);
}

std::int32_t RankSumExchanges::number_of(std::int32_t rank) const {
  return context_->stage_communicator->rank() + (rank - rank_) * sum_.rank_stride;
}

std::int64_t RankSumExchanges::size_of_share(std::int32_t rank) const {
  if (!in_shares_) return share_;
  return std::clamp<std::int64_t>(sum_.count() - rank * share_, 0, share_);
}

float* RankSumExchanges::room_of(std::int32_t rank) const {
  return sum_.room + (in_shares_ || rank < rank_ ? rank : rank - 1) * share_;
}

const float* RankSumExchanges::terms_of(std::int32_t rank) const {
  if (rank != rank_) return room_of(rank);
  return in_shares_ ? sum_.terms + rank * share_ : sum_.terms;
}

float* RankSumExchanges::sums() const {
  return sum_.room + ranks_ * share_;
}

void sum_over_ranks(const RankSum& sum, const CpuContext& context) {
  RankSumExchanges exchanges(sum, context);
  exchanges.begin();
  if (exchanges.has_second()) {
    exchanges.end_first();
    exchanges.begin_second(true);
  }
  exchanges.finish();
}

std::int64_t rank_sum_room(std::int64_t count, std::int64_t ranks) {
  if (ranks == 2) return count;
  return std::max(std::min(count * (ranks - 1), kFloatsSentWhole), (2 * ranks) * share_of(count, ranks));
}

}  // namespace adaptrt
