#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "ops/linear_work.h"
#include "ops/sparse_input.h"
#include "ops/sparse_linear.h"
#include "ranks/overlapped_sum.h"
#include "weights/placed_weights.h"
#include "weights/streamed_mlp.h"

namespace adaptrt {
namespace {

/// Those of the step's rows whose adapter changes site `site`, which are kept in `rows`.
std::span<const AdaptedRows> adapted_rows(std::int32_t site, const Step& step,
                                          std::vector<AdaptedRows>& rows) {
  rows.clear();
  if (site < 0) return {};
  for (const AdapterGroup& group : step.groups) {
    const DeviceSite& found = group.adapter->sites[static_cast<std::size_t>(site)];
    if (found.total_rank > 0) rows.push_back({group.begin, group.end, &found});
  }
  return rows;
}

/// A layer of an MLP whose neurons are read as its gates open.
void run_streamed(LinearWork* work, StreamedMlp* mlp, const Step& step) {
  struct Release {
    StreamedMlp* mlp;
    ~Release() { mlp->release(); }
  } const release{mlp};
  if (is_gated(work->epilogue)) {
    work->parts = mlp->gated();
    if (mlp->reads_whole()) {
      mlp->hold_gated();
      run_linear(*work, step);
    } else {
      work->mlp = mlp;
      mlp->hold_gate();
      run_gated_by_relu(*work, step);
    }
    return;
  }
  work->parts = mlp->down();
  work->neurons = nullptr;
  if (mlp->reads_whole()) {
    mlp->hold_down();
  } else {
    work->mlp = mlp;
  }
  run_sparse_input(work, step);
}

}  // namespace

void run_op(const LinearOp& op, const Step& step) {
  const RowGroup all{{0, step.rows}, 0};
  const std::int32_t new_tokens = op.output == step.program.logits ? new_tokens_site(step.program.lora) : -1;
  LinearWork work{.input = step.rows_of(op.input),
                  .output = step.rows_of(op.output),
                  .packed_input = step.packed_input,
                  .packed_output = step.packed_output,
                  .epilogue = op.epilogue,
                  .parts = op.parts,
                  .parts_per_group = op.parts.size(),
                  .scale = op.scale,
                  .softcap = op.softcap,
                  .threshold = op.threshold,
                  .scores = op.scores == kNoBuffer ? Rows{} : step.rows_of(op.scores),
                  .least_score = op.least_score,
                  .has_sparse_input = op.has_sparse_input,
                  .neurons = op.neurons.is_empty() ? nullptr : &op.neurons,
                  .groups = {&all, 1},
                  .adapted = adapted_rows(op.lora_site, step, step.adapted_rows),
                  .site = op.lora_site < 0 ? nullptr : &step.program.lora_site(op.lora_site),
                  .is_sliced = op.lora_site >= 0 && step.program.lora_site(op.lora_site).is_lm_head(),
                  .new_tokens = adapted_rows(new_tokens, step, step.new_token_rows)};
  step.linear_scratch.gates_read.reset();
  step.linear_scratch.outputs_read.reset();
  step.linear_scratch.inputs_read.reset();
  if (StreamedMlp* mlp = step.weights == nullptr ? nullptr : step.weights->mlp_of(op)) {
    run_streamed(&work, mlp, step);
    return;
  }
  if (reads_open_gates_alone(work, step)) {
    std::int32_t& whole_steps = step.linear_scratch.whole_steps[&op];
    if (whole_steps == 0) {
      if (!run_gated_by_relu(work, step)) whole_steps = kWholeSteps;
      return;
    }
    --whole_steps;
  }
  work.sum = begin_sum_behind(step);
  if (op.has_sparse_input) {
    run_sparse_input(&work, step);
  } else {
    run_linear(work, step);
  }
}

}  // namespace adaptrt
