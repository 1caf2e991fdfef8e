#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "adaptrt/engine/engine.h"

namespace adaptrt {

/// Rows of an activation, one after another.
struct Rows {
  std::byte* data = nullptr;
  DType dtype = DType::kFloat32;
  std::int64_t width = 0;

  [[nodiscard]] std::int64_t row_bytes() const { return width * static_cast<std::int64_t>(size_of(dtype)); }
  [[nodiscard]] std::byte* row(std::int64_t index) const { return data + index * row_bytes(); }
  [[nodiscard]] float* float_row(std::int64_t index) const { return reinterpret_cast<float*>(row(index)); }
};

/// Consecutive rows of a step that share an adapter.
struct AdapterGroup {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  const DeviceAdapter* adapter = nullptr;
};

/// One step of a section; argument of its ops.
struct Step {
  /// The section's input. In the encoder section, a sequence is an encoder input.
  const StepInput& input;
  std::span<const std::int32_t> sequence_of_token;  // [T]
  /// [S]: a sequence's first block in CpuContext::step_local_kv; its other blocks follow.
  std::span<const std::int32_t> first_local_blocks;
  /// Groups of rows with an adapter, in order. Empty in a step without adapters.
  std::span<const AdapterGroup> groups;
  /// The same for the step's output rows; after KeepLogitRowsOp, these are the only rows.
  std::span<const AdapterGroup> groups_of_output_rows = {};
  /// Number of rows of the section: the step's tokens, or a slice of its output rows.
  std::int64_t rows = 0;
  /// Rows whose logits or hidden states are requested. In the body: all rows of the step; in the head: the
  /// rows of the slice. They index buffers of RowKind::kTokens.
  std::span<const std::int32_t> output_rows = {};
  /// 0, 1, ...: the output rows after KeepLogitRowsOp.
  std::span<const std::int32_t> kept_output_rows = {};

  [[nodiscard]] std::int64_t num_tokens() const { return static_cast<std::int64_t>(input.token_ids.size()); }
  [[nodiscard]] std::int64_t num_sequences() const {
    return static_cast<std::int64_t>(input.prompt_lengths.size());
  }
};

}  // namespace adaptrt
