#include "ops/linear/relu_gated.h"

#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include "ops/linear/few_rows.h"

namespace adaptrt {
namespace {

/// Maximum share of open outputs of a gated layer for which the others are skipped. Each open output is moved
/// in registers to its column of a panel.
constexpr double kMostOpen = 0.4;

/// One part of a gated layer as a layer of its own, without activation.
LinearSpec spec_of_part(const LinearSpec& whole, std::size_t part) {
  LinearSpec spec = whole;
  spec.epilogue = LinearEpilogue::kStore;
  spec.parts = whole.parts.subspan(part, 1);
  spec.parts_per_group = 1;
  spec.first_site_part = part;
  return spec;
}

}  // namespace

/// One call: computes the gates, the second part if there is one, and the activation.
class ReluGatedRun {
 public:
  ReluGatedRun(const ReluGatedLayer& layer, const LinearCall& call)
      : layer_(layer),
        spec_(layer.whole_.spec()),
        call_(call),
        context_(layer.whole_.context()),
        scratch_(context_.memory.linear),
        mlp_(layer.mlp_),
        rows_(call.num_rows()),
        width_(spec_.parts[0].weight.n) {}

  /// True if some outputs are skipped.
  [[nodiscard]] bool run() const {
    scratch_.gates.resize(std::max(scratch_.gates.size(), size()));
    make_gates();
    if (spec_.parts.size() == 1) {
      activate_all(nullptr, nullptr);
      return scratch_.gates_read.has_value();
    }
    const std::span<const std::int32_t> open = find_open();
    if (is_worth_gathering(open)) {
      if (mlp_ != nullptr) bring(open);
      scratch_.outputs_read = std::ssize(open);
      scratch_.factors.assign(size(), 0.0F);
      make_outputs(1, open, scratch_.factors.data());
      const VectorView& bias = spec_.parts[1].bias;
      activate_all(scratch_.factors.data(), bias.size == 0 ? nullptr : bias.data);
      return true;
    }
    if (mlp_ != nullptr) mlp_->hold_gated();
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

  /// The gates are finished, so their memory can be used to prefetch the next data.
  void bring(std::span<const std::int32_t> neurons) const {
    mlp_->release();
    mlp_->bring(neurons);
  }

  /// Computes the gates with adapters and biases. Skips gates that scores close, if there are scores.
  void make_gates() const {
    float* gates = scratch_.gates.data();
    if (!spec_.has_scores) return make_part(0, gates);
    const std::span<const std::int32_t> expected = find_expected();
    if (spec_.parts[0].weight.has_rows && is_worth_gathering(expected)) {
      scratch_.gates_read = std::ssize(expected);
      make_expected_gates(expected);
    } else {
      make_part(0, gates);
    }
    for (std::int64_t row = 0; row < rows_; ++row) {
      context_.kernels.close_gates(call_.scores.float_row(row), spec_.least_score, width_,
                                   gates + row * width_);
    }
  }

  void make_expected_gates(std::span<const std::int32_t> expected) const {
    layer_.whole_.prepare(call_);
    float* gates = scratch_.gates.data();
    std::fill_n(gates, size(), 0.0F);
    make_outputs(0, expected, gates);
    const VectorView& bias = spec_.parts[0].bias;
    if (bias.size == 0) return;
    for (std::int64_t row = 0; row < rows_; ++row) {
      context_.kernels.add(bias.data, width_, gates + row * width_);
    }
  }

  /// Computes out [rows, width]: one of the two parts for all outputs, with its adapters and bias. Both parts
  /// use the same x A^T of the adapters.
  void make_part(std::size_t part, float* out) const {
    LinearCall call = call_;
    call.output = {reinterpret_cast<std::byte*>(out), DType::kFloat32, width_};
    call.is_shrunk = part > 0;
    (part == 0 ? layer_.gate_ : *layer_.linear_).run(call);
  }

  /// Outputs whose gate is open or NaN in at least one row.
  [[nodiscard]] std::span<const std::int32_t> find_open() const {
    const float threshold = spec_.threshold;
    return find_outputs(scratch_.gates.data(), [=](float gate) { return !(gate <= threshold); });
  }

  /// Outputs whose gate is not closed by the scores of at least one row.
  [[nodiscard]] std::span<const std::int32_t> find_expected() const {
    const float least = spec_.least_score;
    return find_outputs(call_.scores.float_row(0), [=](float score) { return !(score < least); });
  }

  /// Outputs for which is_wanted(value) is true in at least one row of values [rows, width]. Valid until the
  /// next call.
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

  /// Addresses of rows of a part; the last one is repeated at the end.
  [[nodiscard]] Pointers point_at(std::size_t part, std::span<const std::int32_t> outputs) const {
    Pointers pointers;
    for (std::size_t i = 0; i < pointers.size(); ++i) {
      pointers[i] = row_of(part, outputs[std::min(i, outputs.size() - 1)]);
    }
    return pointers;
  }

  [[nodiscard]] const std::byte* row_of(std::size_t part, std::int32_t output) const {
    if (mlp_ != nullptr) return mlp_->record(output);
    if (layer_.neurons_ != nullptr) return layer_.neurons_->record(output);
    return spec_.parts[part].weight.row(output);
  }

  /// Number of outputs to gather at once, so that all threads have equal shares. It is limited, because the
  /// hardware prefetcher follows only a few rows that are read at the same time.
  [[nodiscard]] std::int64_t outputs_at_once(std::int64_t outputs) const {
    constexpr std::int64_t kVector = 16;
    constexpr std::int64_t kMostAtOnce = 32;
    static_assert(kMostAtOnce <= kPanelColumns);
    const std::int64_t threads = context_.threads.num_threads();
    const std::int64_t pieces = ((outputs + kMostAtOnce - 1) / kMostAtOnce + threads - 1) / threads * threads;
    const std::int64_t share = (outputs + pieces - 1) / pieces;
    return std::min(kMostAtOnce, (share + kVector - 1) / kVector * kVector);
  }

  /// Computes these outputs of a part in out [rows, width], where the others are zero already. Then adds the
  /// adapters' terms to all outputs.
  void make_outputs(std::size_t part, std::span<const std::int32_t> outputs, float* out) const {
    gather(part, outputs, out);
    if (!call_.adapted.empty()) adapt(part, out);
  }

  /// Computes outputs without adapters.
  void gather(std::size_t part, std::span<const std::int32_t> wanted, float* out) const {
    if (wanted.empty()) return;
    const std::int64_t at_once = outputs_at_once(std::ssize(wanted));
    const std::int64_t pieces = (std::ssize(wanted) + at_once - 1) / at_once;
    const auto piece_of = [&](std::int64_t index) {
      const auto first = static_cast<std::size_t>(index * at_once);
      return wanted.subspan(first, std::min(static_cast<std::size_t>(at_once), wanted.size() - first));
    };
    const auto body = [&](std::int64_t begin, std::int64_t end, int thread) {
      float* tile = context_.scratch(thread);
      Pointers pointers = point_at(part, piece_of(begin));
      Pointers next;
      for (std::int64_t index = begin; index < end; ++index) {
        const std::span<const std::int32_t> outputs = piece_of(index);
        const bool more = index + 1 < end;
        if (more) next = point_at(part, piece_of(index + 1));
        layer_.whole_.base().multiply_gathered(
            call_, part, {pointers.data(), std::ssize(outputs), more ? next.data() : nullptr}, thread, tile);
        scatter(tile, outputs, out);
        std::swap(pointers, next);
      }
    };
    constexpr std::int64_t kChunksPerThread = 4;
    const std::int64_t grain = pieces / (context_.threads.num_threads() * kChunksPerThread);
    context_.threads.parallel_for(pieces, std::max<std::int64_t>(1, grain), body);
  }

  void scatter(const float* tile, std::span<const std::int32_t> outputs, float* out) const {
    for (std::int64_t row = 0; row < rows_; ++row, tile += kPanelColumns, out += width_) {
      for (std::size_t i = 0; i < outputs.size(); ++i) out[outputs[i]] = tile[i];
    }
  }

  /// Adds the adapters' terms to a part. Its columns fill whole panels.
  void adapt(std::size_t part, float* out) const {
    const std::int64_t panels = panel_count(width_);
    const auto body = [&](std::int64_t begin, std::int64_t end, int thread) {
      for (std::int64_t panel = begin; panel < end; ++panel) expand({part, panel}, thread, out);
    };
    const std::int64_t grain = std::max<std::int64_t>(1, panels / (context_.threads.num_threads() * 2));
    context_.threads.parallel_for(panels, grain, body);
  }

  void expand(PanelPlace place, int thread, float* out) const {
    float* tile = context_.scratch(thread);
    out += place.panel * kPanelColumns;
    for (std::int64_t row = 0; row < rows_; ++row) {
      std::copy_n(out + row * width_, kPanelColumns, tile + row * kPanelColumns);
    }
    layer_.whole_.adapters().expand(call_, place, {0, rows_}, tile, thread);
    for (std::int64_t row = 0; row < rows_; ++row) {
      std::copy_n(tile + row * kPanelColumns, kPanelColumns, out + row * width_);
    }
  }

  /// Computes the output. `factors` are the factors of the gates, if there are any, and `bias` is the
  /// factors' bias.
  void activate_all(const float* factors, const float* bias) const {
    layer_.whole_.output().activate({.x = scratch_.gates.data(),
                                     .linear = factors,
                                     .stride = width_,
                                     .linear_bias = bias,
                                     .rows = rows_,
                                     .width = width_,
                                     .out = call_.output.data,
                                     .out_stride = call_.output.row_bytes(),
                                     .out_type = call_.output.dtype,
                                     .threshold = spec_.threshold});
  }

  const ReluGatedLayer& layer_;
  const LinearSpec& spec_;
  const LinearCall& call_;
  const CpuContext& context_;
  LinearScratch& scratch_;
  StreamedMlp* mlp_;
  std::int64_t rows_;
  std::int64_t width_;  ///< rounded up to whole panels
};

std::int64_t most_gathered_outputs(std::int64_t width) {
  return static_cast<std::int64_t>(kMostOpen * static_cast<double>(width));
}

std::int64_t most_sparse_rows(const KernelTable& kernels, DType weights) {
  return std::min(kernels.sparse_rows[static_cast<std::size_t>(weights)], kMostSparseRows);
}

ReluGatedLayer::ReluGatedLayer(const LinearLayer& whole, const NeuronTable* neurons, StreamedMlp* mlp)
    : whole_(whole), neurons_(neurons), mlp_(mlp), gate_(spec_of_part(whole.spec(), 0), whole.context()) {
  if (whole.spec().parts.size() > 1) linear_.emplace(spec_of_part(whole.spec(), 1), whole.context());
}

bool ReluGatedLayer::run(const LinearCall& call) const {
  return ReluGatedRun(*this, call).run();
}

}  // namespace adaptrt
