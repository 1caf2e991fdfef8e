#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "step.h"

namespace adaptrt {

class StreamedMlp;

struct RowRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  [[nodiscard]] std::int64_t count() const { return end - begin; }
  [[nodiscard]] bool is_empty() const { return begin >= end; }
};

/// Rows that are multiplied by the same weights: parts_per_group of LinearWork::parts from first_part on.
struct RowGroup {
  RowRange rows;
  std::size_t first_part = 0;
};

/// Rows that a thread has packed: of one group.
struct ThreadRows {
  HugeArray memory;
  std::int64_t first_row = -1;  ///< of the layer's rows
};

/// Which rows of an input the rows of a layer of many groups are. Each thread packs those of the groups that
/// it multiplies, so that they stay in its caches: for weights whose kernels read nothing else, without
/// adapters.
struct ChosenRows {
  std::span<const std::int32_t> numbers;  ///< by row of the layer
  std::span<ThreadRows> threads;

  [[nodiscard]] bool is_there() const { return !numbers.empty(); }
};

/// Where the rows of a layer of many groups go, weighted and added up: no two rows of one group to one place.
struct ScatteredOutput {
  std::span<const std::int32_t> row_of;  ///< by row of the layer: which row of the output
  std::span<const float> weights;        ///< by row of the layer
  std::int64_t rows = 0;                 ///< of the output

  [[nodiscard]] bool is_there() const { return rows > 0; }
};

/// Rows that are multiplied as fast without being packed, by weights that are stored so and by adapters.
[[nodiscard]] inline std::int64_t unpacked_rows(const Quantization& how, const KernelTable& kernels) {
  if (how.algo == QuantAlgo::kNone || rounds_activations(how.algo)) return kernels.few_rows;
  return std::min<std::int64_t>(kernels.few_rows, how.is_coded() ? 0 : 1);
}

/// A linear layer in one step, of the model's or of its experts, whose rows go through weights of their own.
/// See LinearOp for what it makes.
struct LinearWork {
  Rows input;
  Rows output;
  /// Where the input is packed already: `input` has its type and width alone.
  PackedRows packed_input = {};
  /// Rows that threads pack for themselves; not there: rows are as they are.
  ChosenRows chosen = {};
  /// Not there: row r of the output is that of row r.
  ScatteredOutput scattered = {};
  /// Of gated and activated layers: where the output is packed, `output` has its type and width alone.
  PackedRows packed_output = {};
  LinearEpilogue epilogue = LinearEpilogue::kStore;
  /// Of all groups; alike in sizes and quantisation from one group to the next.
  std::span<const LinearPart> parts;
  std::size_t parts_per_group = 1;
  /// Which of the parts of adapters' sites the first of a group is.
  std::size_t first_site_part = 0;
  float scale = 1.0F;
  float softcap = 0.0F;
  /// See LinearOp.
  float threshold = 0.0F;
  /// See LinearOp; without data where there are none.
  Rows scores = {};
  float least_score = 0.0F;
  bool has_sparse_input = false;
  /// Of such an input: what is multiplied of panels; nullopt: all.
  std::optional<LiveInputs> live = std::nullopt;
  /// See LinearOp; nullptr where there are none, or none in memory.
  const NeuronTable* neurons = nullptr;
  /// Of a gated layer, and of one that reads no more of its weights than neurons that were brought: where
  /// they are; nullptr: the weights are where the parts refer to.
  StreamedMlp* mlp = nullptr;
  /// One after another, without gaps, from row 0 on.
  std::span<const RowGroup> groups;
  /// In order; each within one group.
  std::span<const AdaptedRows> adapted;
  /// Of them, or another one of the same layer's experts; nullptr where there are none.
  const LoraSite* site = nullptr;
  /// Step::shrink has their x A^T: that of a layer whose parts run one after another.
  bool is_shrunk = false;
  /// Sites of adapters are slices of the vocabulary, of the one part that there is: lm_head's.
  bool is_sliced = false;
  /// Of lm_head: the rows whose adapters bring tokens beyond the vocabulary, which are columns behind the
  /// part's.
  std::span<const AdaptedRows> new_tokens = {};
  /// Where the output goes, which the ranks add up meanwhile; nullptr: to `output`.
  OverlappedSum* sum = nullptr;

  [[nodiscard]] std::int64_t num_rows() const { return groups.back().rows.end; }
  [[nodiscard]] bool has_scores() const { return scores.data != nullptr; }
  /// The packed input: what was there, or what BaseProduct::prepare makes. Not there for rows that kernels
  /// read as they are.
  [[nodiscard]] PackedRows packed(const Step& step) const {
    if (packed_input.is_there()) return packed_input;
    return num_rows() <= unpacked_rows(quantization(), step.kernels) ? PackedRows{}
                                                                     : step.packed_for(num_rows());
  }
  [[nodiscard]] const Quantization& quantization() const { return parts[0].weight.quantization; }
};

/// What run_linear notes down, kept from step to step so that steps allocate nothing.
struct LinearScratch {
  std::vector<RowGroup> blocks;
  std::vector<std::int64_t> task_ends;
  /// Of a low-rank exchange: where the rows of each of LinearWork::adapted begin.
  std::vector<std::int64_t> packed_begins;
  /// Of a layer whose weights are reordered, by part: which of ReorderedInput's orders it reads.
  std::vector<std::uint8_t> order_of_part;
  /// Of sparse layers: the outputs or groups of inputs that are live, and both factors of a gated layer.
  std::vector<std::int32_t> live;
  /// Where the columns of live inputs begin.
  std::vector<const std::byte*> columns;
  std::vector<float> gates;
  std::vector<float> factors;
  /// Of layers of ReLU gates: how many steps of few rows will read them whole.
  std::map<const LinearOp*, std::int32_t> whole_steps;
  /// Of the layer that ran: how many outputs of its gate and of its last part, and inputs, were read;
  /// nullopt: all.
  std::optional<std::int64_t> gates_read = std::nullopt;
  std::optional<std::int64_t> outputs_read = std::nullopt;
  std::optional<std::int64_t> inputs_read = std::nullopt;
};

void run_linear(const LinearWork& work, const Step& step);

/// Panels [begin, end) of a layer's outputs.
struct PanelRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

/// Makes a layer of one part a group `panels_at_once` panels at a time, and calls finish(panels) after each
/// of these chunks: work.output has the columns of one chunk, in rows as wide as they are, and is read before
/// the next is made, so that it stays in the caches.
void run_linear_in_chunks(const LinearWork& work, std::int64_t panels_at_once, const Step& step,
                          const std::function<void(PanelRange)>& finish);

/// What a thread has made of a layer.
struct ThreadPanels {
  PanelRange panels;
  Rows output;  ///< the columns of these panels
  int thread = 0;
};

/// Makes a layer of one part a group whose output is scattered: each thread makes panels of its own, so many
/// at once, for one group after the other, to memory of its own. That of the first is work.output, rows as
/// wide as these panels; those of the others follow. finish() is called in the thread that made them.
void run_linear_by_columns(const LinearWork& work, std::int64_t panels_at_once, const Step& step,
                           const std::function<void(const ThreadPanels&)>& finish);

}  // namespace adaptrt
