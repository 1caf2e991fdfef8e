#include "ops/sparse_input.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

#include "ops/adapter_product.h"
#include "ops/base_product.h"
#include "ops/few_rows.h"
#include "ops/linear_output.h"
#include "ops/sparse_linear.h"
#include "ranks/overlapped_sum.h"
#include "weights/streamed_mlp.h"

namespace adaptrt {
namespace {

/// Of the inputs of a layer, those that may be live for others to be left out: what is read here and there
/// comes more slowly than whole panels in a row. Of groups that lie side by side in a panel, and of columns,
/// which are half of such groups of bfloat16.
constexpr double kMostLiveGroups = 0.75;
constexpr double kMostLiveColumns = 0.5;

bool are_few(std::size_t live, double most, std::int64_t all) {
  return static_cast<double>(live) <= most * static_cast<double>(all);
}

/// Numbers of a row's words that are anything but zeros, of either sign, in some row; in LinearScratch.
/// `signs` are the bits of a word that are none of a number's size. Of the last word a row may have half.
template <class Word>
std::span<const std::int32_t> find_live_words(const LinearWork& work, const Step& step, Word signs) {
  constexpr auto kBytes = static_cast<std::int64_t>(sizeof(Word));
  const std::int64_t row_bytes = work.input.row_bytes();
  const std::int64_t words = (row_bytes + kBytes - 1) / kBytes;
  std::vector<std::int32_t>& live = step.linear_scratch.live;
  live.resize(std::max(live.size(), static_cast<std::size_t>(words)));
  std::int32_t* found = live.data();
  std::size_t count = 0;
  with_rows(work.num_rows(), [&](auto rows) {
    const std::byte* x = work.input.row(0);
    const auto keep = [&](std::int64_t word, auto bytes) {
      Word all = 0;
      for (std::int64_t row = 0; row < rows(); ++row) {
        Word bits = 0;
        std::memcpy(&bits, x + row * row_bytes + word * kBytes, bytes());
        all = static_cast<Word>(all | bits);
      }
      keep_if((all & static_cast<Word>(~signs)) != 0, static_cast<std::int32_t>(word), found, count);
    };
    const std::int64_t whole = row_bytes / kBytes;
    constexpr std::integral_constant<std::size_t, sizeof(Word)> kWhole;
    for (std::int64_t word = 0; word < whole; ++word) keep(word, kWhole);
    if (whole < words) keep(whole, std::integral_constant<std::size_t, sizeof(Word) / 2>());
  });
  return {found, count};
}

/// Inputs that are live.
std::span<const std::int32_t> find_live_inputs(const LinearWork& work, const Step& step) {
  if (work.input.dtype == DType::kBFloat16) return find_live_words<std::uint16_t>(work, step, 0x8000U);
  return find_live_words<std::uint32_t>(work, step, 0x80000000U);
}

/// Groups of inputs that a panel has side by side, four bytes of a row each, of which some are live.
std::span<const std::int32_t> find_live_groups(const LinearWork& work, const Step& step) {
  const bool is_of_two = work.input.dtype == DType::kBFloat16;
  return find_live_words<std::uint32_t>(work, step, is_of_two ? 0x80008000U : 0x80000000U);
}

bool has_columns(const LinearWork& work) {
  return work.parts[0].weight.has_columns || work.neurons != nullptr || work.mlp != nullptr;
}

const std::byte* column_of(const LinearWork& work, std::int32_t input) {
  if (work.mlp != nullptr) return work.mlp->column(input);
  if (work.neurons != nullptr) return work.neurons->column(input);
  return work.parts[0].weight.column(input);
}

/// The layer, of its live columns: panels of outputs one after the other.
class ColumnLayer {
 public:
  ColumnLayer(const LinearWork& work, const LiveColumns& live, const Step& step)
      : work_(work),
        live_(live),
        step_(step),
        base_(work, step),
        adapters_(work, step),
        output_(work, step, adapters_, 0, false) {}

  void run() const {
    if (!adapters_.is_empty()) {
      base_.prepare(true);
      adapters_.shrink();
    }
    const std::int64_t panels = panel_count(work_.parts[0].weight.n);
    const auto body = [&](std::int64_t begin, std::int64_t end, int thread) {
      for (std::int64_t panel = begin; panel < end; panel += kPanelsAtOnce) {
        multiply(panel, std::min(panel + kPanelsAtOnce, end), thread);
      }
      if (thread == 0 && step_.overlapped_sum.is_under_way()) step_.overlapped_sum.go_on();
    };
    step_.threads.parallel_for(panels, panels_of_piece(panels), body);
  }

 private:
  static constexpr std::int64_t kPanelsAtOnce = kMostColumnOutputs / kPanelColumns;
  static_assert(kMostSparseRows * kPanelsAtOnce <= static_cast<std::int64_t>(kPartsInTurn) * kBlockRows);

  /// Pieces as long as can be, for the sake of runs in memory, and as many for each thread.
  [[nodiscard]] std::int64_t panels_of_piece(std::int64_t panels) const {
    const std::int64_t threads = step_.threads.num_threads();
    const std::int64_t least = (panels + kPanelsAtOnce - 1) / kPanelsAtOnce;
    const std::int64_t pieces = (least + threads - 1) / threads * threads;
    return (panels + pieces - 1) / pieces;
  }

  void multiply(std::int64_t begin, std::int64_t end, int thread) const {
    const RowRange rows{0, work_.num_rows()};
    float* sums = step_.scratch[static_cast<std::size_t>(thread)].data();
    const auto type = static_cast<std::size_t>(work_.parts[0].weight.dtype);
    step_.kernels.column_gemm[type]({.a = work_.input.row(0),
                                     .a_stride = work_.input.width,
                                     .k = work_.input.width,
                                     .live = live_,
                                     .first = begin * kPanelColumns,
                                     .width = (end - begin) * kPanelColumns,
                                     .out = sums,
                                     .rows = rows.count()});
    for (std::int64_t panel = begin; panel < end; ++panel, sums += rows.count() * kPanelColumns) {
      output_.finish({.place = {0, panel}, .first_part = 0, .rows = rows, .sums = sums, .linear = nullptr});
    }
  }

  const LinearWork& work_;
  const LiveColumns& live_;
  const Step& step_;
  BaseProduct base_;
  AdapterProduct adapters_;
  LinearOutput output_;
};

/// Whether the live columns are so few that they were multiplied, or no others in memory.
bool run_columns(const LinearWork& work, const Step& step) {
  const std::span<const std::int32_t> inputs = find_live_inputs(work, step);
  if (work.mlp == nullptr && !are_few(inputs.size(), kMostLiveColumns, work.input.width)) return false;
  std::vector<const std::byte*>& columns = step.linear_scratch.columns;
  columns.resize(std::max(columns.size(), static_cast<std::size_t>(work.input.width)));
  for (std::size_t i = 0; i < inputs.size(); ++i) columns[i] = column_of(work, inputs[i]);
  step.linear_scratch.inputs_read = std::ssize(inputs);
  ColumnLayer(work, {inputs.data(), columns.data(), std::ssize(inputs)}, step).run();
  return true;
}

/// The same of live lines of panels, where no columns are.
void find_live_lines(LinearWork* work, const Step& step) {
  const std::span<const std::int32_t> groups = find_live_groups(*work, step);
  const std::int64_t inputs_of_group = work->input.dtype == DType::kBFloat16 ? 2 : 1;
  const std::int64_t all = (work->input.width + inputs_of_group - 1) / inputs_of_group;
  if (!are_few(groups.size(), kMostLiveGroups, all)) return;
  step.linear_scratch.inputs_read = std::min(std::ssize(groups) * inputs_of_group, work->input.width);
  work->live = LiveInputs{groups.data(), std::ssize(groups)};
}

}  // namespace

void run_sparse_input(LinearWork* work, const Step& step) {
  if (work->num_rows() <= most_sparse_rows(step.kernels, work->parts[0].weight.dtype)) {
    if (!has_columns(*work)) {
      find_live_lines(work, step);
    } else if (run_columns(*work, step)) {
      return;
    }
  }
  run_linear(*work, step);
}

}  // namespace adaptrt
