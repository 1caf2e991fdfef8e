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

/// A linear layer of the model or of its experts: everything that is known when the engine is loaded. Each
/// group of rows may have its own weights. See LinearOp for the computation.
struct LinearSpec {
  LinearEpilogue epilogue = LinearEpilogue::kStore;
  /// The parts of all groups. All groups have the same sizes and quantisation. Only `data` of the weights may
  /// change between calls, if weights are loaded when they are used.
  std::span<const LinearPart> parts;
  std::size_t parts_per_group = 1;
  /// Index of a group's first part among the parts of the adapter site.
  std::size_t first_site_part = 0;
  float scale = 1.0F;
  float softcap = 0.0F;
  float threshold = 0.0F;
  bool has_scores = false;
  float least_score = 0.0F;
  bool has_sparse_input = false;
  /// The layer's adapter site, or the site of another expert of the same layer. nullptr: adapters do not
  /// apply.
  const LoraSite* site = nullptr;
  /// True for lm_head: it has one part, whose adapter sites are slices of the vocabulary.
  bool is_sliced = false;

  [[nodiscard]] const Quantization& quantization() const { return parts[0].weight.quantization; }
  [[nodiscard]] std::int64_t inputs() const { return parts[0].weight.k; }
};

/// Choice of input rows for a layer with many groups. Each thread packs the rows of the groups that it
/// multiplies, so that they stay in its caches. Only without adapters, and for weights whose kernels read
/// only packed rows.
struct ChosenRows {
  std::span<const std::int32_t> numbers;  ///< by row of the layer
  std::span<ThreadRows> threads;

  [[nodiscard]] bool has_value() const { return !numbers.empty(); }
};

/// Output rows to which the weighted rows of a layer with many groups are added. Rows of one group go to
/// different output rows.
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

/// One run of a linear layer: the rows of a step that it computes.
struct LinearCall {
  Rows input;
  Rows output;
  /// If the input is packed already, only the type and width of `input` are valid.
  PackedRows packed_input = {};
  /// No value: row r of the layer reads row r of the input.
  ChosenRows chosen = {};
  /// No value: row r of the layer goes to row r of the output.
  ScatteredOutput scattered = {};
  /// For activated layers. If the output is packed, only the type and width of `output` are valid.
  PackedRows packed_output = {};
  /// For layers with scores, see LinearOp.
  Rows scores = {};
  /// Factors of the rows' products, before biases; empty: 1.
  std::span<const float> row_factors = {};
  /// For a sparse input: the live inputs to multiply in panels; nullopt: all inputs.
  std::optional<LiveInputs> live = std::nullopt;
  /// Groups in order, without gaps, from row 0 on.
  std::span<const RowGroup> groups;
  /// Adapted rows in order; each entry lies within one group.
  std::span<const AdaptedRows> adapted;
  /// For lm_head: the rows whose adapters add tokens beyond the vocabulary. Their columns follow those of the
  /// part.
  std::span<const AdaptedRows> new_tokens = {};
  /// True if StepMemory::shrink has x A^T already, because the parts of the layer run one after another.
  bool is_shrunk = false;
  /// Sum over ranks that overlaps with the op; nullptr: the output goes to `output`.
  OverlappedSum* sum = nullptr;

  [[nodiscard]] std::int64_t num_rows() const { return groups.back().rows.end; }
};

/// True if products with such weights read only packed rows of the input, if the kernels pack rows at all.
[[nodiscard]] inline bool reads_only_packed_rows(const Quantization& how) {
  return how.algo == QuantAlgo::kNone || how.is_codebook();
}

/// Maximum number of rows that products with such weights and with adapters read unpacked, because packing
/// would not make them faster.
[[nodiscard]] inline std::int64_t unpacked_rows(const Quantization& how, const KernelTable& kernels) {
  if (how.algo == QuantAlgo::kNone || rounds_activations(how.algo)) return kernels.few_rows;
  return std::min<std::int64_t>(kernels.few_rows, how.is_codebook() ? 0 : 1);
}

}  // namespace adaptrt
