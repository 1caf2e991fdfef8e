#include <optional>
#include <span>
#include <vector>

#include "lowered_op.h"
#include "ops/linear/linear_layer.h"
#include "ops/linear/relu_gated.h"
#include "ops/linear/sparse_input.h"
#include "ranks/overlapped_sum.h"
#include "weights/placed_weights.h"

namespace adaptrt {
namespace {

/// The rows of a step whose adapter changes site `site`, collected in `rows`.
std::span<const AdaptedRows> find_adapted_rows(std::int32_t site, const Step& step,
                                               std::vector<AdaptedRows>& rows) {
  rows.clear();
  if (site < 0) return {};
  for (const AdapterGroup& group : step.groups) {
    const DeviceSite& found = group.adapter->sites[static_cast<std::size_t>(site)];
    if (found.total_rank > 0) rows.push_back({group.begin, group.end, &found});
  }
  return rows;
}

LinearSpec spec_of(const LinearOp& op, std::span<const LinearPart> parts, const Program& program) {
  const LoraSite* site = op.lora_site < 0 ? nullptr : &program.lora_site(op.lora_site);
  return {.epilogue = op.epilogue,
          .parts = parts,
          .parts_per_group = parts.size(),
          .scale = op.scale,
          .softcap = op.softcap,
          .threshold = op.threshold,
          .has_scores = op.scores != kNoBuffer,
          .least_score = op.least_score,
          .has_sparse_input = op.has_sparse_input,
          .site = site,
          .is_sliced = site != nullptr && site->is_lm_head()};
}

/// A linear layer of a program. Derived classes choose the weights that a call reads.
class LoweredLinear : public LoweredOp {
 public:
  LoweredLinear(const LinearOp& op, std::span<const LinearPart> parts, const OpPlace& place)
      : context_(place.context),
        layer_(spec_of(op, parts, place.context.program), place.context),
        input_(place.context.rows_of(op.input)),
        output_(place.context.rows_of(op.output)),
        scores_(op.scores == kNoBuffer ? Rows{} : place.context.rows_of(op.scores)),
        packed_input_(place.packed_input),
        packed_output_(place.packed_output),
        all_reduce_(place.all_reduce),
        site_(op.lora_site),
        new_tokens_site_(
            op.output == place.context.program.logits ? new_tokens_site(place.context.program.lora) : -1) {}

  void run(Step& step) final {
    LinearScratch& scratch = context_.memory.linear;
    scratch.forget_reads();
    const RowGroup all{{0, step.rows}, 0};
    LinearCall call{.input = input_,
                    .output = output_,
                    .packed_input = packed_input_.for_rows(step.rows),
                    .packed_output = packed_output_.for_rows(step.rows),
                    .scores = scores_,
                    .groups = {&all, 1},
                    .adapted = find_adapted_rows(site_, step, scratch.adapted_rows),
                    .new_tokens = find_adapted_rows(new_tokens_site_, step, scratch.new_token_rows)};
    run(call);
  }

 protected:
  virtual void run(LinearCall& call) = 0;

  [[nodiscard]] const LinearLayer& layer() const { return layer_; }

  /// Begins the sum over ranks that follows, if there is one, and lets the call add its terms.
  void begin_all_reduce(LinearCall& call) const {
    if (all_reduce_) call.sum = context_.overlapped_sum.begin(*all_reduce_, call.num_rows());
  }

 private:
  const CpuContext& context_;
  LinearLayer layer_;
  Rows input_;
  Rows output_;
  Rows scores_;
  PackedPlace packed_input_;
  PackedPlace packed_output_;
  std::optional<FusedAllReduce> all_reduce_;
  std::int32_t site_;
  std::int32_t new_tokens_site_;
};

/// A layer that reads all of its weights.
class WholeLinear final : public LoweredLinear {
 public:
  using LoweredLinear::LoweredLinear;

 private:
  void run(LinearCall& call) override {
    begin_all_reduce(call);
    layer().run(call);
  }
};

/// A layer that reads only the weights of live inputs if there are few rows.
class SparseInputLinear final : public LoweredLinear {
 public:
  SparseInputLinear(const LinearOp& op, const OpPlace& place)
      : LoweredLinear(op, op.parts, place),
        sparse_(layer(), op.neurons.is_empty() ? nullptr : &op.neurons, nullptr) {}

 private:
  void run(LinearCall& call) override {
    begin_all_reduce(call);
    sparse_.run(call);
  }

  SparseInputLayer sparse_;
};

/// A layer with a ReLU that reads only the weights of open outputs if there are few rows, and only those of
/// live inputs if its input is sparse too.
class ReluGatedLinear final : public LoweredLinear {
 public:
  ReluGatedLinear(const LinearOp& op, const OpPlace& place)
      : LoweredLinear(op, op.parts, place),
        gated_(layer(), op.neurons.is_empty() ? nullptr : &op.neurons, nullptr),
        few_rows_(most_sparse_rows(place.context.kernels, op.parts[0].weight.dtype)) {
    if (op.has_sparse_input) sparse_.emplace(layer(), op.neurons.is_empty() ? nullptr : &op.neurons, nullptr);
  }

 private:
  void run(LinearCall& call) override {
    if (call.num_rows() <= few_rows_) {
      if (whole_steps_ == 0) {
        if (!gated_.run(call)) whole_steps_ = kWholeSteps;
        return;
      }
      --whole_steps_;
    }
    begin_all_reduce(call);
    if (sparse_) {
      sparse_->run(call);
    } else {
      layer().run(call);
    }
  }

  ReluGatedLayer gated_;
  std::optional<SparseInputLayer> sparse_;
  std::int64_t few_rows_;
  /// Number of steps of few rows that will read the layer whole.
  std::int32_t whole_steps_ = 0;
};

/// A layer of an MLP that reads a neuron from the file when the neuron's gate opens.
class StreamedLinear : public LoweredLinear {
 protected:
  StreamedLinear(const LinearOp& op, std::span<const LinearPart> parts, const OpPlace& place,
                 StreamedMlp& mlp)
      : LoweredLinear(op, parts, place), mlp_(mlp) {}

  virtual void run_streamed(LinearCall& call) = 0;
  [[nodiscard]] StreamedMlp& mlp() const { return mlp_; }

 private:
  void run(LinearCall& call) final {
    struct Release {
      StreamedMlp& mlp;
      ~Release() { mlp.release(); }
    } const release{mlp_};
    run_streamed(call);
  }

  StreamedMlp& mlp_;
};

class StreamedGated final : public StreamedLinear {
 public:
  StreamedGated(const LinearOp& op, const OpPlace& place, StreamedMlp& mlp)
      : StreamedLinear(op, mlp.gated(), place, mlp), gated_(layer(), nullptr, &mlp) {}

 private:
  void run_streamed(LinearCall& call) override {
    if (mlp().reads_whole()) {
      mlp().hold_gated();
      layer().run(call);
    } else {
      mlp().hold_gate();
      (void)gated_.run(call);
    }
  }

  ReluGatedLayer gated_;
};

class StreamedDown final : public StreamedLinear {
 public:
  StreamedDown(const LinearOp& op, const OpPlace& place, StreamedMlp& mlp)
      : StreamedLinear(op, mlp.down(), place, mlp), sparse_(layer(), nullptr, &mlp) {}

 private:
  void run_streamed(LinearCall& call) override {
    if (mlp().reads_whole()) {
      mlp().hold_down();
      sparse_.run(call);
    } else {
      sparse_.run_brought(call);
    }
  }

  SparseInputLayer sparse_;
};

bool may_leave_outputs_out(const LinearOp& op) {
  return has_relu(op.epilogue) && (op.parts.back().weight.has_rows || !op.neurons.is_empty());
}

}  // namespace

LoweredOpPtr lower(const LinearOp& op, const OpPlace& place) {
  PlacedWeights* weights = place.context.weights;
  if (StreamedMlp* mlp = weights == nullptr ? nullptr : weights->mlp_of(op)) {
    if (is_gated(op.epilogue)) return std::make_unique<StreamedGated>(op, place, *mlp);
    return std::make_unique<StreamedDown>(op, place, *mlp);
  }
  if (may_leave_outputs_out(op)) return std::make_unique<ReluGatedLinear>(op, place);
  if (op.has_sparse_input) return std::make_unique<SparseInputLinear>(op, place);
  return std::make_unique<WholeLinear>(op, op.parts, place);
}

}  // namespace adaptrt
