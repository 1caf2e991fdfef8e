// Ops that treat each row by itself: norm, gated sum, rotary angles, the choice of rows.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>

#include "step.h"

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

/// Those of a sequence whose adapter divides positions (AdapterTerms::rotary_factor): the linear scaling of
/// Hugging Face's modeling_rope_utils.py.
void divide_frequencies(const RopeTableOp& op, std::int32_t factor, float* frequencies) {
  const auto divisor = static_cast<float>(factor);
  for (std::int64_t i = 0; i < op.inverse_frequencies.size; ++i) {
    frequencies[i] = op.inverse_frequencies.data[i] / divisor;
  }
}

/// The biases of a norm's rows, which are asked for in order: its own, and with what adapters add to it.
class NormBiases {
 public:
  /// `made`: float32 [width], of one thread.
  NormBiases(const LayerNormOp& op, const Step& step, float* made)
      : op_(op),
        group_(step.groups.begin()),
        end_(op.lora_site < 0 ? group_ : step.groups.end()),
        made_(made) {}

  /// [width], or nullptr where there is none; good until the next call.
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
  const float* shift_ = nullptr;  ///< what is in made_
};

/// Calls norm(begin, end, thread) for rows of an op, and packs what it made of them where the next op wants
/// that: a block at a time, while it is in the caches.
template <class Norm>
void norm_rows(BufferId output, const Step& step, const Norm& norm) {
  const Rows rows = step.rows_of(output);
  if (!step.packed_output.is_there()) {
    step.threads.parallel_for(step.rows, rows_per_chunk(rows.width), norm);
    return;
  }
  const auto body = [&](std::int64_t first, std::int64_t last, int thread) {
    for (std::int64_t block = first; block < last; ++block) {
      const std::int64_t begin = block * PackedSteps::kBlockRows;
      const std::int64_t end = std::min(begin + PackedSteps::kBlockRows, step.rows);
      norm(begin, end, thread);
      const PackedRows packed = step.packed_output.from(begin);
      step.kernels.pack_rows({rows.row(begin), rows.row_bytes(), rows.row_bytes()}, end - begin, packed.data,
                             packed.step_bytes);
    }
  };
  step.threads.parallel_for(PackedSteps::blocks_of(step.rows),
                            rows_per_chunk(rows.width * PackedSteps::kBlockRows), body);
}

}  // namespace

void run_op(const RmsNormOp& op, const Step& step) {
  const std::int64_t width = step.buffer(op.input).width;
  const DType out_type = step.buffer(op.output).dtype;
  const auto norm = [&](std::int64_t begin, std::int64_t end, int thread) {
    float* normed = step.scratch[static_cast<std::size_t>(thread)].data();
    for (std::int64_t r = begin; r < end; ++r) {
      const std::int64_t from = op.gather_logit_rows ? step.output_rows[static_cast<std::size_t>(r)] : r;
      std::byte* out = op.add ? reinterpret_cast<std::byte*>(normed) : step.row(op.output, r);
      step.kernels.rms_norm(step.float_row(op.input, from), op.weight.data, op.epsilon, width, out, out_type);
      if (op.add) step.kernels.add(normed, width, step.float_row(op.output, r));
    }
  };
  norm_rows(op.output, step, norm);
}

void run_op(const LayerNormOp& op, const Step& step) {
  const std::int64_t width = step.buffer(op.input).width;
  const DType out_type = step.buffer(op.output).dtype;
  const auto norm = [&](std::int64_t begin, std::int64_t end, int thread) {
    NormBiases biases(op, step, step.scratch[static_cast<std::size_t>(thread)].data());
    for (std::int64_t r = begin; r < end; ++r) {
      const std::int64_t from = op.gather_logit_rows ? step.output_rows[static_cast<std::size_t>(r)] : r;
      step.kernels.layer_norm(step.float_row(op.input, from), op.weight.data, biases.of(r), op.epsilon, width,
                              step.row(op.output, r), out_type);
    }
  };
  norm_rows(op.output, step, norm);
}

void run_op(const CastOp& op, const Step& step) {
  const std::int64_t width = step.buffer(op.input).width;
  const DType out_type = step.buffer(op.output).dtype;
  const auto body = [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t r = begin; r < end; ++r) {
      step.kernels.scale_and_store(step.float_row(op.input, r), 1.0F, width, step.row(op.output, r),
                                   out_type);
    }
  };
  step.threads.parallel_for(step.rows, rows_per_chunk(width), body);
}

void run_op(const GatedAddOp& op, const Step& step) {
  const Rows input = step.rows_of(op.input);
  const Rows gate = step.rows_of(op.gate);
  const Rows output = step.rows_of(op.output);
  const auto body = [&](std::int64_t begin, std::int64_t end, int thread) {
    float* gated = step.scratch[static_cast<std::size_t>(thread)].data();
    for (std::int64_t row = begin; row < end; ++row) {
      const float factor = 1.0F / (1.0F + std::exp(-*gate.float_row(row)));
      step.kernels.scale_and_store(input.float_row(row), factor, input.width,
                                   reinterpret_cast<std::byte*>(gated), DType::kFloat32);
      step.kernels.add(gated, input.width, output.float_row(row));
    }
  };
  step.threads.parallel_for(step.rows, rows_per_chunk(input.width), body);
}

void run_op(const RopeTableOp& op, const Step& step) {
  const std::int64_t half = op.inverse_frequencies.size;
  const auto body = [&](std::int64_t begin, std::int64_t end, int thread) {
    // Attention's scratch has room for a head, so for its frequencies.
    float* own = step.scratch[static_cast<std::size_t>(thread)].data();
    std::int64_t dynamic_length = 0;
    std::int32_t divided_by = 1;
    for (std::int64_t t = begin; t < end; ++t) {
      const auto token = static_cast<std::size_t>(t);
      const std::int32_t position = step.input.positions[token];
      const auto sequence = static_cast<std::size_t>(step.sequence_of_token[token]);
      const DeviceAdapter* adapter = step.input.adapters[sequence];
      const float* frequencies = op.inverse_frequencies.data;
      if (adapter != nullptr && adapter->rotary_factor != 1) {  // kStatic alone
        if (adapter->rotary_factor != divided_by) divide_frequencies(op, adapter->rotary_factor, own);
        divided_by = adapter->rotary_factor;
        frequencies = own;
      }
      if (op.kind != RopeKind::kStatic) {
        const std::int64_t length =
            std::max<std::int64_t>(step.input.prompt_lengths[sequence], std::int64_t{position} + 1);
        if (length > op.original_max_position && op.kind == RopeKind::kLong) {
          frequencies = op.long_inverse_frequencies.data;
        } else if (length > op.original_max_position) {
          if (length != dynamic_length) dynamic_inverse_frequencies(op, length, own);
          dynamic_length = length;
          frequencies = own;
        }
      }
      float* cosine = step.float_row(op.cosine, t);
      float* sine = step.float_row(op.sine, t);
      for (std::int64_t i = 0; i < half; ++i) {
        const auto angle = static_cast<double>(static_cast<float>(position) * frequencies[i]);
        cosine[i] = static_cast<float>(std::cos(angle)) * op.attention_scaling;
        sine[i] = static_cast<float>(std::sin(angle)) * op.attention_scaling;
      }
    }
  };
  step.threads.parallel_for(step.rows, std::max<std::int64_t>(1, 256 / half), body);
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
      }
    }
  }
  return static_cast<std::size_t>(floats);
}

void run_op(const KeepLogitRowsOp& op, Step& step) {
  for (const BufferId id : op.buffers) {
    const Buffer& buffer = step.buffer(id);
    const std::size_t bytes = static_cast<std::size_t>(buffer.width) * size_of(buffer.dtype);
    // Output rows ascend, so a row moves to one that was read before, or stays.
    for (std::size_t i = 0; i < step.output_rows.size(); ++i) {
      const auto to = static_cast<std::int64_t>(i);
      const std::int64_t from = step.output_rows[i];
      if (from != to) std::memcpy(step.row(id, to), step.row(id, from), bytes);
    }
  }
  step.rows = static_cast<std::int64_t>(step.output_rows.size());
  step.output_rows = step.kept_output_rows;
  step.groups = step.groups_of_output_rows;
}

}  // namespace adaptrt
