
#include <algorithm>
#include <cstring>
#include <functional>

#include "lowered_op.h"
#include "ops/experts/expert_memory.h"
#include "ops/experts/expert_rows.h"
#include "ops/linear/linear_layer.h"
#include "ranks/overlapped_sum.h"
#include "weights/placed_weights.h"

namespace adaptrt {
namespace {

/// An ExpertsOp with everything resolved.
struct ExpertsLayer {
  ExpertsLayer(const ExpertsOp& experts, const OpPlace& place)
      : op(experts),
        context(place.context),
        slots(place.context.weights == nullptr ? nullptr : place.context.weights->experts_of(experts)),
        input(place.context.rows_of(experts.input)),
        output(place.context.rows_of(experts.output)),
        gate_up(spec_of(op.activation, slots == nullptr ? std::span(op.gate_up) : slots->gate_up(),
                        op.gate_up_site),
                context),
        down(spec_of(LinearEpilogue::kStore, slots == nullptr ? std::span(op.down) : slots->down(),
                     op.down_site),
             context),
        packs_inputs(reads_packed_rows(op.gate_up)),
        packs_activated(reads_packed_rows(op.down)),
        all_reduce(place.all_reduce) {}

  [[nodiscard]] LinearSpec spec_of(LinearEpilogue epilogue, std::span<const LinearPart> parts,
                                   std::int32_t first_site) const {
    return {.epilogue = epilogue,
            .parts = parts,
            .parts_per_group = parts.size() / static_cast<std::size_t>(op.num_experts_here()),
            .site = first_site < 0 ? nullptr : &context.program.lora_site(first_site)};
  }

  /// True if the rows of a layer are packed when they are computed, because no other op reads them.
  [[nodiscard]] bool reads_packed_rows(std::span<const LinearPart> parts) const {
    return context.memory.has_packed() && reads_only_packed_rows(parts.front().weight.quantization);
  }

  const ExpertsOp& op;
  const CpuContext& context;
  ExpertSlots* slots;  ///< nullptr: all experts are in memory
  Rows input;
  Rows output;
  LinearLayer gate_up;
  LinearLayer down;
  bool packs_inputs;
  bool packs_activated;
  std::optional<FusedAllReduce> all_reduce;
};

/// An ExpertsOp in one step, over the tokens [first, first + count) at a time.
class ExpertsRun {
 public:
  ExpertsRun(const ExpertsLayer& layer, const Step& step)
      : layer_(layer),
        op_(layer.op),
        context_(layer.context),
        step_(step),
        memory_(layer.context.memory.experts),
        slots_(layer.slots),
        top_k_(op_.routing.top_k),
        input_(layer.input),
        output_(layer.output),
        sum_(layer.all_reduce ? layer.context.overlapped_sum.begin(*layer.all_reduce, step.rows) : nullptr) {}

  void run() const {
    memory_.taken.rows.assign(static_cast<std::size_t>(op_.num_experts_here()), 0);
    memory_.taken.adapted.clear();
    const std::int64_t slice = tokens_of_slice(context_.program, op_);
    for (std::int64_t first = 0; first < step_.rows; first += slice) {
      run_slice(first, std::min(slice, step_.rows - first));
    }
  }

 private:
  void run_slice(std::int64_t first, std::int64_t count) const {
    take_experts(op_, context_, step_, first, count);
    if (memory_.experts_taken.empty()) {  // all experts of the slice are on other ranks
      const Rows nothing{memory_.outputs(), DType::kFloat32, output_.width};
      add_up(first, count, nothing, {0, panel_count(output_.width)});
      return;
    }
    const std::span<const RowGroup> all = memory_.experts_taken;
    if (!threads_pack()) gather(first);
    if (slots_ != nullptr && all.size() > slots_->most()) {
      run_in_turns(first, count);
      return;
    }
    if (slots_ != nullptr) slots_->bring(all);
    layer_.gate_up.run(gate_up(first, all));
    if (const std::int64_t panels = panels_of_thread(count); panels > 0) {
      const Rows sums{memory_.outputs(), DType::kFloat32, panels * kPanelColumns};
      LinearCall call = down(sums, all);
      const auto begin = static_cast<std::size_t>(all.front().rows.begin);
      call.scattered = {std::span(memory_.token_of).subspan(begin),
                        std::span(memory_.weight_of).subspan(begin), count};
      const auto finish = [&](const ThreadPanels& made) { put_sums(first, count, made); };
      layer_.down.run_by_columns(call, panels, std::ref(finish));
      return;
    }
    const std::int64_t panels = panels_at_once(count);
    const Rows outputs{memory_.outputs(), DType::kFloat32, std::min(panels * kPanelColumns, output_.width)};
    const auto finish = [&](PanelRange chunk) { add_up(first, count, outputs, chunk); };
    // By reference: a std::function allocates for a callable of this size.
    layer_.down.run_in_chunks(down(outputs, all), panels, std::ref(finish));
  }

  /// Processes as many experts at a time as fit in memory. Outputs are added up at the end, in the same order
  /// as without a limit.
  void run_in_turns(std::int64_t first, std::int64_t count) const {
    const std::span<const RowGroup> all = memory_.experts_taken;
    const Rows outputs{memory_.outputs(), DType::kFloat32, output_.width};
    for (std::size_t done = 0; done < all.size(); done += slots_->most()) {
      const auto turn = all.subspan(done, std::min(slots_->most(), all.size() - done));
      slots_->bring(turn);
      layer_.gate_up.run(gate_up(first, turn));
      layer_.down.run(down(outputs, turn));
    }
    add_up(first, count, outputs, {0, panel_count(output_.width)});
  }

  [[nodiscard]] Rows inputs() const { return {memory_.inputs(), input_.dtype, input_.width}; }
  [[nodiscard]] Rows activated() const {
    return {memory_.activated(), input_.dtype, op_.down.front().weight.k};
  }
  /// The same rows in packed form; no value if they are not packed.
  [[nodiscard]] PackedRows packed(bool is_packed, std::byte* rows) const {
    if (!is_packed) return {};
    return {rows, packed_step_bytes(memory_.experts_taken.back().rows.end)};
  }
  [[nodiscard]] PackedRows packed_inputs() const { return packed(layer_.packs_inputs, memory_.inputs()); }
  [[nodiscard]] PackedRows packed_activated() const {
    return packed(layer_.packs_activated, memory_.activated());
  }

  /// True if each thread packs the inputs of the experts that it multiplies. With many threads, several would
  /// pack the same rows; with few rows per expert, most of a block would be padding; and adapters' products
  /// need all rows packed.
  [[nodiscard]] bool threads_pack() const {
    constexpr std::int64_t kExpertsPerThread = 4;
    const std::int64_t experts = std::ssize(memory_.experts_taken);
    return packed_inputs().has_value() && memory_.adapters.empty() &&
           experts >= kExpertsPerThread * context_.threads.num_threads() &&
           memory_.experts_taken.back().rows.end >= PackedSteps::kBlockRows * experts;
  }

  [[nodiscard]] LinearCall gate_up(std::int64_t first, std::span<const RowGroup> experts) const {
    LinearCall call = call_of(inputs(), activated(), layer_.gate_up.spec(), op_.gate_up_site, experts);
    const auto begin = static_cast<std::size_t>(experts.front().rows.begin);
    if (op_.routing.scales_inputs) call.row_factors = std::span(memory_.factor_of).subspan(begin);
    if (threads_pack()) {
      call.input = {input_.row(first), input_.dtype, input_.width};
      call.chosen = {std::span(memory_.token_of).subspan(begin), memory_.packed_by_thread};
    } else {
      call.packed_input = packed_inputs().from(experts.front().rows.begin);
    }
    call.packed_output = packed_activated().from(experts.front().rows.begin);
    return call;
  }
  [[nodiscard]] LinearCall down(const Rows& outputs, std::span<const RowGroup> experts) const {
    LinearCall call = call_of(activated(), outputs, layer_.down.spec(), op_.down_site, experts);
    call.packed_input = packed_activated().from(experts.front().rows.begin);
    return call;
  }

  /// Number of output panels in a chunk, which is computed and then added up. A chunk fits in a second-level
  /// cache, but has enough panels for all threads. It is also so large that reading the inputs, once per
  /// chunk, is not more than reading the outputs.
  [[nodiscard]] std::int64_t panels_at_once(std::int64_t count) const {
    constexpr std::int64_t kBytes = 1 << 20;
    constexpr std::int64_t kTilesPerThread = 8;
    const std::int64_t rows = count * top_k_;
    const std::int64_t panel_bytes = rows * kPanelColumns * static_cast<std::int64_t>(sizeof(float));
    const std::int64_t bytes = std::max(kBytes, rows * activated().row_bytes());
    const std::int64_t tiles = context_.threads.num_threads() * kTilesPerThread;
    const std::int64_t experts = std::ssize(memory_.experts_taken);
    const std::int64_t most =
        std::max({std::int64_t{1}, bytes / panel_bytes, (tiles + experts - 1) / experts});
    const std::int64_t panels = panel_count(output_.width);
    const std::int64_t chunks = (panels + most - 1) / most;
    return (panels + chunks - 1) / chunks;
  }

  /// Number of panels that a thread computes at once, with the sums of `tokens`. They fill its second-level
  /// cache, or more: reading the inputs, once per chunk, must not be more than reading the sums. 0: there are
  /// too many threads to give each one separate panels.
  [[nodiscard]] std::int64_t panels_of_thread(std::int64_t tokens) const {
    constexpr std::int64_t kBytes = 1 << 19;
    constexpr std::int64_t kEnough = 4;
    constexpr std::int64_t kChunksPerThread = 2;
    const std::int64_t threads = context_.threads.num_threads();
    const std::int64_t panels = panel_count(output_.width);
    if (panels % threads != 0 && panels < kEnough * threads) return 0;
    const std::int64_t panel_bytes = kPanelColumns * static_cast<std::int64_t>(sizeof(float));
    const std::int64_t wanted =
        std::max(kBytes / (tokens * panel_bytes), activated().row_bytes() / (2 * panel_bytes));
    const std::int64_t most = std::max<std::int64_t>(1, panels / (threads * kChunksPerThread));
    return std::clamp<std::int64_t>(wanted, 1, most);
  }

  [[nodiscard]] std::int64_t token_of(std::int64_t row) const {
    return memory_.token_of[static_cast<std::size_t>(row)];
  }

  void gather(std::int64_t first) const {
    if (packed_inputs().has_value()) return gather_packed(first);
    const std::int64_t bytes = input_.row_bytes();
    const auto body = [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t row = begin; row < end; ++row) {
        std::memcpy(memory_.inputs() + row * bytes, input_.row(first + token_of(row)),
                    static_cast<std::size_t>(bytes));
      }
    };
    context_.threads.parallel_for(memory_.experts_taken.back().rows.end, rows_per_chunk(input_.width), body);
  }

  void gather_packed(std::int64_t first) const {
    const std::int64_t rows = memory_.experts_taken.back().rows.end;
    const auto body = [&](std::int64_t begin, std::int64_t end, int) {
      const std::int64_t row = begin * PackedSteps::kBlockRows;
      const std::int64_t count = std::min(end * PackedSteps::kBlockRows, rows) - row;
      const PackedRows out = packed_inputs().from(row);
      context_.kernels.pack_rows(
          {input_.row(first), input_.row_bytes(), input_.row_bytes(), memory_.token_of.data() + row}, count,
          out.data, out.step_bytes);
    };
    context_.threads.parallel_for(PackedSteps::blocks_of(rows),
                                  rows_per_chunk(input_.width * PackedSteps::kBlockRows), body);
  }

  /// The rows of some of experts_taken, which follow one another, for a linear layer of these experts.
  [[nodiscard]] LinearCall call_of(const Rows& input, const Rows& output, const LinearSpec& spec,
                                   std::int32_t first_site, std::span<const RowGroup> experts) const {
    const RowRange rows{experts.front().rows.begin, experts.back().rows.end};
    memory_.groups.clear();
    for (const RowGroup& expert : experts) {
      memory_.groups.push_back({{expert.rows.begin - rows.begin, expert.rows.end - rows.begin},
                                expert.first_part * spec.parts_per_group});
    }
    std::vector<AdaptedRows>& adapted = context_.memory.linear.adapted_rows;
    adapted.clear();
    for (std::size_t i = 0; i < memory_.adapters.size(); ++i) {
      const AdapterGroup& group = memory_.adapters[i];
      if (group.begin < rows.begin || group.begin >= rows.end) continue;
      const auto site = static_cast<std::size_t>(first_site) + memory_.adapter_expert[i];
      const DeviceSite& found = group.adapter->sites[site];
      if (found.total_rank == 0) continue;
      adapted.push_back({group.begin - rows.begin, group.end - rows.begin, &found});
    }
    return {.input = {input.row(rows.begin), input.dtype, input.width},
            .output = {output.row(rows.begin), output.dtype, output.width},
            .groups = memory_.groups,
            .adapted = adapted};
  }

  /// Some of the output's columns, and their address.
  struct Columns {
    std::int64_t first;
    std::int64_t end;
    Rows rows;
    /// Column of `rows` that is the output's column `first`.
    std::int64_t at;
  };

  /// The columns from `first` on, up to `end`, that are neighbours in memory.
  [[nodiscard]] Columns columns_from(std::int64_t first, std::int64_t end) const {
    if (sum_ == nullptr) return {first, end, output_, first};
    const OverlappedSum::Place place = sum_->place_of(first);
    return {first, std::min(end, place.end_column), place.rows, first - place.first_column};
  }

  /// Calls visit(columns, number of the first of them counted from the first column of `panels`).
  template <class Visit>
  void for_each_columns(PanelRange panels, const Visit& visit) const {
    const std::int64_t begin = panels.begin * kPanelColumns;
    const std::int64_t end = std::min(panels.end * kPanelColumns, output_.width);
    for (std::int64_t column = begin; column < end;) {
      const Columns columns = columns_from(column, end);
      visit(columns, column - begin);
      column = columns.end;
    }
  }

  /// Adds the sums that a thread computed for each token to the output, or stores them there.
  void put_sums(std::int64_t first, std::int64_t count, const ThreadPanels& made) const {
    for_each_columns(made.panels, [&](const Columns& columns, std::int64_t at) {
      const std::int64_t width = columns.end - columns.first;
      for (std::int64_t token = 0; token < count; ++token) {
        const float* sums = made.output.float_row(token) + at;
        float* out = columns.rows.float_row(first + token) + columns.at;
        if (memory_.here[static_cast<std::size_t>(token)].is_empty()) {
          std::fill_n(out, width, 0.0F);
        } else if (op_.stores) {
          std::copy_n(sums, width, out);
        } else {
          context_.kernels.add(sums, width, out);
        }
      }
      if (sum_ != nullptr) sum_->add_made(columns.first, count * width);
    });
    if (sum_ != nullptr && made.thread == 0) sum_->go_on();
  }

  /// Adds the weighted sum of each token's rows to the output's columns of `chunk`, or stores it there.
  void add_up(std::int64_t first, std::int64_t count, const Rows& rows, PanelRange chunk) const {
    const auto body = [&](std::int64_t begin, std::int64_t end, int) {
      for_each_columns(chunk, [&](const Columns& columns, std::int64_t at) {
        const Rows made{rows.data + at * static_cast<std::int64_t>(sizeof(float)), rows.dtype, rows.width};
        add_up_columns(first, {begin, end}, made, columns);
      });
    };
    const std::int64_t width = (chunk.end - chunk.begin) * kPanelColumns;
    context_.threads.parallel_for(count, rows_per_chunk(width * top_k_), body);
    if (sum_ != nullptr) sum_->go_on();
  }

  void add_up_columns(std::int64_t first, RowRange tokens, const Rows& rows, const Columns& columns) const {
    const std::int64_t width = columns.end - columns.first;
    for (std::int64_t token = tokens.begin; token < tokens.end; ++token) {
      if (token + 1 < tokens.end) fetch_outputs(token + 1, rows, width);
      const RowRange here = memory_.here[static_cast<std::size_t>(token)];
      float* out = columns.rows.float_row(first + token) + columns.at;
      if (here.is_empty()) {  // only if ranks have different experts; their sums are added up later
        std::fill_n(out, width, 0.0F);
        continue;
      }
      const auto at = static_cast<std::size_t>(token * top_k_ + here.begin);
      context_.kernels.add_up_rows({.rows = rows.float_row(0),
                                    .stride = rows.width,
                                    .row_of = memory_.row_of.data() + at,
                                    .weights = memory_.weights.data() + at,
                                    .count = here.end - here.begin,
                                    .width = width,
                                    .out = out,
                                    .accumulate = !op_.stores});
    }
    if (sum_ != nullptr) sum_->add_made(columns.first, tokens.count() * width);
  }

  /// Prefetches the rows to add up for a token; other cores wrote them, in different places.
  void fetch_outputs(std::int64_t token, const Rows& rows, std::int64_t width) const {
    constexpr std::int64_t kCacheLine = 64;
    const RowRange here = memory_.here[static_cast<std::size_t>(token)];
    for (std::int64_t i = here.begin; i < here.end; ++i) {
      const float* row = rows.float_row(memory_.row_of[static_cast<std::size_t>(token * top_k_ + i)]);
      for (std::int64_t column = 0; column < width; column += kCacheLine / 4) {
        __builtin_prefetch(row + column, 0, 3);
      }
    }
  }

  const ExpertsLayer& layer_;
  const ExpertsOp& op_;
  const CpuContext& context_;
  const Step& step_;
  ExpertMemory& memory_;
  ExpertSlots* slots_;  ///< nullptr: all experts are in memory
  std::int64_t top_k_;
  const Rows& input_;
  const Rows& output_;
  OverlappedSum* sum_;  ///< sum over ranks that overlaps with the op; nullptr: none
};

class LoweredExperts final : public LoweredOp {
 public:
  LoweredExperts(const ExpertsOp& op, const OpPlace& place) : layer_(op, place) {}

  void run(Step& step) override { ExpertsRun(layer_, step).run(); }

 private:
  ExpertsLayer layer_;
};

}  // namespace

LoweredOpPtr lower(const ExpertsOp& op, const OpPlace& place) {
  return std::make_unique<LoweredExperts>(op, place);
}

}  // namespace adaptrt
