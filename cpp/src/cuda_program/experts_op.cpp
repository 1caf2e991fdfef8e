#include "experts_op.h"

#include <cstdint>

#include "adaptrt/cuda/expert_kernels.h"
#include "adaptrt/cuda/row_kernels.h"

namespace adaptrt {
namespace {

class ExpertLaunches final : public CudaOp {
 public:
  ExpertLaunches(const ExpertsOp& op, const Program& program, const CudaMemory& memory,
                 DeviceWeights& weights)
      : top_k_(op.routing.top_k) {
    const ExpertMemory& shared = memory.experts();
    const auto experts = static_cast<std::int32_t>(op.num_experts());
    const PanelMatrix& down = op.down.front().weight;
    const auto hidden = static_cast<std::int32_t>(down.n);
    const auto inner = static_cast<std::int32_t>(down.k);
    route_ = {.experts = experts,
              .scores = op.routing.scores,
              .top_k = op.routing.top_k,
              .num_groups = op.routing.num_groups,
              .topk_groups = op.routing.topk_groups,
              .rates_groups_by_best = op.routing.rates_groups_by_best,
              .norm_topk_prob = op.routing.norm_topk_prob,
              .scale = op.routing.scale,
              .bias = weights.vector(op.routing.bias),
              .expert_scale = weights.vector(op.routing.expert_scale),
              .logits = reinterpret_cast<const float*>(memory.buffer(op.router_logits)),
              .chosen = shared.chosen,
              .weights = shared.weights};
    number_ = {.experts = experts,
               .chosen = shared.chosen,
               .offsets = shared.offsets,
               .entries = shared.entries,
               .slots_of = shared.slots_of};
    gate_up_ = {.dtype = program.dtype,
                .experts = experts,
                .in_size = hidden,
                .out_size = 2 * inner,
                .offsets = shared.offsets,
                .entries = shared.entries,
                .entries_per_row = op.routing.top_k,
                .x = memory.buffer(op.input),
                .weights = weights.matrices(op.gate_up),
                .bias = weights.biases(op.gate_up),
                .y = shared.gate_up};
    finish_ = {.dtype = program.dtype,
               .width = inner,
               .product = shared.gate_up,
               .epilogue = op.activation,
               .output = shared.activated};
    down_ = {.dtype = program.dtype,
             .experts = experts,
             .in_size = inner,
             .out_size = hidden,
             .offsets = shared.offsets,
             .x = shared.activated,
             .weights = weights.matrices(op.down),
             .bias = weights.biases(op.down),
             .y = shared.down};
    sum_ = {.dtype = program.dtype,
            .top_k = op.routing.top_k,
            .width = hidden,
            .slots_of = shared.slots_of,
            .weights = shared.weights,
            .y = shared.down,
            .adds = !op.stores,
            .output = reinterpret_cast<float*>(memory.buffer(op.output))};
  }

  void enqueue(const CudaRun& run) const override {
    const std::int64_t tokens = run.shape.tokens;
    const std::int64_t slots = tokens * top_k_;
    const auto launch = [&run](auto work, auto size, std::int64_t count) {
      work.*size = count;
      cuda::enqueue(work, run.stream);
    };
    launch(route_, &cuda::RouteTokens::tokens, tokens);
    launch(number_, &cuda::NumberSlots::slots, slots);
    launch(gate_up_, &cuda::ExpertProduct::slots, slots);
    launch(finish_, &cuda::Finish::tokens, slots);
    launch(down_, &cuda::ExpertProduct::slots, slots);
    launch(sum_, &cuda::SumSlots::tokens, tokens);
  }

 private:
  std::int64_t top_k_;
  cuda::RouteTokens route_;
  cuda::NumberSlots number_;
  cuda::ExpertProduct gate_up_;
  cuda::Finish finish_;
  cuda::ExpertProduct down_;
  cuda::SumSlots sum_;
};

}  // namespace

std::unique_ptr<const CudaOp> make_experts(const ExpertsOp& op, const Program& program,
                                           const CudaMemory& memory, DeviceWeights& weights) {
  return std::make_unique<ExpertLaunches>(op, program, memory, weights);
}

}  // namespace adaptrt
