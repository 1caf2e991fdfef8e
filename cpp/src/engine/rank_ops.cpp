// Ops in which the ranks of an engine exchange rows.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "step.h"

namespace adaptrt {
namespace {

/// What a rank sends to all others together at most where it sends each of them everything, rather than the
/// share which that one sums: one round of messages, not two.
constexpr std::int64_t kFloatsSentWhole = 1 << 15;
/// Floats that a thread sums at a time.
constexpr std::int64_t kFloatsSummed = 1024;
/// Floats that a thread takes at once at least.
constexpr std::int64_t kFloatsPerChunk = 16384;

std::span<const std::byte> bytes_of(const float* floats, std::int64_t count) {
  return std::as_bytes(std::span(floats, static_cast<std::size_t>(count)));
}

std::span<std::byte> bytes_of(float* floats, std::int64_t count) {
  return std::as_writable_bytes(std::span(floats, static_cast<std::size_t>(count)));
}

/// One AllReduceOp in one step. A float's sum is ((x_0 + x_1) + x_2) + ..., wherever it is made.
class AllReduce {
 public:
  AllReduce(const AllReduceOp& op, const Step& step)
      : op_(op),
        step_(step),
        ranks_(step.stage_communicator->size()),
        rank_(step.stage_communicator->rank()),
        count_(step.rows * step.buffer(op.input).width),
        input_(step.float_row(op.input, 0)),
        output_(step.float_row(op.output, 0)),
        terms_(static_cast<std::size_t>(ranks_)) {}

  void run() {
    if (ranks_ == 2 || count_ * (ranks_ - 1) <= kFloatsSentWhole) {
      exchange_whole();
    } else {
      exchange_shares();
    }
  }

  /// Floats that the others' messages need at most, where the op has `count` of them.
  static std::int64_t room_for(std::int64_t count, std::int64_t ranks) {
    if (ranks == 2) return count;
    return std::max(std::min(count * (ranks - 1), kFloatsSentWhole), (2 * ranks) * share_of(count, ranks));
  }

 private:
  static std::int64_t share_of(std::int64_t count, std::int64_t ranks) { return (count + ranks - 1) / ranks; }

  void exchange_whole() {
    std::int64_t used = 0;
    for (std::int32_t rank = 0; rank < ranks_; ++rank) {
      if (rank == rank_) {
        terms_[static_cast<std::size_t>(rank)] = input_;
        continue;
      }
      float* room = step_.rank_room + used;
      used += count_;
      terms_[static_cast<std::size_t>(rank)] = room;
      sent_.push_back({rank, bytes_of(static_cast<const float*>(input_), count_)});
      received_.push_back({rank, bytes_of(room, count_)});
    }
    step_.stage_communicator->exchange(sent_, received_);
    sum_terms(count_, output_, op_.add);
  }

  /// Each rank sums one share and sends its sum to the others.
  void exchange_shares() {
    const std::int64_t share = share_of(count_, ranks_);
    const std::int64_t own_size = size_of_share(rank_, share);
    for (std::int32_t rank = 0; rank < ranks_; ++rank) {
      if (rank == rank_) {
        terms_[static_cast<std::size_t>(rank)] = input_ + rank * share;
        continue;
      }
      float* room = step_.rank_room + rank * share;
      terms_[static_cast<std::size_t>(rank)] = room;
      sent_.push_back(
          {rank, bytes_of(static_cast<const float*>(input_) + rank * share, size_of_share(rank, share))});
      received_.push_back({rank, bytes_of(room, own_size)});
    }
    step_.stage_communicator->exchange(sent_, received_);
    float* sums = step_.rank_room + ranks_ * share;  // all of them, share after share
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
    sum_terms(count_, output_, op_.add);
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

  const AllReduceOp& op_;
  const Step& step_;
  std::int32_t ranks_;
  std::int32_t rank_;
  std::int64_t count_;  ///< floats of the input
  float* input_;
  float* output_;
  std::vector<const float*> terms_;  ///< of a sum, by rank
  std::vector<OutgoingMessage> sent_;
  std::vector<IncomingMessage> received_;
};

/// In one order, whatever the row is beside.
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

/// One AllHeadsNormOp in one step. Sums of squares are [rows, 2], q's and k's, of each rank.
class AllHeadsNorm {
 public:
  AllHeadsNorm(const AllHeadsNormOp& op, const Step& step)
      : op_(op), step_(step), communicator_(*step.stage_communicator), count_(step.rows * kSums) {}

  void run() const {
    const std::int64_t rows_at_once = rows_per_chunk(op_.query_norm.size + op_.key_norm.size);
    step_.threads.parallel_for(step_.rows, rows_at_once, [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t row = begin; row < end; ++row) add_squares(row);
    });
    exchange();
    step_.threads.parallel_for(step_.rows, rows_at_once, [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t row = begin; row < end; ++row) {
        norm(query_of(row), op_.query_norm, total(row, 0), op_.whole_query_size);
        norm(key_of(row), op_.key_norm, total(row, 1), op_.whole_key_size);
      }
    });
  }

  static constexpr std::int64_t kSums = 2;  ///< of a row

 private:
  [[nodiscard]] float* query_of(std::int64_t row) const { return step_.float_row(op_.qkv, row); }
  [[nodiscard]] float* key_of(std::int64_t row) const { return query_of(row) + op_.query_norm.size; }
  [[nodiscard]] float* sums_of(std::int32_t rank) const { return step_.rank_room + rank * count_; }

  void add_squares(std::int64_t row) const {
    float* sums = sums_of(communicator_.rank()) + row * kSums;
    sums[0] = sum_of_squares(query_of(row), op_.query_norm.size);
    sums[1] = op_.counts_keys ? sum_of_squares(key_of(row), op_.key_norm.size) : 0.0F;
  }

  void exchange() const {
    std::vector<OutgoingMessage> sent;
    std::vector<IncomingMessage> received;
    for (std::int32_t rank = 0; rank < communicator_.size(); ++rank) {
      if (rank == communicator_.rank()) continue;
      sent.push_back({rank, bytes_of(static_cast<const float*>(sums_of(communicator_.rank())), count_)});
      received.push_back({rank, bytes_of(sums_of(rank), count_)});
    }
    communicator_.exchange(sent, received);
  }

  /// Over the ranks, in their order.
  [[nodiscard]] float total(std::int64_t row, std::int64_t which) const {
    float sum = 0.0F;
    for (std::int32_t rank = 0; rank < communicator_.size(); ++rank)
      sum += sums_of(rank)[row * kSums + which];
    return sum;
  }

  void norm(float* x, const VectorView& weight, float squares, std::int64_t whole_size) const {
    const float factor = 1.0F / std::sqrt(squares / static_cast<float>(whole_size) + op_.epsilon);
    for (std::int64_t i = 0; i < weight.size; ++i) x[i] = x[i] * factor * weight.data[i];
  }

  const AllHeadsNormOp& op_;
  const Step& step_;
  Communicator& communicator_;
  std::int64_t count_;  ///< floats of a rank's sums
};

/// Puts a rank's columns where the output has them.
void place_columns(const float* columns, std::int64_t width, std::int64_t first, const Rows& output,
                   const Step& step) {
  const std::int64_t size = std::clamp<std::int64_t>(output.width - first, 0, width);
  const auto body = [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t row = begin; row < end; ++row) {
      std::copy_n(columns + row * width, size, output.float_row(row) + first);
    }
  };
  step.threads.parallel_for(step.rows, rows_per_chunk(width), body);
}

}  // namespace

void run_op(const AllReduceOp& op, const Step& step) {
  AllReduce(op, step).run();
}

void run_op(const AllHeadsNormOp& op, const Step& step) {
  AllHeadsNorm(op, step).run();
}

void run_op(const GatherOp& op, const Step& step) {
  const Rows input = step.rows_of(op.input);
  const Rows output = step.rows_of(op.output);
  const std::int64_t count = step.rows * input.width;
  Communicator& communicator = *step.stage_communicator;
  if (communicator.rank() != 0) {
    const OutgoingMessage message{0, bytes_of(static_cast<const float*>(input.float_row(0)), count)};
    communicator.exchange({&message, 1}, {});
    return;
  }
  std::vector<IncomingMessage> received;
  for (std::int32_t rank = 1; rank < communicator.size(); ++rank) {
    received.push_back({rank, bytes_of(step.rank_room + (rank - 1) * count, count)});
  }
  communicator.exchange({}, received);
  place_columns(input.float_row(0), input.width, 0, output, step);
  for (std::int32_t rank = 1; rank < communicator.size(); ++rank) {
    place_columns(step.rank_room + (rank - 1) * count, input.width, rank * input.width, output, step);
  }
}

void run_op(const ReceiveOp& op, const Step& step) {
  const Rows output = step.rows_of(op.output);
  const IncomingMessage message{step.program.rank - step.program.ranks_per_stage(),
                                bytes_of(output.float_row(0), step.rows * output.width)};
  step.communicator->exchange({}, {&message, 1});
}

void run_op(const SendOp& op, const Step& step) {
  const Rows input = step.rows_of(op.input);
  const float* first = input.float_row(0);
  const OutgoingMessage message{step.program.rank + step.program.ranks_per_stage(),
                                bytes_of(first, step.rows * input.width)};
  step.communicator->exchange({&message, 1}, {});
}

std::size_t rank_room_floats(const Program& program) {
  std::int64_t floats = 0;
  const auto floats_of = [&](BufferId id) {
    const Buffer& buffer = program.buffers[static_cast<std::size_t>(id)];
    return buffer.width * (buffer.rows == RowKind::kLogits ? program.max_batch_size : program.max_num_tokens);
  };
  for (const auto* ops : program.sections()) {
    for (const Op& op : *ops) {
      if (const auto* reduce = std::get_if<AllReduceOp>(&op)) {
        floats = std::max(floats, AllReduce::room_for(floats_of(reduce->input), program.ranks_per_stage()));
      } else if (const auto* gather = std::get_if<GatherOp>(&op)) {
        floats = std::max(floats, floats_of(gather->input) * (program.ranks_per_stage() - 1));
      } else if (std::holds_alternative<AllHeadsNormOp>(op)) {
        const std::int64_t rows = program.max_num_tokens;
        floats = std::max(floats, rows * AllHeadsNorm::kSums * program.ranks_per_stage());
      }
    }
  }
  return static_cast<std::size_t>(floats);
}

}  // namespace adaptrt
