#include "ops/linear/sparse_input.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

#include "ops/linear/few_rows.h"
#include "ops/linear/relu_gated.h"
#include "ranks/overlapped_sum.h"

namespace adaptrt {
namespace {

/// Maximum share of live inputs with which a layer skips the others: scattered reads are slower than reading
/// whole consecutive panels. There is one value for groups of inputs that are neighbours in a panel, and one
/// for columns. In bfloat16 a group has two inputs.
constexpr double kMostLiveGroups = 0.75;
constexpr double kMostLiveColumns = 0.5;

bool are_few(std::size_t live, double most, std::int64_t all) {
  return static_cast<double>(live) <= most * static_cast<double>(all);
}

/// Indices of four-byte words that are not zero (of either sign) in at least one row; stored in
/// LinearScratch. `signs` is the mask of a word's sign bits. A row may have only half of the last word.
template <class Word>
std::span<const std::int32_t> find_live_words(const LinearCall& call, std::vector<std::int32_t>& live,
                                              Word signs) {
  constexpr auto kBytes = static_cast<std::int64_t>(sizeof(Word));
  const std::int64_t row_bytes = call.input.row_bytes();
  const std::int64_t words = (row_bytes + kBytes - 1) / kBytes;
  live.resize(std::max(live.size(), static_cast<std::size_t>(words)));
  std::int32_t* found = live.data();
  std::size_t count = 0;
  with_rows(call.num_rows(), [&](auto rows) {
    const std::byte* x = call.input.row(0);
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

/// Live inputs.
std::span<const std::int32_t> find_live_inputs(const LinearCall& call, std::vector<std::int32_t>& live) {
  if (call.input.dtype == DType::kBFloat16) return find_live_words<std::uint16_t>(call, live, 0x8000U);
  return find_live_words<std::uint32_t>(call, live, 0x80000000U);
}

/// Groups with at least one live input. A group is four bytes of a row, which a panel interleaves.
std::span<const std::int32_t> find_live_groups(const LinearCall& call, std::vector<std::int32_t>& live) {
  const bool is_of_two = call.input.dtype == DType::kBFloat16;
  return find_live_words<std::uint32_t>(call, live, is_of_two ? 0x80008000U : 0x80000000U);
}

/// One call with live columns, one panel of outputs after another.
class ColumnRun {
 public:
  ColumnRun(const LinearLayer& layer, const LinearCall& call, const LiveColumns& live)
      : layer_(layer),
        call_(call),
        live_(live),
        context_(layer.context()),
        target_{.call = call, .first_panel = 0, .streams = false} {}

  void run() const {
    if (!call_.adapted.empty()) layer_.prepare(call_);
    const std::int64_t panels = panel_count(weight().n);
    const auto body = [&](std::int64_t begin, std::int64_t end, int thread) {
      for (std::int64_t panel = begin; panel < end; panel += kPanelsAtOnce) {
        multiply(panel, std::min(panel + kPanelsAtOnce, end), thread);
      }
      if (thread == 0 && context_.overlapped_sum.is_under_way()) context_.overlapped_sum.go_on();
    };
    context_.threads.parallel_for(panels, panels_of_piece(panels), body);
  }

 private:
  static constexpr std::int64_t kPanelsAtOnce = kMostColumnOutputs / kPanelColumns;
  static_assert(kMostSparseRows * kPanelsAtOnce <= static_cast<std::int64_t>(kPartsInTurn) * kBlockRows);

  /// Number of panels in a piece. Pieces are as long as possible, because long runs in memory are read
  /// faster; all threads have the same number of pieces.
  [[nodiscard]] std::int64_t panels_of_piece(std::int64_t panels) const {
    const std::int64_t threads = context_.threads.num_threads();
    const std::int64_t least = (panels + kPanelsAtOnce - 1) / kPanelsAtOnce;
    const std::int64_t pieces = (least + threads - 1) / threads * threads;
    return (panels + pieces - 1) / pieces;
  }

  void multiply(std::int64_t begin, std::int64_t end, int thread) const {
    const RowRange rows{0, call_.num_rows()};
    float* sums = context_.scratch(thread);
    const auto type = static_cast<std::size_t>(weight().dtype);
    context_.kernels.column_gemm[type]({.a = call_.input.row(0),
                                        .a_stride = call_.input.width,
                                        .k = call_.input.width,
                                        .live = live_,
                                        .first = begin * kPanelColumns,
                                        .width = (end - begin) * kPanelColumns,
                                        .out = sums,
                                        .rows = rows.count()});
    for (std::int64_t panel = begin; panel < end; ++panel, sums += rows.count() * kPanelColumns) {
      layer_.output().finish(target_, {.place = {0, panel},
                                       .first_part = 0,
                                       .rows = rows,
                                       .sums = sums,
                                       .linear = nullptr,
                                       .thread = thread});
    }
  }

  [[nodiscard]] const PanelMatrix& weight() const { return layer_.spec().parts[0].weight; }

  const LinearLayer& layer_;
  const LinearCall& call_;
  const LiveColumns& live_;
  const CpuContext& context_;
  LinearTarget target_;
};

}  // namespace

SparseInputLayer::SparseInputLayer(const LinearLayer& whole, const NeuronTable* neurons, StreamedMlp* mlp)
    : whole_(whole),
      neurons_(neurons),
      mlp_(mlp),
      has_columns_(whole.spec().parts[0].weight.has_columns || neurons != nullptr),
      few_rows_(most_sparse_rows(whole.context().kernels, whole.spec().parts[0].weight.dtype)) {}

void SparseInputLayer::run(const LinearCall& call) const {
  if (call.num_rows() > few_rows_) return whole_.run(call);
  LinearScratch& scratch = whole_.context().memory.linear;
  if (has_columns_) {
    const std::span<const std::int32_t> inputs = find_live_inputs(call, scratch.live);
    if (!are_few(inputs.size(), kMostLiveColumns, call.input.width)) return whole_.run(call);
    const PanelMatrix& weight = whole_.spec().parts[0].weight;
    return multiply(call, inputs, [&](std::int32_t input) {
      return neurons_ != nullptr ? neurons_->column(input) : weight.column(input);
    });
  }
  // Without columns, the live lines of panels are read.
  const std::span<const std::int32_t> groups = find_live_groups(call, scratch.live);
  const std::int64_t inputs_of_group = call.input.dtype == DType::kBFloat16 ? 2 : 1;
  const std::int64_t all = (call.input.width + inputs_of_group - 1) / inputs_of_group;
  if (!are_few(groups.size(), kMostLiveGroups, all)) return whole_.run(call);
  scratch.inputs_read = std::min(std::ssize(groups) * inputs_of_group, call.input.width);
  LinearCall live = call;
  live.live = LiveInputs{groups.data(), std::ssize(groups)};
  whole_.run(live);
}

void SparseInputLayer::run_brought(const LinearCall& call) const {
  multiply(call, find_live_inputs(call, whole_.context().memory.linear.live),
           [&](std::int32_t input) { return mlp_->column(input); });
}

template <class ColumnOf>
void SparseInputLayer::multiply(const LinearCall& call, std::span<const std::int32_t> inputs,
                                const ColumnOf& column_of) const {
  LinearScratch& scratch = whole_.context().memory.linear;
  std::vector<const std::byte*>& columns = scratch.columns;
  columns.resize(std::max(columns.size(), static_cast<std::size_t>(call.input.width)));
  for (std::size_t i = 0; i < inputs.size(); ++i) columns[i] = column_of(inputs[i]);
  scratch.inputs_read = std::ssize(inputs);
  ColumnRun(whole_, call, {inputs.data(), columns.data(), std::ssize(inputs)}).run();
}

}  // namespace adaptrt
