// Ops that treat each row by itself: embedding, norm, rotary angles, the choice of rows.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "step.h"

namespace adaptrt {
namespace {

/// Elements of a row op that are worth a chunk.
constexpr std::int64_t kElementsPerChunk = 8192;

std::int64_t rows_per_chunk(std::int64_t width) {
  return std::max<std::int64_t>(1, kElementsPerChunk / width);
}

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

}  // namespace

void run_op(const EmbeddingOp& op, const Step& step) {
  const auto body = [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t t = begin; t < end; ++t) {
      unpack_panel_row(op.table, step.input.token_ids[static_cast<std::size_t>(t)],
                       step.float_row(op.output, t));
    }
  };
  step.threads.parallel_for(step.rows, rows_per_chunk(op.table.k), body);
}

void run_op(const RmsNormOp& op, const Step& step) {
  const std::int64_t width = step.buffer(op.input).width;
  const DType out_type = step.buffer(op.output).dtype;
  const auto body = [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t r = begin; r < end; ++r) {
      const std::int64_t from = op.gather_logit_rows ? step.logit_rows[static_cast<std::size_t>(r)] : r;
      step.kernels.rms_norm(step.float_row(op.input, from), op.weight.data, op.epsilon, width,
                            step.row(op.output, r), out_type);
    }
  };
  step.threads.parallel_for(step.rows, rows_per_chunk(width), body);
}

void run_op(const RopeTableOp& op, const Step& step) {
  const std::int64_t half = op.inverse_frequencies.size;
  const auto body = [&](std::int64_t begin, std::int64_t end, int thread) {
    // Attention's scratch has room for a head, so for its frequencies.
    float* dynamic = step.scratch[static_cast<std::size_t>(thread)].data();
    std::int64_t dynamic_length = 0;
    for (std::int64_t t = begin; t < end; ++t) {
      const auto token = static_cast<std::size_t>(t);
      const std::int32_t position = step.input.positions[token];
      const float* frequencies = op.inverse_frequencies.data;
      if (op.kind == RopeKind::kDynamic) {
        const auto sequence = static_cast<std::size_t>(step.sequence_of_token[token]);
        const std::int64_t length =
            std::max<std::int64_t>(step.input.prompt_lengths[sequence], std::int64_t{position} + 1);
        if (length > op.original_max_position) {
          if (length != dynamic_length) dynamic_inverse_frequencies(op, length, dynamic);
          dynamic_length = length;
          frequencies = dynamic;
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

void run_op(const KeepLogitRowsOp& op, Step& step) {
  for (const BufferId id : op.buffers) {
    const Buffer& buffer = step.buffer(id);
    const std::size_t bytes = static_cast<std::size_t>(buffer.width) * size_of(buffer.dtype);
    // Logit rows ascend, so a row moves to one that was read before, or stays.
    for (std::size_t i = 0; i < step.logit_rows.size(); ++i) {
      const auto to = static_cast<std::int64_t>(i);
      const std::int64_t from = step.logit_rows[i];
      if (from != to) std::memcpy(step.row(id, to), step.row(id, from), bytes);
    }
  }
  step.rows = static_cast<std::int64_t>(step.logit_rows.size());
  step.logit_rows = step.kept_logit_rows;
  step.groups = step.groups_of_logit_rows;
}

}  // namespace adaptrt
