// Ops of linear attention: they advance the states of sequences, token by token in the order of positions. So
// their bits depend neither on the steps into which a prompt is cut nor on other sequences.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "lowered_op.h"

namespace adaptrt {
namespace {

/// Rows of one sequence in a step.
struct SequenceRows {
  std::int64_t begin = 0;
  std::int64_t count = 0;
  std::int32_t slot = 0;
};

SequenceRows rows_of_sequence(const Step& step, std::int64_t sequence) {
  const auto at = static_cast<std::size_t>(sequence);
  const std::int32_t begin = step.input.sequence_offsets[at];
  return {begin, step.input.sequence_offsets[at + 1] - begin, step.input.state_slots[at]};
}

class LoweredCausalConvolution final : public LoweredOp {
 public:
  LoweredCausalConvolution(const CausalConvolutionOp& op, const OpPlace& place)
      : op_(op), context_(place.context), values_(place.context.rows_of(op.values)) {}

  /// Threads have different columns, or different sequences.
  void run(Step& step) override {
    constexpr std::int64_t kColumns = 256;
    const std::int64_t width = op_.width();
    const std::int64_t pieces = (width + kColumns - 1) / kColumns;
    const auto body = [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t task = begin; task < end; ++task) {
        const SequenceRows rows = rows_of_sequence(step, task / pieces);
        const std::int64_t first = task % pieces * kColumns;
        context_.kernels.causal_convolution(
            {.x = values_.float_row(rows.begin) + first,
             .stride = values_.width,
             .rows = rows.count,
             .width = std::min(kColumns, width - first),
             .weight = op_.weight.data + first,
             .taps = op_.taps,
             .state = context_.state_memory.convolution(rows.slot, op_.layer) + first,
             .tap_stride = width,
             .bias = op_.bias.size == 0 ? nullptr : op_.bias.data + first});
      }
    };
    context_.threads.parallel_for(step.num_sequences() * pieces, 1, body);
  }

 private:
  const CausalConvolutionOp& op_;
  const CpuContext& context_;
  Rows values_;
};

class LoweredGatedConvolution final : public LoweredOp {
 public:
  LoweredGatedConvolution(const GatedConvolutionOp& op, const OpPlace& place)
      : op_(op),
        context_(place.context),
        input_(place.context.rows_of(op.input)),
        output_(place.context.rows_of(op.output)) {}

  /// Threads have different columns, or different sequences.
  void run(Step& step) override {
    constexpr std::int64_t kColumns = 256;
    const std::int64_t width = op_.width();
    const std::int64_t pieces = (width + kColumns - 1) / kColumns;
    const std::size_t element = size_of(output_.dtype);
    const auto body = [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t task = begin; task < end; ++task) {
        const SequenceRows rows = rows_of_sequence(step, task / pieces);
        const std::int64_t first = task % pieces * kColumns;
        const float* input = input_.float_row(rows.begin) + first;
        context_.kernels.gated_convolution(
            {.before = input,
             .after = input + width,
             .x = input + 2 * width,
             .stride = input_.width,
             .rows = rows.count,
             .width = std::min(kColumns, width - first),
             .weight = op_.weight.data + first,
             .bias = op_.bias.size == 0 ? nullptr : op_.bias.data + first,
             .taps = op_.taps,
             .state = context_.state_memory.convolution(rows.slot, op_.layer) + first,
             .tap_stride = width,
             .out = output_.row(rows.begin) + static_cast<std::size_t>(first) * element,
             .out_stride = output_.width,
             .out_type = output_.dtype});
      }
    };
    context_.threads.parallel_for(step.num_sequences() * pieces, 1, body);
  }

 private:
  const GatedConvolutionOp& op_;
  const CpuContext& context_;
  Rows input_;
  Rows output_;
};

/// transformers' softplus, with its bound.
float softplus(float x) {
  return x > 20.0F ? x : std::log1p(std::exp(x));
}

class LoweredGatedDelta final : public LoweredOp {
 public:
  LoweredGatedDelta(const GatedDeltaOp& op, const OpPlace& place)
      : op_(op),
        context_(place.context),
        qkv_(place.context.rows_of(op.qkv)),
        gates_(place.context.rows_of(op.gates)),
        output_(place.context.rows_of(op.output)) {
    // x / |x| = x / sqrt(mean(x^2)) / sqrt(key_dim); q is divided by sqrt(key_dim) once more.
    const auto key_dim = static_cast<float>(op.shape.key_dim);
    query_weight_.assign(static_cast<std::size_t>(op.shape.key_dim), 1.0F / key_dim);
    key_weight_.assign(static_cast<std::size_t>(op.shape.key_dim), 1.0F / std::sqrt(key_dim));
    for (std::int64_t head = 0; head < op.shape.num_value_heads; ++head) {
      rates_.push_back(-std::exp(op.log_decay.data[head]));
    }
  }

  void run(Step& step) override {
    const auto prepare = [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t row = begin; row < end; ++row) {
        normalize(qkv_.float_row(row));
        compute_gates(gates_.float_row(row));
      }
    };
    context_.threads.parallel_for(step.rows, rows_per_chunk(2 * op_.shape.key_size()), prepare);

    // Threads have different columns of the states' values, different heads, or different sequences.
    constexpr std::int64_t kColumns = 64;
    const std::int64_t pieces = (op_.shape.value_dim + kColumns - 1) / kColumns;
    const std::int64_t tasks_of_sequence = pieces * op_.shape.num_value_heads;
    const auto body = [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t task = begin; task < end; ++task) {
        const SequenceRows rows = rows_of_sequence(step, task / tasks_of_sequence);
        const std::int64_t first = task % pieces * kColumns;
        advance(rows, task % tasks_of_sequence / pieces, first,
                std::min(kColumns, op_.shape.value_dim - first));
      }
    };
    context_.threads.parallel_for(step.num_sequences() * tasks_of_sequence, 1, body);
  }

 private:
  static constexpr float kEpsilon = 1e-6F;

  /// Divides the heads of q and k by their L2 norms, and q by sqrt(key_dim).
  void normalize(float* qkv) const {
    const std::int64_t size = op_.shape.key_dim;
    const float epsilon = kEpsilon / static_cast<float>(size);
    for (std::int64_t head = 0; head < 2 * op_.shape.num_key_heads; ++head) {
      float* x = qkv + head * size;
      const auto& weight = head < op_.shape.num_key_heads ? query_weight_ : key_weight_;
      context_.kernels.rms_norm(x, weight.data(), epsilon, size, reinterpret_cast<std::byte*>(x),
                                DType::kFloat32);
    }
  }

  /// Replaces [b | a] by beta and decay.
  void compute_gates(float* gates) const {
    const std::int64_t heads = op_.shape.num_value_heads;
    for (std::int64_t head = 0; head < heads; ++head) {
      gates[head] = op_.update_scale / (1.0F + std::exp(-gates[head]));
      const float time = softplus(gates[heads + head] + op_.time_bias.data[head]);
      gates[heads + head] = std::exp(rates_[static_cast<std::size_t>(head)] * time);
    }
  }

  /// Advances `width` columns of a value head over a sequence's rows.
  void advance(const SequenceRows& rows, std::int64_t head, std::int64_t first, std::int64_t width) const {
    const DeltaShape& shape = op_.shape;
    const float* qkv = qkv_.float_row(rows.begin);
    const std::int64_t key_head = head / (shape.num_value_heads / shape.num_key_heads);
    const std::int64_t column = head * shape.value_dim + first;
    const float* gates = gates_.float_row(rows.begin) + head;
    context_.kernels.gated_delta({.query = qkv + key_head * shape.key_dim,
                                  .key = qkv + shape.key_size() + key_head * shape.key_dim,
                                  .value = qkv + 2 * shape.key_size() + column,
                                  .stride = qkv_.width,
                                  .beta = gates,
                                  .decay = gates + shape.num_value_heads,
                                  .gate_stride = gates_.width,
                                  .rows = rows.count,
                                  .key_dim = shape.key_dim,
                                  .width = width,
                                  .state = context_.state_memory.delta(rows.slot, op_.layer) +
                                           head * shape.key_dim * shape.value_dim + first,
                                  .state_stride = shape.value_dim,
                                  .out = output_.float_row(rows.begin) + column,
                                  .out_stride = output_.width});
  }

  const GatedDeltaOp& op_;
  const CpuContext& context_;
  Rows qkv_;
  Rows gates_;
  Rows output_;
  std::vector<float> query_weight_;  // the factor after the RMS norm of a head of q, for each element
  std::vector<float> key_weight_;
  std::vector<float> rates_;  // -exp(log_decay)
};

class LoweredSelectiveScan final : public LoweredOp {
 public:
  LoweredSelectiveScan(const SelectiveScanOp& op, const OpPlace& place)
      : op_(op),
        context_(place.context),
        values_(place.context.rows_of(op.values)),
        output_(place.context.rows_of(op.output)) {
    for (std::int64_t head = 0; head < op.shape.num_heads; ++head) {
      rates_.push_back(-std::exp(op.log_decay.data[head]));
    }
  }

  void run(Step& step) override {
    const ScanShape& shape = op_.shape;
    const auto prepare = [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t row = begin; row < end; ++row) compute_times(values_.float_row(row) + time_column());
    };
    context_.threads.parallel_for(step.rows, rows_per_chunk(shape.num_heads), prepare);

    // Threads have different columns of a head, different heads, or different sequences.
    constexpr std::int64_t kColumns = 64;
    const std::int64_t pieces = (shape.head_dim + kColumns - 1) / kColumns;
    const std::int64_t tasks_of_sequence = pieces * shape.num_heads;
    const auto body = [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t task = begin; task < end; ++task) {
        const std::int64_t first = task % pieces * kColumns;
        advance(rows_of_sequence(step, task / tasks_of_sequence), task % tasks_of_sequence / pieces, first,
                std::min(kColumns, shape.head_dim - first));
      }
    };
    context_.threads.parallel_for(step.num_sequences() * tasks_of_sequence, 1, body);
  }

 private:
  [[nodiscard]] std::int64_t time_column() const {
    return op_.shape.value_size() + 2 * op_.shape.group_size();
  }

  /// Replaces dt by the time steps.
  void compute_times(float* times) const {
    for (std::int64_t head = 0; head < op_.shape.num_heads; ++head) {
      const float time = softplus(times[head] + op_.time_bias.data[head]);
      times[head] = std::clamp(time, op_.time_min, op_.time_max);
    }
  }

  /// Advances `width` columns of a head over a sequence's rows.
  void advance(const SequenceRows& rows, std::int64_t head, std::int64_t first, std::int64_t width) const {
    const ScanShape& shape = op_.shape;
    const float* values = values_.float_row(rows.begin);
    const float* b =
        values + shape.value_size() + head / (shape.num_heads / shape.num_groups) * shape.state_dim;
    const std::int64_t column = head * shape.head_dim + first;
    context_.kernels.selective_scan({.x = values + column,
                                     .b = b,
                                     .c = b + shape.group_size(),
                                     .time = values + time_column() + head,
                                     .stride = values_.width,
                                     .rows = rows.count,
                                     .state_dim = shape.state_dim,
                                     .width = width,
                                     .rate = rates_[static_cast<std::size_t>(head)],
                                     .skip = op_.skip.data[head],
                                     .state = context_.state_memory.scan(rows.slot, op_.layer) +
                                              head * shape.state_dim * shape.head_dim + first,
                                     .state_stride = shape.head_dim,
                                     .out = output_.float_row(rows.begin) + column,
                                     .out_stride = output_.width});
  }

  const SelectiveScanOp& op_;
  const CpuContext& context_;
  Rows values_;
  Rows output_;
  std::vector<float> rates_;  // -exp(log_decay)
};

}  // namespace

LoweredOpPtr lower(const SelectiveScanOp& op, const OpPlace& place) {
  return std::make_unique<LoweredSelectiveScan>(op, place);
}

LoweredOpPtr lower(const CausalConvolutionOp& op, const OpPlace& place) {
  return std::make_unique<LoweredCausalConvolution>(op, place);
}

LoweredOpPtr lower(const GatedConvolutionOp& op, const OpPlace& place) {
  return std::make_unique<LoweredGatedConvolution>(op, place);
}

LoweredOpPtr lower(const GatedDeltaOp& op, const OpPlace& place) {
  return std::make_unique<LoweredGatedDelta>(op, place);
}

}  // namespace adaptrt
