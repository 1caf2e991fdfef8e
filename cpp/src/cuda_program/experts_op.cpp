#include "experts_op.h"

#include <cstdint>
#include <optional>
#include <span>

#include "adaptrt/cuda/expert_kernels.h"
#include "adaptrt/cuda/row_kernels.h"
#include "kernel_configs.h"
#include "slot_adapters.h"

namespace adaptrt {
namespace {

class ExpertLaunches final : public CudaOp {
 public:
  ExpertLaunches(const ExpertsOp& op, const Program& program, const CudaMemory& memory,
                 DeviceWeights& weights)
      : top_k_(op.routing.top_k), scales_inputs_(op.routing.scales_inputs) {
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
               .slots_of = shared.slots_of,
               .expert_of = shared.expert_of};
    gate_up_ = {.dtype = program.dtype,
                .experts = experts,
                .in_size = hidden,
                .out_size = 2 * inner,
                .offsets = shared.offsets,
                .entries = shared.entries,
                .entries_per_row = op.routing.top_k,
                .x = memory.buffer(op.input),
                .y = shared.gate_up};
    set_weights(&gate_up_, op.gate_up, weights);
    finish_ = {.dtype = program.dtype,
               .width = inner,
               .product = shared.gate_up,
               .bias = weights.biases(op.gate_up),
               .bias_rows = shared.expert_of,
               .epilogue = op.activation,
               .output = shared.activated};
    down_ = {.dtype = program.dtype,
             .experts = experts,
             .in_size = inner,
             .out_size = hidden,
             .offsets = shared.offsets,
             .x = shared.activated,
             .y = shared.down};
    set_weights(&down_, op.down, weights);
    sum_ = {.dtype = program.dtype,
            .top_k = op.routing.top_k,
            .width = hidden,
            .slots_of = shared.slots_of,
            .weights = scales_inputs_ ? nullptr : shared.weights,
            .y = shared.down,
            .bias = weights.biases(op.down),
            .chosen = shared.chosen,
            .adds = !op.stores,
            .output = reinterpret_cast<float*>(memory.buffer(op.output))};
    const auto [of_gate_up, of_down] = lora_configs(op, program);
    gather_ = {.dtype = program.dtype,
               .width = hidden,
               .entries = shared.entries,
               .entries_per_row = op.routing.top_k,
               .weights = scales_inputs_ ? shared.weights : nullptr,
               .x = memory.buffer(op.input),
               .y = shared.down};
    if (scales_inputs_) {
      gate_up_.entries = nullptr;
      gate_up_.x = shared.down;
    }
    if (of_gate_up) gate_up_adapters_.emplace(*of_gate_up, memory, shared.down, hidden, shared.gate_up);
    if (of_down) down_adapters_.emplace(*of_down, memory, shared.activated, inner, shared.down);
    tiles_ = {.top_k = op.routing.top_k,
              .entries = shared.entries,
              .expert_of = shared.expert_of,
              .tiles = shared.tiles};
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
    const bool adapts = run.shape.has_adapters && (gate_up_adapters_ || down_adapters_);
    if (scales_inputs_) launch(gather_, &cuda::GatherSlots::slots, slots);
    launch(gate_up_, &cuda::ExpertProduct::slots, slots);
    if (adapts) number_tiles(run, slots);
    if (adapts && gate_up_adapters_) {
      if (!scales_inputs_) launch(gather_, &cuda::GatherSlots::slots, slots);
      gate_up_adapters_->enqueue(run, slots, most_tiles(run, slots), tiles_.tiles);
    }
    launch(finish_, &cuda::Finish::tokens, slots);
    launch(down_, &cuda::ExpertProduct::slots, slots);
    if (adapts && down_adapters_) down_adapters_->enqueue(run, slots, most_tiles(run, slots), tiles_.tiles);
    launch(sum_, &cuda::SumSlots::tokens, tokens);
  }

 private:
  static void set_weights(cuda::ExpertProduct* work, std::span<const LinearPart> parts,
                          DeviceWeights& weights) {
    const PanelMatrix& first = parts.front().weight;
    const Quantization& how = first.quantization;
    if (how.algo == QuantAlgo::kNone) {
      work->weights = weights.matrices(parts);
      return;
    }
    const QuantizedMatrices matrices = weights.quantized_matrices(parts);
    work->weights = matrices.weights;
    work->scales = matrices.scales;
    work->zeros = matrices.zeros;
    work->bits = bits_of(how);
    work->group_size = group_size_of(first);
  }

  [[nodiscard]] std::int64_t most_tiles(const CudaRun& run, std::int64_t slots) const {
    return cuda::most_tiles(slots, number_.experts, adapter_ranges(run), tile_slots(slots));
  }

  void number_tiles(const CudaRun& run, std::int64_t slots) const {
    cuda::NumberTiles work = tiles_;
    work.slots = slots;
    work.tile_slots = tile_slots(slots);
    work.max_tiles = most_tiles(run, slots);
    work.token_slots = run.token_adapter_slots;
    cuda::enqueue(work, run.stream);
  }

  std::int64_t top_k_;
  /// Experts' inputs are multiplied by their weights, instead of their outputs.
  bool scales_inputs_;
  cuda::RouteTokens route_;
  cuda::NumberSlots number_;
  cuda::ExpertProduct gate_up_;
  cuda::Finish finish_;
  cuda::ExpertProduct down_;
  cuda::SumSlots sum_;
  cuda::NumberTiles tiles_;
  cuda::GatherSlots gather_;
  std::optional<SlotAdapters> gate_up_adapters_;
  std::optional<SlotAdapters> down_adapters_;
};

}  // namespace

std::unique_ptr<const CudaOp> make_experts(const ExpertsOp& op, const Program& program,
                                           const CudaMemory& memory, DeviceWeights& weights) {
  return std::make_unique<ExpertLaunches>(op, program, memory, weights);
}

}  // namespace adaptrt
