#include "tensorrt_model.h"

#include <string>
#include <utility>

namespace adaptrt {

TensorRtModel::TensorRtModel(std::vector<TensorRtWeight> weights, TensorRtContexts contexts)
    : weights_(std::move(weights)),
      prefill_(std::move(contexts.prefill)),
      decode_(std::move(contexts.decode)) {}

void TensorRtModel::load(const StepArrays& step_arrays, const GpuModelArrays& arrays, Device& device,
                         Stream& stream) {
  inputs_.emplace(weights_, device, stream);
  weights_.clear();
  for (PlanRunner* runner : {&prefill_, &decode_}) {
    runner->set_step_arrays(step_arrays, arrays.step_memory);
    inputs_->bind(*runner);
    if (arrays.adapters) {
      runner->set_input("lora_ranks", arrays.adapters->ranks);
      runner->set_input("lora_pointers", arrays.adapters->pointers);
    }
    runner->set_output("logits", arrays.logits);
  }
}

void TensorRtModel::set_kv_pools(std::span<const DeviceArray> pools) {
  for (PlanRunner* runner : {&prefill_, &decode_}) {
    for (std::size_t layer = 0; layer < pools.size(); ++layer) {
      runner->set_input("kv_pool." + std::to_string(layer), pools[layer]);
      runner->set_output("kv_pool_out." + std::to_string(layer), pools[layer].address);
    }
  }
}

void TensorRtModel::run(GpuStepKind kind, const RunShape& shape, Stream& stream) {
  (kind == GpuStepKind::kDecode ? decode_ : prefill_).run(shape, stream);
}

std::function<void(Stream&)> TensorRtModel::make_graph_work(const RunShape& shape) {
  return decode_.make_graph_work(shape);
}

}  // namespace adaptrt
