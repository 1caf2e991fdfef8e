#include "rank_sums.h"

#include <algorithm>
#include <array>
#include <span>
#include <vector>

namespace adaptrt {
namespace {

/// What a rank sends to all others together at most where it sends each of them everything, rather than the
/// share which that one sums: one round of messages, not two.
constexpr std::int64_t kFloatsSentWhole = 1 << 15;
/// Floats that a thread sums at a time.
constexpr std::int64_t kFloatsSummed = 1024;
/// Floats that a thread takes at once at least.
constexpr std::int64_t kFloatsPerChunk = 16384;

std::int64_t share_of(std::int64_t count, std::int64_t ranks) {
  return (count + ranks - 1) / ranks;
}

/// One sum in one step.
class SumOverRanks {
 public:
  SumOverRanks(const RankSum& sum, const Step& step)
      : sum_(sum),
        step_(step),
        ranks_(step.stage_communicator->size()),
        rank_(step.stage_communicator->rank()),
        count_(sum.count),
        terms_(static_cast<std::size_t>(ranks_)) {}

  void run() {
    if (ranks_ == 2 || count_ * (ranks_ - 1) <= kFloatsSentWhole) {
      exchange_whole();
    } else {
      exchange_shares();
    }
  }

 private:
  void exchange_whole() {
    std::int64_t used = 0;
    for (std::int32_t rank = 0; rank < ranks_; ++rank) {
      if (rank == rank_) {
        terms_[static_cast<std::size_t>(rank)] = sum_.terms;
        continue;
      }
      float* room = sum_.room + used;
      used += count_;
      terms_[static_cast<std::size_t>(rank)] = room;
      sent_.push_back({rank, bytes_of(static_cast<const float*>(sum_.terms), count_)});
      received_.push_back({rank, bytes_of(room, count_)});
    }
    step_.stage_communicator->exchange(sent_, received_);
    sum_terms(count_, sum_.output, sum_.add);
  }

  /// Each rank sums one share and sends its sum to the others.
  void exchange_shares() {
    const std::int64_t share = share_of(count_, ranks_);
    const std::int64_t own_size = size_of_share(rank_, share);
    for (std::int32_t rank = 0; rank < ranks_; ++rank) {
      if (rank == rank_) {
        terms_[static_cast<std::size_t>(rank)] = sum_.terms + rank * share;
        continue;
      }
      float* room = sum_.room + rank * share;
      terms_[static_cast<std::size_t>(rank)] = room;
      sent_.push_back(
          {rank, bytes_of(static_cast<const float*>(sum_.terms) + rank * share, size_of_share(rank, share))});
      received_.push_back({rank, bytes_of(room, own_size)});
    }
    step_.stage_communicator->exchange(sent_, received_);
    float* sums = sum_.room + ranks_ * share;  // all of them, share after share
    sum_terms(own_size, sums + rank_ * share, false);
    sent_.clear();
    received_.clear();
    for (std::int32_t rank = 0; rank < ranks_; ++rank) {
      if (rank == rank_) continue;
      sent_.push_back({rank, bytes_of(static_cast<const float*>(sums) + rank_ * share, own_size)});
      received_.push_back({rank, bytes_of(sums + rank * share, size_of_share(rank, share))});
    }
    step_.stage_communicator->exchange(sent_, received_);
    terms_.assign(1, sums);
    sum_terms(count_, sum_.output, sum_.add);
  }

  [[nodiscard]] std::int64_t size_of_share(std::int64_t rank, std::int64_t share) const {
    return std::clamp<std::int64_t>(count_ - rank * share, 0, share);
  }

  /// to[i] = (or, with `add`, +=) terms_[0][i] + terms_[1][i] + ...
  void sum_terms(std::int64_t count, float* to, bool add) const {
    const auto body = [&](std::int64_t begin, std::int64_t end, int) {
      std::array<float, kFloatsSummed> sum;
      for (std::int64_t first = begin; first < end; first += kFloatsSummed) {
        const std::int64_t size = std::min(kFloatsSummed, end - first);
        std::copy_n(terms_.front() + first, size, sum.begin());
        for (std::size_t term = 1; term < terms_.size(); ++term) {
          step_.kernels.add(terms_[term] + first, size, sum.data());
        }
        if (add) {
          step_.kernels.add(sum.data(), size, to + first);
        } else {
          std::copy_n(sum.begin(), size, to + first);
        }
      }
    };
    step_.threads.parallel_for(count, kFloatsPerChunk, body);
  }

  const RankSum& sum_;
  const Step& step_;
  std::int32_t ranks_;
  std::int32_t rank_;
  std::int64_t count_;
  std::vector<const float*> terms_;  ///< of a sum, by rank
  std::vector<OutgoingMessage> sent_;
  std::vector<IncomingMessage> received_;
};

}  // namespace

void sum_over_ranks(const RankSum& sum, const Step& step) {
  SumOverRanks(sum, step).run();
}

std::int64_t rank_sum_room(std::int64_t count, std::int64_t ranks) {
  if (ranks == 2) return count;
  return std::max(std::min(count * (ranks - 1), kFloatsSentWhole), (2 * ranks) * share_of(count, ranks));
}

}  // namespace adaptrt
