#include "ops/sparse_linear.h"

#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include "ops/adapter_product.h"
#include "ops/base_product.h"
#include "ops/few_rows.h"
#include "ops/linear_output.h"
#include "weights/streamed_mlp.h"

namespace adaptrt {
namespace {

/// Of a gated layer's outputs, those that may be open for the others to be left out: each is moved in
/// registers to where its column of a panel is.
constexpr double kMostOpen = 0.4;

std::int64_t sparse_rows(const LinearWork& work, const Step& step) {
  return most_sparse_rows(step.kernels, work.parts[0].weight.dtype);
}

/// Gates, the layer's second part where there is one, and what becomes of both.
class GatedByRelu {
 public:
  GatedByRelu(const LinearWork& work, const Step& step)
      : work_(work),
        step_(step),
        scratch_(step.linear_scratch),
        base_(work, step),
        adapters_(work, step),
        rows_(work.num_rows()),
        width_(work.parts[0].weight.n) {}

  /// Whether something was left out.
  [[nodiscard]] bool run() const {
    scratch_.gates.resize(std::max(scratch_.gates.size(), size()));
    make_gates();
    if (work_.parts.size() == 1) {
      activate_all(nullptr, nullptr);
      return scratch_.gates_read.has_value();
    }
    const std::span<const std::int32_t> open = find_open();
    if (is_worth_gathering(open)) {
      if (work_.mlp != nullptr) bring(open);
      scratch_.outputs_read = std::ssize(open);
      scratch_.factors.assign(size(), 0.0F);
      make_outputs(1, open, scratch_.factors.data());
      const VectorView& bias = work_.parts[1].bias;
      activate_all(scratch_.factors.data(), bias.size == 0 ? nullptr : bias.data);
      return true;
    }
    if (work_.mlp != nullptr) work_.mlp->hold_gated();
    scratch_.factors.resize(std::max(scratch_.factors.size(), size()));
    make_part(1, scratch_.factors.data());
    activate_all(scratch_.factors.data(), nullptr);
    return scratch_.gates_read.has_value();
  }

 private:
  [[nodiscard]] std::size_t size() const { return static_cast<std::size_t>(rows_ * width_); }

  [[nodiscard]] bool is_worth_gathering(std::span<const std::int32_t> outputs) const {
    return std::ssize(outputs) <= most_gathered_outputs(width_);
  }

  /// The gates are made, so that what comes next can be read in their place meanwhile.
  void bring(std::span<const std::int32_t> neurons) const {
    work_.mlp->release();
    work_.mlp->bring(neurons);
  }

  /// With adapters and biases. Where there are scores, the gates that they close may not be read.
  void make_gates() const {
    float* gates = scratch_.gates.data();
    if (!work_.has_scores()) return make_part(0, gates);
    const std::span<const std::int32_t> expected = find_expected();
    if (work_.parts[0].weight.has_rows && is_worth_gathering(expected)) {
      scratch_.gates_read = std::ssize(expected);
      make_expected_gates(expected);
    } else {
      make_part(0, gates);
    }
    for (std::int64_t row = 0; row < rows_; ++row) {
      step_.kernels.close_gates(work_.scores.float_row(row), work_.least_score, width_, gates + row * width_);
    }
  }

  void make_expected_gates(std::span<const std::int32_t> expected) const {
    base_.prepare(adapters_.reads_input());
    if (!adapters_.is_empty()) adapters_.shrink();
    float* gates = scratch_.gates.data();
    std::fill_n(gates, size(), 0.0F);
    make_outputs(0, expected, gates);
    const VectorView& bias = work_.parts[0].bias;
    if (bias.size == 0) return;
    for (std::int64_t row = 0; row < rows_; ++row) {
      step_.kernels.add(bias.data, width_, gates + row * width_);
    }
  }

  /// One of the two parts for all outputs, with its adapters and its bias: out [rows, width]. What adapters
  /// need of the input is made for both parts.
  void make_part(std::size_t part, float* out) const {
    LinearWork work = work_;
    work.output = {reinterpret_cast<std::byte*>(out), DType::kFloat32, width_};
    work.epilogue = LinearEpilogue::kStore;
    work.parts = work_.parts.subspan(part, 1);
    work.parts_per_group = 1;
    work.first_site_part = part;
    work.is_shrunk = part > 0;
    run_linear(work, step_);
  }

  /// Outputs whose gate is open, or not a number, in some row.
  [[nodiscard]] std::span<const std::int32_t> find_open() const {
    const float threshold = work_.threshold;
    return find_outputs(scratch_.gates.data(), [=](float gate) { return !(gate <= threshold); });
  }

  /// Outputs whose gate the scores of some row do not close.
  [[nodiscard]] std::span<const std::int32_t> find_expected() const {
    const float least = work_.least_score;
    return find_outputs(work_.scores.float_row(0), [=](float score) { return !(score < least); });
  }

  /// Outputs of which `is_wanted` says so in some row of values [rows, width]; until the next call.
  template <class IsWanted>
  [[nodiscard]] std::span<const std::int32_t> find_outputs(const float* values,
                                                           const IsWanted& is_wanted) const {
    scratch_.live.resize(std::max(scratch_.live.size(), static_cast<std::size_t>(width_)));
    std::int32_t* found = scratch_.live.data();
    std::size_t count = 0;
    with_rows(rows_, [&, width = width_](auto rows) {
      for (std::int64_t output = 0; output < width; ++output) {
        bool is_kept = false;
        for (std::int64_t row = 0; row < rows(); ++row) is_kept |= is_wanted(values[row * width + output]);
        keep_if(is_kept, static_cast<std::int32_t>(output), found, count);
      }
    });
    return {found, count};
  }

  using Pointers = std::array<const std::byte*, kPanelColumns>;

  /// Where rows of a part begin; the last one again behind them.
  [[nodiscard]] Pointers point_at(std::size_t part, std::span<const std::int32_t> outputs) const {
    Pointers pointers;
    for (std::size_t i = 0; i < pointers.size(); ++i) {
      pointers[i] = row_of(part, outputs[std::min(i, outputs.size() - 1)]);
    }
    return pointers;
  }

  [[nodiscard]] const std::byte* row_of(std::size_t part, std::int32_t output) const {
    if (work_.mlp != nullptr) return work_.mlp->record(output);
    if (work_.neurons != nullptr) return work_.neurons->record(output);
    return work_.parts[part].weight.row(output);
  }

  /// Outputs that are gathered at once, as many as all threads have the same share of: of more rows than
  /// these, which are read side by side, processors do not read on ahead.
  [[nodiscard]] std::int64_t outputs_at_once(std::int64_t outputs) const {
    constexpr std::int64_t kVector = 16;
    constexpr std::int64_t kMostAtOnce = 32;
    static_assert(kMostAtOnce <= kPanelColumns);
    const std::int64_t threads = step_.threads.num_threads();
    const std::int64_t pieces = ((outputs + kMostAtOnce - 1) / kMostAtOnce + threads - 1) / threads * threads;
    const std::int64_t share = (outputs + pieces - 1) / pieces;
    return std::min(kMostAtOnce, (share + kVector - 1) / kVector * kVector);
  }

  /// Puts these outputs of a part into out [rows, width], zeros before, and adds what adapters make of all.
  void make_outputs(std::size_t part, std::span<const std::int32_t> outputs, float* out) const {
    gather(part, outputs, out);
    if (!adapters_.is_empty()) adapt(part, out);
  }

  /// The outputs, of the base alone.
  void gather(std::size_t part, std::span<const std::int32_t> wanted, float* out) const {
    if (wanted.empty()) return;
    const std::int64_t at_once = outputs_at_once(std::ssize(wanted));
    const std::int64_t pieces = (std::ssize(wanted) + at_once - 1) / at_once;
    const auto piece_of = [&](std::int64_t index) {
      const auto first = static_cast<std::size_t>(index * at_once);
      return wanted.subspan(first, std::min(static_cast<std::size_t>(at_once), wanted.size() - first));
    };
    const auto body = [&](std::int64_t begin, std::int64_t end, int thread) {
      float* tile = step_.scratch[static_cast<std::size_t>(thread)].data();
      Pointers pointers = point_at(part, piece_of(begin));
      Pointers next;
      for (std::int64_t index = begin; index < end; ++index) {
        const std::span<const std::int32_t> outputs = piece_of(index);
        const bool more = index + 1 < end;
        if (more) next = point_at(part, piece_of(index + 1));
        base_.multiply_gathered(part, {pointers.data(), std::ssize(outputs), more ? next.data() : nullptr},
                                thread, tile);
        scatter(tile, outputs, out);
        std::swap(pointers, next);
      }
    };
    constexpr std::int64_t kChunksPerThread = 4;
    const std::int64_t grain = pieces / (step_.threads.num_threads() * kChunksPerThread);
    step_.threads.parallel_for(pieces, std::max<std::int64_t>(1, grain), body);
  }

  void scatter(const float* tile, std::span<const std::int32_t> outputs, float* out) const {
    for (std::int64_t row = 0; row < rows_; ++row, tile += kPanelColumns, out += width_) {
      for (std::size_t i = 0; i < outputs.size(); ++i) out[outputs[i]] = tile[i];
    }
  }

  /// What adapters make of a part, whose places are those of whole panels.
  void adapt(std::size_t part, float* out) const {
    const std::int64_t panels = panel_count(width_);
    const auto body = [&](std::int64_t begin, std::int64_t end, int thread) {
      for (std::int64_t panel = begin; panel < end; ++panel) expand({part, panel}, thread, out);
    };
    const std::int64_t grain = std::max<std::int64_t>(1, panels / (step_.threads.num_threads() * 2));
    step_.threads.parallel_for(panels, grain, body);
  }

  void expand(PanelPlace place, int thread, float* out) const {
    float* tile = step_.scratch[static_cast<std::size_t>(thread)].data();
    out += place.panel * kPanelColumns;
    for (std::int64_t row = 0; row < rows_; ++row) {
      std::copy_n(out + row * width_, kPanelColumns, tile + row * kPanelColumns);
    }
    adapters_.expand(place.part, place.panel, {0, rows_}, tile);
    for (std::int64_t row = 0; row < rows_; ++row) {
      std::copy_n(tile + row * kPanelColumns, kPanelColumns, out + row * width_);
    }
  }

  /// The output; `factors` are what gates are multiplied by, if anything, and `bias` is theirs.
  void activate_all(const float* factors, const float* bias) const {
    const ActivatedTile tile{.x = scratch_.gates.data(),
                             .linear = factors,
                             .stride = width_,
                             .linear_bias = bias,
                             .rows = rows_,
                             .width = width_,
                             .out = work_.output.data,
                             .out_stride = work_.output.row_bytes(),
                             .out_type = work_.output.dtype,
                             .threshold = work_.threshold};
    if (work_.epilogue == LinearEpilogue::kRelu) {
      step_.kernels.relu(tile);
    } else if (work_.epilogue == LinearEpilogue::kReluMulRelu) {
      step_.kernels.relu_mul_relu(tile);
    } else {
      step_.kernels.relu_mul(tile);
    }
  }

  const LinearWork& work_;
  const Step& step_;
  LinearScratch& scratch_;
  BaseProduct base_;
  AdapterProduct adapters_;
  std::int64_t rows_;
  std::int64_t width_;  ///< in whole panels
};

}  // namespace

std::int64_t most_gathered_outputs(std::int64_t width) {
  return static_cast<std::int64_t>(kMostOpen * static_cast<double>(width));
}

std::int64_t most_sparse_rows(const KernelTable& kernels, DType weights) {
  return std::min(kernels.sparse_rows[static_cast<std::size_t>(weights)], kMostSparseRows);
}

bool reads_open_gates_alone(const LinearWork& work, const Step& step) {
  const bool has_rows = work.parts.back().weight.has_rows || work.neurons != nullptr;
  return has_relu(work.epilogue) && has_rows && work.num_rows() <= sparse_rows(work, step);
}

bool run_gated_by_relu(const LinearWork& work, const Step& step) {
  return GatedByRelu(work, step).run();
}

}  // namespace adaptrt
