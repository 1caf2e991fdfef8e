#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "adaptrt/cpu/kernel_table.h"
#include "adaptrt/program/program.h"
#include "ops/linear/row_groups.h"
#include "packed_rows.h"
#include "step.h"

namespace adaptrt {

class OverlappedSum;

/// A linear layer of the model or of its experts, as known when the engine is loaded. Each group of its rows
/// may have its own weights. See LinearOp for the computation.
struct LinearSpec {
  LinearEpilogue epilogue = LinearEpilogue::kStore;
  /// The parts of all groups; sizes and quantisation are the same from one group to the next. Only `data` of
  /// the weights changes between calls, where weights are read as they are used.
  std::span<const LinearPart> parts;
  std::size_t parts_per_group = 1;
  /// The first part of a group is this one of the parts of adapters' sites.
  std::size_t first_site_part = 0;
  float scale = 1.0F;
  float softcap = 0.0F;
  float threshold = 0.0F;
  bool has_scores = false;
  float least_score = 0.0F;
  bool has_sparse_input = false;
  /// The layer's adapter site, or that of another of the same layer's experts; nullptr: adapters do not act.
  const LoraSite* site = nullptr;
  /// The sites of adapters are slices of the vocabulary, in the one part that there is: lm_head.
  bool is_sliced = false;

  [[nodiscard]] const Quantization& quantization() const { return parts[0].weight.quantization; }
  [[nodiscard]] std::int64_t inputs() const { return parts[0].weight.k; }
};

/// The rows of the input that the rows of a layer with many groups are. Each thread packs the rows of the
/// groups that it multiplies, so that they stay in its caches. Only for weights whose kernels read nothing
/// but packed rows, and without adapters.
struct ChosenRows {
  std::span<const std::int32_t> numbers;  ///< by row of the layer
  std::span<ThreadRows> threads;

  [[nodiscard]] bool has_value() const { return !numbers.empty(); }
};

/// Where the rows of a layer with many groups are added up, weighted. No two rows of one group go to one
/// place.
struct ScatteredOutput {
  std::span<const std::int32_t> row_of;  ///< by row of the layer: the row of the output
  std::span<const float> weights;        ///< by row of the layer
  std::int64_t rows = 0;                 ///< number of rows of the output

  [[nodiscard]] bool has_value() const { return rows > 0; }
};

/// One panel of one of LinearSpec::parts.
struct PanelPlace {
  std::size_t part;
  std::int64_t panel;
};

/// The rows of one step that go through a linear layer.
struct LinearCall {
  Rows input;
  Rows output;
  /// If the input is packed already, `input` gives only its type and width.
  PackedRows packed_input = {};
  /// No value: row r of the layer is row r of the input.
  ChosenRows chosen = {};
  /// No value: row r of the output is that of row r.
  ScatteredOutput scattered = {};
  /// For activated layers. If the output is packed, `output` gives only its type and width.
  PackedRows packed_output = {};
  /// See LinearOp; for layers with scores.
  Rows scores = {};
  /// For a sparse input: the live inputs to multiply in panels; nullopt: all inputs.
  std::optional<LiveInputs> live = std::nullopt;
  /// One after another, without gaps, from row 0 on.
  std::span<const RowGroup> groups;
  /// In order; each within one group.
  std::span<const AdaptedRows> adapted;
  /// For lm_head: the rows whose adapters bring tokens beyond the vocabulary. Their columns follow the
  /// part's.
  std::span<const AdaptedRows> new_tokens = {};
  /// StepMemory::shrink holds x A^T already: the parts of the layer run one after another.
  bool is_shrunk = false;
  /// Sum over ranks that overlaps with the op; nullptr: the output goes to `output`.
  OverlappedSum* sum = nullptr;

  [[nodiscard]] std::int64_t num_rows() const { return groups.back().rows.end; }
};

/// True if a product with weights in this form reads nothing of its input but packed rows, where the kernels
/// pack rows.
[[nodiscard]] inline bool reads_only_packed_rows(const Quantization& how) {
  return how.algo == QuantAlgo::kNone || how.is_codebook();
}

/// Maximum number of rows that are multiplied as fast without being packed, by weights in this form and by
/// adapters.
[[nodiscard]] inline std::int64_t unpacked_rows(const Quantization& how, const KernelTable& kernels) {
  if (how.algo == QuantAlgo::kNone || rounds_activations(how.algo)) return kernels.few_rows;
  return std::min<std::int64_t>(kernels.few_rows, how.is_codebook() ? 0 : 1);
}

}  // namespace adaptrt
