// Ops that process each row separately: norm, gated sum, rotary angles, the choice of rows.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include "adaptrt/core/convert.h"
#include "adaptrt/program/xielu.h"
#include "given_rows.h"
#include "lowered_op.h"
#include "op_sizes.h"
#include "ops/linear/linear_output.h"
#include "ranks/square_sums.h"

namespace adaptrt {
namespace {

/// Inverse frequencies of the dynamic NTK scaling for a sequence of `length` positions:
/// base' = base * (factor * length / original - (factor - 1))^(dim / (dim - 2)), 1 / base'^(2 i / dim).
void dynamic_inverse_frequencies(const RopeTableOp& op, std::int64_t length, float* frequencies) {
  const auto half = static_cast<std::size_t>(op.inverse_frequencies.size);
  const double dim = 2.0 * static_cast<double>(half);
  const double factor = op.factor;
  const double grown = factor * static_cast<double>(length) / op.original_max_position - (factor - 1.0);
  const double base = op.base * std::pow(grown, dim / (dim - 2.0));
  for (std::size_t i = 0; i < half; ++i) {
    frequencies[i] = static_cast<float>(1.0 / std::pow(base, 2.0 * static_cast<double>(i) / dim));
  }
}

/// Inverse frequencies for a sequence whose adapter divides positions (AdapterTerms::rotary_factor): the
/// linear scaling of Hugging Face's modeling_rope_utils.py.
void divide_frequencies(const RopeTableOp& op, std::int32_t factor, float* frequencies) {
  const auto divisor = static_cast<float>(factor);
  for (std::int64_t i = 0; i < op.inverse_frequencies.size; ++i) {
    frequencies[i] = op.inverse_frequencies.data[i] / divisor;
  }
}

/// Biases of a norm's rows: the norm's bias plus the adapter's term. Rows must be requested in order.
class NormBiases {
 public:
  /// `made`: float32 [width], memory of one thread.
  NormBiases(const LayerNormOp& op, const Step& step, float* made)
      : op_(op),
        group_(step.groups.begin()),
        end_(op.lora_site < 0 ? group_ : step.groups.end()),
        made_(made) {}

  /// Returns [width], valid until the next call; nullptr if the row has no bias.
  const float* of(std::int64_t row) {
    while (group_ != end_ && group_->end <= row) ++group_;
    if (group_ == end_ || row < group_->begin) return op_.bias.data;
    const float* shift = group_->adapter->sites[static_cast<std::size_t>(op_.lora_site)].parts[0].shift;
    if (shift == nullptr) return op_.bias.data;
    if (shift != shift_) {
      for (std::int64_t i = 0; i < op_.bias.size; ++i) made_[i] = op_.bias.data[i] + shift[i];
    }
    shift_ = shift;
    return made_;
  }

 private:
  const LayerNormOp& op_;
  std::span<const AdapterGroup>::iterator group_;
  std::span<const AdapterGroup>::iterator end_;
  float* made_;
  const float* shift_ = nullptr;  ///< the shift that made_ includes
};

/// A norm of rows. It packs its output too if the next op reads packed rows.
class LoweredNorm : public LoweredOp {
 protected:
  LoweredNorm(BufferId input, BufferId output, const OpPlace& place)
      : context_(place.context),
        input_(place.context.rows_of(input)),
        output_(place.context.rows_of(output)),
        packed_output_(place.packed_output) {}

  /// Calls norm(begin, end, thread) for the rows of a step. Packs each block of rows right after its norm,
  /// while it is in the caches.
  template <class Norm>
  void norm_rows(const Step& step, const Norm& norm) const {
    const PackedRows packed = packed_output_.for_rows(step.rows);
    if (!packed.has_value()) {
      context_.threads.parallel_for(step.rows, rows_per_chunk(output_.width), norm);
      return;
    }
    const auto body = [&](std::int64_t first, std::int64_t last, int thread) {
      for (std::int64_t block = first; block < last; ++block) {
        const std::int64_t begin = block * PackedSteps::kBlockRows;
        const std::int64_t end = std::min(begin + PackedSteps::kBlockRows, step.rows);
        norm(begin, end, thread);
        context_.kernels.pack_rows({output_.row(begin), output_.row_bytes(), output_.row_bytes()},
                                   end - begin, packed.from(begin).data, packed.step_bytes);
      }
    };
    context_.threads.parallel_for(PackedSteps::blocks_of(step.rows),
                                  rows_per_chunk(output_.width * PackedSteps::kBlockRows), body);
  }

  const CpuContext& context_;  // NOLINT(*-non-private-member-variables-in-classes)
  Rows input_;                 // NOLINT(*-non-private-member-variables-in-classes)
  Rows output_;                // NOLINT(*-non-private-member-variables-in-classes)

 private:
  PackedPlace packed_output_;
};

class LoweredRmsNorm final : public LoweredNorm {
 public:
  LoweredRmsNorm(const RmsNormOp& op, const OpPlace& place)
      : LoweredNorm(op.input, op.output, place), op_(op) {}

  void run(Step& step) override {
    norm_rows(step, [&](std::int64_t begin, std::int64_t end, int thread) {
      float* normed = context_.scratch(thread);
      for (std::int64_t r = begin; r < end; ++r) {
        const std::int64_t from = op_.gather_logit_rows ? step.output_rows[static_cast<std::size_t>(r)] : r;
        std::byte* out = op_.add ? reinterpret_cast<std::byte*>(normed) : output_.row(r);
        norm_groups(input_.float_row(from), out);
        if (op_.add) add_to_sum(normed, output_.float_row(r));
      }
    });
  }

 private:
  void norm_groups(const float* x, std::byte* out) const {
    const std::int64_t group = op_.weight.size;
    for (std::int64_t first = 0; first < input_.width; first += group) {
      context_.kernels.rms_norm(x + first, op_.weight.data, op_.epsilon, group,
                                out + static_cast<std::size_t>(first) * size_of(output_.dtype),
                                output_.dtype);
    }
  }

  void add_to_sum(const float* normed, float* sum) const {
    context_.kernels.add(normed, input_.width, sum);
    if (op_.sum_scale.size == 0) return;
    context_.kernels.scale_and_store(sum, op_.sum_scale.data[0], input_.width,
                                     reinterpret_cast<std::byte*>(sum), DType::kFloat32);
  }

  const RmsNormOp& op_;
};

class LoweredLayerNorm final : public LoweredNorm {
 public:
  LoweredLayerNorm(const LayerNormOp& op, const OpPlace& place)
      : LoweredNorm(op.input, op.output, place), op_(op) {}

  void run(Step& step) override {
    norm_rows(step, [&](std::int64_t begin, std::int64_t end, int thread) {
      NormBiases biases(op_, step, context_.scratch(thread));
      for (std::int64_t r = begin; r < end; ++r) {
        const std::int64_t from = op_.gather_logit_rows ? step.output_rows[static_cast<std::size_t>(r)] : r;
        context_.kernels.layer_norm(input_.float_row(from), op_.weight.data, biases.of(r), op_.epsilon,
                                    input_.width, output_.row(r), output_.dtype);
      }
    });
  }

 private:
  const LayerNormOp& op_;
};

class LoweredCast final : public LoweredOp {
 public:
  LoweredCast(const CastOp& op, const OpPlace& place)
      : context_(place.context),
        input_(place.context.rows_of(op.input)),
        output_(place.context.rows_of(op.output)) {}

  void run(Step& step) override {
    const auto body = [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t r = begin; r < end; ++r) {
        context_.kernels.scale_and_store(input_.float_row(r), 1.0F, input_.width, output_.row(r),
                                         output_.dtype);
      }
    };
    context_.threads.parallel_for(step.rows, rows_per_chunk(input_.width), body);
  }

 private:
  const CpuContext& context_;
  Rows input_;
  Rows output_;
};

class LoweredGatedAdd final : public LoweredOp {
 public:
  LoweredGatedAdd(const GatedAddOp& op, const OpPlace& place)
      : context_(place.context),
        input_(place.context.rows_of(op.input)),
        gate_(place.context.rows_of(op.gate)),
        output_(place.context.rows_of(op.output)) {}

  void run(Step& step) override {
    const auto body = [&](std::int64_t begin, std::int64_t end, int thread) {
      float* gated = context_.scratch(thread);
      for (std::int64_t row = begin; row < end; ++row) {
        const float factor = 1.0F / (1.0F + std::exp(-*gate_.float_row(row)));
        context_.kernels.scale_and_store(input_.float_row(row), factor, input_.width,
                                         reinterpret_cast<std::byte*>(gated), DType::kFloat32);
        context_.kernels.add(gated, input_.width, output_.float_row(row));
      }
    };
    context_.threads.parallel_for(step.rows, rows_per_chunk(input_.width), body);
  }

 private:
  const CpuContext& context_;
  Rows input_;
  Rows gate_;
  Rows output_;
};

class LoweredSigmoidGate final : public LoweredOp {
 public:
  LoweredSigmoidGate(const SigmoidGateOp& op, const OpPlace& place)
      : context_(place.context),
        gate_(place.context.rows_of(op.gate)),
        output_(place.context.rows_of(op.output)) {}

  void run(Step& step) override {
    const auto body = [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t row = begin; row < end; ++row) {
        const float* gate = gate_.float_row(row) + gate_.width - output_.width;
        context_.kernels.multiply_by_sigmoid(gate, output_.width, output_.row(row), output_.dtype);
      }
    };
    context_.threads.parallel_for(step.rows, rows_per_chunk(output_.width), body);
  }

 private:
  const CpuContext& context_;
  Rows gate_;
  Rows output_;
};

class LoweredGatedColumns final : public LoweredOp {
 public:
  LoweredGatedColumns(const GatedColumnsOp& op, const OpPlace& place)
      : context_(place.context),
        gate_(place.context.rows_of(op.gate)),
        values_(place.context.rows_of(op.values)),
        output_(place.context.rows_of(op.output)),
        first_column_(op.first_column),
        activate_(activation_for(op.activation, place.context.kernels)) {}

  void run(Step& step) override {
    const auto body = [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t row = begin; row < end; ++row) {
        activate_({.x = gate_.float_row(row),
                   .linear = values_.float_row(row) + first_column_,
                   .rows = 1,
                   .width = gate_.width,
                   .out = output_.row(row),
                   .out_type = output_.dtype});
      }
    };
    context_.threads.parallel_for(step.rows, rows_per_chunk(gate_.width), body);
  }

 private:
  const CpuContext& context_;
  Rows gate_;
  Rows values_;
  Rows output_;
  std::int64_t first_column_;
  void (*activate_)(const ActivatedTile& tile);
};

class LoweredXielu final : public LoweredOp {
 public:
  LoweredXielu(const XieluOp& op, const OpPlace& place)
      : context_(place.context),
        input_(place.context.rows_of(op.input)),
        output_(place.context.rows_of(op.output)) {
    const XieluCoefficients found = coefficients_of(op);
    parameters_ = {
        .positive = found.positive, .negative = found.negative, .linear = found.linear, .bound = found.bound};
  }

  void run(Step& step) override {
    const auto body = [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t row = begin; row < end; ++row) {
        context_.kernels.xielu(parameters_, input_.float_row(row), input_.width, output_.row(row),
                               output_.dtype);
      }
    };
    context_.threads.parallel_for(step.rows, rows_per_chunk(input_.width), body);
  }

 private:
  const CpuContext& context_;
  Rows input_;
  Rows output_;
  XieluParameters parameters_;
};

class LoweredGatedRmsNorm final : public LoweredOp {
 public:
  LoweredGatedRmsNorm(const GatedRmsNormOp& op, const OpPlace& place)
      : op_(op),
        context_(place.context),
        input_(place.context.rows_of(op.input)),
        gate_(place.context.rows_of(op.gate)),
        output_(place.context.rows_of(op.output)) {
    if (op.group_ranks > 1) squares_.emplace(place.context, op.group_ranks, 1);
  }

  void run(Step& step) override {
    if (squares_) {
      run_over_ranks(step.rows);
      return;
    }
    const auto body = [&](std::int64_t begin, std::int64_t end, int thread) {
      float* scratch = context_.scratch(thread);
      auto* between = reinterpret_cast<std::byte*>(scratch);
      for (std::int64_t row = begin; row < end; ++row) {
        if (op_.gate_first) {
          gate(row, input_.float_row(row), between, DType::kFloat32);
          norm(scratch, output_.row(row), output_.dtype);
        } else {
          norm(input_.float_row(row), between, DType::kFloat32);
          gate(row, scratch, output_.row(row), output_.dtype);
        }
      }
    };
    context_.threads.parallel_for(step.rows, rows_per_chunk(input_.width), body);
  }

 private:
  /// Rows are shares of a group. The gate is applied twice, because the rows are not kept during the
  /// exchange.
  void run_over_ranks(std::int64_t rows) {
    const std::int64_t rows_at_once = rows_per_chunk(input_.width);
    context_.threads.parallel_for(rows, rows_at_once, [&](std::int64_t begin, std::int64_t end, int thread) {
      for (std::int64_t row = begin; row < end; ++row) {
        *squares_->own(row, rows) = sum_of_squares(before_norm(row, thread), input_.width);
      }
    });
    squares_->exchange(rows);
    const auto group = static_cast<float>(input_.width * op_.group_ranks);
    context_.threads.parallel_for(rows, rows_at_once, [&](std::int64_t begin, std::int64_t end, int thread) {
      for (std::int64_t row = begin; row < end; ++row) {
        const float factor = 1.0F / std::sqrt(squares_->total(row, rows) / group + op_.epsilon);
        const float* x = before_norm(row, thread);
        float* normed = context_.scratch(thread);
        for (std::int64_t i = 0; i < input_.width; ++i) normed[i] = x[i] * factor * op_.weight.data[i];
        if (op_.gate_first) {
          convert_elements(output_.row(row), output_.dtype, reinterpret_cast<const std::byte*>(normed),
                           DType::kFloat32, static_cast<std::size_t>(input_.width));
        } else {
          gate(row, normed, output_.row(row), output_.dtype);
        }
      }
    });
  }

  /// Returns the input of a row's norm, which may be in the thread's scratch.
  [[nodiscard]] const float* before_norm(std::int64_t row, int thread) const {
    if (!op_.gate_first) return input_.float_row(row);
    float* scratch = context_.scratch(thread);
    gate(row, input_.float_row(row), reinterpret_cast<std::byte*>(scratch), DType::kFloat32);
    return scratch;
  }

  /// Stores the norms of all groups of a row.
  void norm(const float* x, std::byte* out, DType type) const {
    const std::int64_t group = op_.weight.size / op_.num_groups;
    for (std::int64_t first = 0; first < input_.width; first += group) {
      context_.kernels.rms_norm(x + first, op_.weight.data + first % op_.weight.size, op_.epsilon, group,
                                out + static_cast<std::size_t>(first) * size_of(type), type);
    }
  }

  /// Stores x times the silu of a row's gate.
  void gate(std::int64_t row, const float* x, std::byte* out, DType type) const {
    context_.kernels.silu({.x = gate_.float_row(row) + gate_.width - input_.width,
                           .linear = x,
                           .rows = 1,
                           .width = input_.width,
                           .out = out,
                           .out_type = type});
  }

  const GatedRmsNormOp& op_;
  const CpuContext& context_;
  Rows input_;
  Rows gate_;
  Rows output_;
  /// For rows that are shares of a group.
  std::optional<SquareSums> squares_;
};

class LoweredJoinColumns final : public LoweredOp {
 public:
  LoweredJoinColumns(const JoinColumnsOp& op, const OpPlace& place)
      : output_(place.context.rows_of(op.output)) {
    for (const BufferId id : op.inputs) inputs_.push_back(place.context.rows_of(id));
  }

  void run(Step& step) override {
    for (std::int64_t row = 0; row < step.rows; ++row) {
      std::byte* to = output_.row(row);
      for (const Rows& input : inputs_) {
        std::memcpy(to, input.row(step.output_rows[static_cast<std::size_t>(row)]),
                    static_cast<std::size_t>(input.row_bytes()));
        to += input.row_bytes();
      }
    }
  }

 private:
  std::vector<Rows> inputs_;
  Rows output_;
};

class LoweredJoinNeighbours final : public LoweredOp {
 public:
  LoweredJoinNeighbours(const JoinNeighboursOp& op, const OpPlace& place)
      : context_(place.context),
        input_(place.context.rows_of(op.input)),
        output_(place.context.rows_of(op.output)),
        count_(op.count) {}

  void run(Step& step) override {
    const auto bytes = static_cast<std::size_t>(input_.row_bytes());
    const auto body = [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t row = begin; row < end; ++row) {
        const auto* bounds =
            step.input.sequence_offsets.data() + step.sequence_of_token[static_cast<std::size_t>(row)];
        const std::int64_t first = row - (row - bounds[0]) % count_;
        const auto found = static_cast<std::size_t>(std::min<std::int64_t>(count_, bounds[1] - first));
        std::memcpy(output_.row(row), input_.row(first), found * bytes);
        std::memset(output_.row(row) + found * bytes, 0,
                    static_cast<std::size_t>(output_.row_bytes()) - found * bytes);
      }
    };
    context_.threads.parallel_for(step.rows, rows_per_chunk(output_.width), body);
  }

 private:
  const CpuContext& context_;
  Rows input_;
  Rows output_;
  std::int64_t count_;
};

class LoweredAddGivenColumns final : public LoweredOp {
 public:
  LoweredAddGivenColumns(const AddGivenColumnsOp& op, const OpPlace& place)
      : op_(op), context_(place.context), output_(place.context.rows_of(op.output)) {}

  void run(Step& step) override {
    const auto rows = step.input.prompt_embedding_rows;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      context_.kernels.add(step.input.prompt_embeddings[i] + op_.first_column, output_.width,
                           output_.float_row(rows[i]));
    }
  }

 private:
  const AddGivenColumnsOp& op_;
  const CpuContext& context_;
  Rows output_;
};

class LoweredRopeTable final : public LoweredOp {
 public:
  LoweredRopeTable(const RopeTableOp& op, const OpPlace& place)
      : op_(op),
        context_(place.context),
        cosine_(place.context.rows_of(op.cosine)),
        sine_(place.context.rows_of(op.sine)) {}

  void run(Step& step) override {
    const std::int64_t half = op_.inverse_frequencies.size;
    const auto positions =
        step.input.rotary_positions.empty() ? step.input.positions : step.input.rotary_positions;
    const auto body = [&](std::int64_t begin, std::int64_t end, int thread) {
      // The scratch of attention has room for a head, so it has room for the head's frequencies.
      Frequencies frequencies(op_, step, context_.scratch(thread));
      GivenRows given(step.input, begin);
      for (std::int64_t t = begin; t < end; ++t) {
        const float* of_token = frequencies.of(static_cast<std::size_t>(t));
        const float* row = op_.columns.empty() ? nullptr : given.of(t);
        const auto own = static_cast<float>(positions[static_cast<std::size_t>(t)]);
        float* cosine = cosine_.float_row(t);
        float* sine = sine_.float_row(t);
        for (std::int64_t i = 0; i < half; ++i) {
          const float position = row == nullptr ? own : position_of(i, row, own);
          const auto angle = static_cast<double>(position * of_token[i]);
          cosine[i] = static_cast<float>(std::cos(angle)) * op_.attention_scaling;
          sine[i] = static_cast<float>(std::sin(angle)) * op_.attention_scaling;
        }
      }
    };
    context_.threads.parallel_for(step.rows, std::max<std::int64_t>(1, 256 / half), body);
  }

 private:
  /// Position of a pair of elements of a given `row`; `own` if the row has none.
  [[nodiscard]] float position_of(std::int64_t pair, const float* row, float own) const {
    const float found = row[op_.columns[static_cast<std::size_t>(pair)]];
    return found < 0.0F ? own : found;
  }

  /// The inverse frequencies of tokens. Tokens must be requested in order.
  class Frequencies {
   public:
    /// `own`: float32 [rotary_dim / 2], memory of one thread.
    Frequencies(const RopeTableOp& op, const Step& step, float* own) : op_(op), step_(step), own_(own) {}

    /// Valid until the next call.
    const float* of(std::size_t token) {
      const auto sequence = static_cast<std::size_t>(step_.sequence_of_token[token]);
      const DeviceAdapter* adapter = step_.input.adapters[sequence];
      if (adapter != nullptr && adapter->rotary_factor != 1) {  // only kStatic
        if (adapter->rotary_factor != divided_by_) divide_frequencies(op_, adapter->rotary_factor, own_);
        divided_by_ = adapter->rotary_factor;
        return own_;
      }
      if (op_.kind == RopeKind::kStatic) return op_.inverse_frequencies.data;
      const std::int64_t length = std::max<std::int64_t>(step_.input.prompt_lengths[sequence],
                                                         std::int64_t{step_.input.positions[token]} + 1);
      if (length <= op_.original_max_position) return op_.inverse_frequencies.data;
      if (op_.kind == RopeKind::kLong) return op_.long_inverse_frequencies.data;
      if (length != dynamic_length_) dynamic_inverse_frequencies(op_, length, own_);
      dynamic_length_ = length;
      return own_;
    }

   private:
    const RopeTableOp& op_;
    const Step& step_;
    float* own_;
    std::int64_t dynamic_length_ = 0;
    std::int32_t divided_by_ = 1;
  };

  const RopeTableOp& op_;
  const CpuContext& context_;
  Rows cosine_;
  Rows sine_;
};

class LoweredKeepLogitRows final : public LoweredOp {
 public:
  LoweredKeepLogitRows(const KeepLogitRowsOp& op, const OpPlace& place) {
    for (const BufferId id : op.buffers) buffers_.push_back(place.context.rows_of(id));
  }

  void run(Step& step) override {
    for (const Rows& rows : buffers_) {
      // Output rows ascend, so a row moves to a place that was read before, or does not move.
      for (std::size_t i = 0; i < step.output_rows.size(); ++i) {
        const auto to = static_cast<std::int64_t>(i);
        const std::int64_t from = step.output_rows[i];
        if (from != to) std::memcpy(rows.row(to), rows.row(from), static_cast<std::size_t>(rows.row_bytes()));
      }
    }
    step.rows = static_cast<std::int64_t>(step.output_rows.size());
    step.output_rows = step.kept_output_rows;
    step.groups = step.groups_of_output_rows;
  }

 private:
  std::vector<Rows> buffers_;
};

}  // namespace

LoweredOpPtr lower(const RmsNormOp& op, const OpPlace& place) {
  return std::make_unique<LoweredRmsNorm>(op, place);
}

LoweredOpPtr lower(const LayerNormOp& op, const OpPlace& place) {
  return std::make_unique<LoweredLayerNorm>(op, place);
}

LoweredOpPtr lower(const CastOp& op, const OpPlace& place) {
  return std::make_unique<LoweredCast>(op, place);
}

LoweredOpPtr lower(const GatedAddOp& op, const OpPlace& place) {
  return std::make_unique<LoweredGatedAdd>(op, place);
}

LoweredOpPtr lower(const SigmoidGateOp& op, const OpPlace& place) {
  return std::make_unique<LoweredSigmoidGate>(op, place);
}

LoweredOpPtr lower(const XieluOp& op, const OpPlace& place) {
  return std::make_unique<LoweredXielu>(op, place);
}

LoweredOpPtr lower(const GatedColumnsOp& op, const OpPlace& place) {
  return std::make_unique<LoweredGatedColumns>(op, place);
}

LoweredOpPtr lower(const GatedRmsNormOp& op, const OpPlace& place) {
  return std::make_unique<LoweredGatedRmsNorm>(op, place);
}

LoweredOpPtr lower(const AddGivenColumnsOp& op, const OpPlace& place) {
  return std::make_unique<LoweredAddGivenColumns>(op, place);
}

LoweredOpPtr lower(const JoinNeighboursOp& op, const OpPlace& place) {
  return std::make_unique<LoweredJoinNeighbours>(op, place);
}

LoweredOpPtr lower(const JoinColumnsOp& op, const OpPlace& place) {
  return std::make_unique<LoweredJoinColumns>(op, place);
}

LoweredOpPtr lower(const RopeTableOp& op, const OpPlace& place) {
  return std::make_unique<LoweredRopeTable>(op, place);
}

LoweredOpPtr lower(const KeepLogitRowsOp& op, const OpPlace& place) {
  return std::make_unique<LoweredKeepLogitRows>(op, place);
}

std::size_t row_op_scratch_floats(const Program& program) {
  std::int64_t floats = 0;
  const auto width_of = [&](BufferId id) { return program.buffers[static_cast<std::size_t>(id)].width; };
  for (const auto* ops : program.sections()) {
    for (const Op& op : *ops) {
      if (const auto* embedding = std::get_if<EmbeddingOp>(&op)) {
        floats = std::max({floats, embedding->positions.k, embedding->types.k});
      } else if (const auto* norm = std::get_if<RmsNormOp>(&op); norm != nullptr && norm->add) {
        floats = std::max(floats, width_of(norm->input));
      } else if (const auto* layer_norm = std::get_if<LayerNormOp>(&op); layer_norm != nullptr) {
        floats = std::max(floats, layer_norm->bias.size);
      } else if (const auto* gated = std::get_if<GatedAddOp>(&op)) {
        floats = std::max(floats, width_of(gated->input));
      } else if (const auto* gated_norm = std::get_if<GatedRmsNormOp>(&op)) {
        floats = std::max(floats, width_of(gated_norm->input));
      }
    }
  }
  return static_cast<std::size_t>(floats);
}

}  // namespace adaptrt
