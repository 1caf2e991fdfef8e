// Ops in which the ranks of an engine exchange rows.

#include <algorithm>
#include <array>
#include <cmath>

#include "adaptrt/engine/taken.h"
#include "ranks/overlapped_sum.h"
#include "ranks/rank_sums.h"
#include "step.h"

namespace adaptrt {
namespace {

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
    RankMessages& messages = step_.rank_messages;
    messages.clear();
    const float* own = sums_of(communicator_.rank());
    for (std::int32_t rank = 0; rank < communicator_.size(); ++rank) {
      if (rank == communicator_.rank()) continue;
      messages.sent.push_back({rank, bytes_of(own, count_)});
      messages.received.push_back({rank, bytes_of(sums_of(rank), count_)});
    }
    communicator_.exchange(messages.sent, messages.received);
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
  if (step.overlapped_sum.is_under_way(op)) {
    step.overlapped_sum.finish();
    return;
  }
  const Rows input = step.rows_of(op.input);
  const std::int64_t count = step.rows * input.width;
  sum_over_ranks({.terms = input.float_row(0),
                  .width = count,
                  .output = step.float_row(op.output, 0),
                  .output_stride = count,
                  .add = op.add,
                  .room = step.rank_room},
                 step);
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
    send_until_taken({0, bytes_of(static_cast<const float*>(input.float_row(0)), count)}, communicator);
    return;
  }
  RankMessages& messages = step.rank_messages;
  messages.clear();
  for (std::int32_t rank = 1; rank < communicator.size(); ++rank) {
    messages.received.push_back({rank, bytes_of(step.rank_room + (rank - 1) * count, count)});
  }
  communicator.exchange({}, messages.received);
  for (std::int32_t rank = 1; rank < communicator.size(); ++rank) tell_taken(rank, communicator);
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

void run_op(const BroadcastOp& op, const Step& step) {
  const Rows rows = step.rows_of(op.buffer);
  const std::span<std::byte> bytes(rows.data, static_cast<std::size_t>(step.rows * rows.row_bytes()));
  const Program& program = step.program;
  const std::int32_t share = program.rank % program.ranks_per_stage();
  const auto rank_of = [&](std::int32_t stage) { return stage * program.ranks_per_stage() + share; };
  if (!program.is_last_stage()) {
    const IncomingMessage message{rank_of(program.num_stages - 1), bytes};
    step.communicator->exchange({}, {&message, 1});
    return;
  }
  std::vector<OutgoingMessage> sent;
  for (std::int32_t stage = 0; stage + 1 < program.num_stages; ++stage) {
    sent.push_back({rank_of(stage), bytes});
  }
  step.communicator->exchange(sent, {});
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
        floats = std::max(floats, overlapped_sum_room(floats_of(reduce->input), program.ranks_per_stage()));
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
