// Ops in which the ranks of an engine exchange rows.

#include <algorithm>
#include <cmath>

#include "adaptrt/engine/acked_send.h"
#include "ranks/overlapped_sum.h"
#include "ranks/rank_sums.h"
#include "ranks/square_sums.h"

namespace adaptrt {
namespace {

/// Number of sums of squares of a row: one for q, one for k.
constexpr std::int64_t kSums = 2;

class LoweredAllHeadsNorm final : public LoweredOp {
 public:
  LoweredAllHeadsNorm(const AllHeadsNormOp& op, const OpPlace& place)
      : op_(op),
        context_(place.context),
        squares_(place.context, place.context.stage_communicator->size(), kSums),
        qkv_(place.context.rows_of(op.qkv)) {}

  void run(Step& step) override {
    const std::int64_t rows = step.rows;
    const std::int64_t rows_at_once = rows_per_chunk(op_.query_norm.size + op_.key_norm.size);
    context_.threads.parallel_for(rows, rows_at_once, [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t row = begin; row < end; ++row) add_squares(row, squares_.own(row, rows));
    });
    squares_.exchange(rows);
    context_.threads.parallel_for(rows, rows_at_once, [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t row = begin; row < end; ++row) {
        norm(query_of(row), op_.query_norm, squares_.total(row, rows, 0), op_.whole_query_size);
        norm(key_of(row), op_.key_norm, squares_.total(row, rows, 1), op_.whole_key_size);
      }
    });
  }

 private:
  [[nodiscard]] float* query_of(std::int64_t row) const { return qkv_.float_row(row); }
  [[nodiscard]] float* key_of(std::int64_t row) const { return query_of(row) + op_.query_norm.size; }

  /// `sums` belong to the row.
  void add_squares(std::int64_t row, float* sums) const {
    sums[0] = sum_of_squares(query_of(row), op_.query_norm.size);
    sums[1] = op_.counts_keys ? sum_of_squares(key_of(row), op_.key_norm.size) : 0.0F;
  }

  void norm(float* x, const VectorView& weight, float squares, std::int64_t whole_size) const {
    const float factor = 1.0F / std::sqrt(squares / static_cast<float>(whole_size) + op_.epsilon);
    for (std::int64_t i = 0; i < weight.size; ++i) x[i] = x[i] * factor * weight.data[i];
  }

  const AllHeadsNormOp& op_;
  const CpuContext& context_;
  SquareSums squares_;
  Rows qkv_;
};

class LoweredAllReduce final : public LoweredOp {
 public:
  LoweredAllReduce(const AllReduceOp& op, const OpPlace& place)
      : op_(op),
        context_(place.context),
        input_(place.context.rows_of(op.input)),
        output_(place.context.rows_of(op.output)) {}

  void run(Step& step) override {
    if (context_.overlapped_sum.is_under_way(op_)) {
      context_.overlapped_sum.finish();
      return;
    }
    const std::int64_t count = step.rows * input_.width;
    sum_over_ranks({.terms = input_.float_row(0),
                    .width = count,
                    .output = output_.float_row(0),
                    .output_stride = count,
                    .add = op_.add,
                    .room = context_.memory.rank_room()},
                   context_);
  }

 private:
  const AllReduceOp& op_;
  const CpuContext& context_;
  Rows input_;
  Rows output_;
};

class LoweredGather final : public LoweredOp {
 public:
  LoweredGather(const GatherOp& op, const OpPlace& place)
      : context_(place.context),
        communicator_(*place.context.stage_communicator),
        input_(place.context.rows_of(op.input)),
        output_(place.context.rows_of(op.output)) {}

  void run(Step& step) override {
    const std::int64_t count = step.rows * input_.width;
    if (communicator_.rank() != 0) {
      acked_send({0, bytes_of(static_cast<const float*>(input_.float_row(0)), count)}, communicator_);
      return;
    }
    float* room = context_.memory.rank_room();
    RankMessages& messages = context_.rank_messages;
    messages.clear();
    for (std::int32_t rank = 1; rank < communicator_.size(); ++rank) {
      messages.received.push_back({rank, bytes_of(room + (rank - 1) * count, count)});
    }
    communicator_.exchange({}, messages.received);
    for (std::int32_t rank = 1; rank < communicator_.size(); ++rank) acknowledge(rank, communicator_);
    place_columns(input_.float_row(0), 0, step.rows);
    for (std::int32_t rank = 1; rank < communicator_.size(); ++rank) {
      place_columns(room + (rank - 1) * count, rank * input_.width, step.rows);
    }
  }

 private:
  /// Copies a rank's columns to their place in the output.
  void place_columns(const float* columns, std::int64_t first, std::int64_t rows) const {
    const std::int64_t size = std::clamp<std::int64_t>(output_.width - first, 0, input_.width);
    const auto body = [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t row = begin; row < end; ++row) {
        std::copy_n(columns + row * input_.width, size, output_.float_row(row) + first);
      }
    };
    context_.threads.parallel_for(rows, rows_per_chunk(input_.width), body);
  }

  const CpuContext& context_;
  Communicator& communicator_;
  Rows input_;
  Rows output_;
};

class LoweredReceive final : public LoweredOp {
 public:
  LoweredReceive(const ReceiveOp& op, const OpPlace& place)
      : communicator_(*place.context.communicator),
        output_(place.context.rows_of(op.output)),
        from_(place.context.program.rank - place.context.program.ranks_per_stage()) {}

  void run(Step& step) override {
    const IncomingMessage message{from_, bytes_of(output_.float_row(0), step.rows * output_.width)};
    communicator_.exchange({}, {&message, 1});
  }

 private:
  Communicator& communicator_;
  Rows output_;
  std::int32_t from_;
};

class LoweredSend final : public LoweredOp {
 public:
  LoweredSend(const SendOp& op, const OpPlace& place)
      : communicator_(*place.context.communicator),
        input_(place.context.rows_of(op.input)),
        to_(place.context.program.rank + place.context.program.ranks_per_stage()) {}

  void run(Step& step) override {
    const float* first = input_.float_row(0);
    const OutgoingMessage message{to_, bytes_of(first, step.rows * input_.width)};
    communicator_.exchange({&message, 1}, {});
  }

 private:
  Communicator& communicator_;
  Rows input_;
  std::int32_t to_;
};

class LoweredBroadcast final : public LoweredOp {
 public:
  LoweredBroadcast(const BroadcastOp& op, const OpPlace& place)
      : communicator_(*place.context.communicator), rows_(place.context.rows_of(op.buffer)) {
    const Program& program = place.context.program;
    const std::int32_t share = program.rank % program.ranks_per_stage();
    const auto rank_of = [&](std::int32_t stage) { return stage * program.ranks_per_stage() + share; };
    if (!program.is_last_stage()) {
      from_ = rank_of(program.num_stages - 1);
      return;
    }
    for (std::int32_t stage = 0; stage + 1 < program.num_stages; ++stage)
      sent_.push_back({rank_of(stage), {}});
  }

  void run(Step& step) override {
    const std::span<std::byte> bytes(rows_.data, static_cast<std::size_t>(step.rows * rows_.row_bytes()));
    if (from_) {
      const IncomingMessage message{*from_, bytes};
      communicator_.exchange({}, {&message, 1});
      return;
    }
    for (OutgoingMessage& message : sent_) message.bytes = bytes;
    communicator_.exchange(sent_, {});
  }

 private:
  Communicator& communicator_;
  Rows rows_;
  /// The rank of the last stage that sends; nullopt: this rank is in the last stage.
  std::optional<std::int32_t> from_;
  /// Messages to the ranks of the other stages.
  std::vector<OutgoingMessage> sent_;
};

}  // namespace

LoweredOpPtr lower(const AllReduceOp& op, const OpPlace& place) {
  return std::make_unique<LoweredAllReduce>(op, place);
}

LoweredOpPtr lower(const AllHeadsNormOp& op, const OpPlace& place) {
  return std::make_unique<LoweredAllHeadsNorm>(op, place);
}

LoweredOpPtr lower(const GatherOp& op, const OpPlace& place) {
  return std::make_unique<LoweredGather>(op, place);
}

LoweredOpPtr lower(const ReceiveOp& op, const OpPlace& place) {
  return std::make_unique<LoweredReceive>(op, place);
}

LoweredOpPtr lower(const SendOp& op, const OpPlace& place) {
  return std::make_unique<LoweredSend>(op, place);
}

LoweredOpPtr lower(const BroadcastOp& op, const OpPlace& place) {
  return std::make_unique<LoweredBroadcast>(op, place);
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
        floats = std::max(floats, SquareSums::room(program.max_num_tokens, program.ranks_per_stage(), kSums));
      } else if (const auto* gated = std::get_if<GatedRmsNormOp>(&op)) {
        floats = std::max(floats, SquareSums::room(program.max_num_tokens, gated->group_ranks, 1));
      }
    }
  }
  return static_cast<std::size_t>(floats);
}

}  // namespace adaptrt
