#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "adaptrt/cuda/row_kernels.h"
#include "adaptrt/cuda_program/cuda_engine.h"
#include "adaptrt/gpu/gpu_model.h"
#include "adaptrt/gpu/gpu_model_description.h"
#include "adaptrt/program/program.h"
#include "cuda_memory.h"
#include "cuda_op.h"
#include "lowering.h"
#include "state_ops.h"
#include "weight_ring.h"

namespace adaptrt {

/// A program with row-major matrices as a model on an NVIDIA GPU.
class CudaModel final : public GpuModel {
 public:
  /// `program` must be valid and without problems_on_cuda(). Its weights are read by load() only.
  /// `weight_memory`, `hopper_prefill` and `usage`: see make_cuda_engine.
  CudaModel(const Program& program, std::size_t weight_memory, bool hopper_prefill, NeuronUsage usage)
      : program_(program),
        weight_memory_(weight_memory),
        hopper_prefill_(hopper_prefill),
        usage_(std::move(usage)),
        states_{.layout = StateLayout(program)} {}

  void load(const StepArrays& step_arrays, const GpuModelArrays& arrays, Device& device,
            Stream& stream) override;
  void set_kv_pools(std::span<const DeviceArray> pools) override;
  void set_states(std::byte* slots) override { states_.slots = slots; }
  void run(GpuStepKind kind, const RunShape& shape, Stream& stream) override;
  void run_on_arrival(GpuStepKind kind, const RunShape& shape, const StepArrivals& arrivals,
                      Stream& stream) override;
  [[nodiscard]] std::function<void(Stream&)> make_graph_work(const RunShape& shape) override;
  [[nodiscard]] bool can_be_captured(const RunShape& shape) const override { return !uses_ring(shape); }
  void find_highest(std::int32_t first_row, std::int32_t rows, std::int32_t count, Stream& stream) override;
  void take_tokens(const RunShape& shape, Stream& stream) override;

 private:
  /// `waits`: nullptr if all adapters of the run are on the device.
  void enqueue(const RunShape& shape, Stream& stream, ArrivalWaits* waits = nullptr);
  /// True if the run reads weights that are copied to the device ahead of use.
  [[nodiscard]] bool uses_ring(const RunShape& shape) const;
  /// Lowers the program, with its weights on the device and in the ring.
  [[nodiscard]] LoweredProgram load_weights(Device& device, Stream& stream);
  [[nodiscard]] LoweredProgram lower_with(DeviceWeights& weights) const;

  /// Ops whose weights are a section of the ring.
  struct StreamedOps {
    std::size_t begin = 0;
    std::size_t end = 0;
  };

  Program program_;
  std::size_t weight_memory_;
  bool hopper_prefill_;
  NeuronUsage usage_;
  const StepArrays* step_arrays_ = nullptr;
  std::byte* step_memory_ = nullptr;
  const std::int32_t* best_tokens_ = nullptr;
  cuda::FindHighest find_highest_;  ///< for all rows of logits
  std::optional<CudaMemory> memory_;
  KvPoolAddresses pools_;
  DeviceStates states_;
  std::vector<Allocation> weights_;
  std::vector<Allocation> neurons_;  ///< empty: layers are read whole
  CudaOps ops_;
  std::vector<std::int32_t> read_positions_;  ///< LoweredProgram::read_positions
  std::vector<StreamedOps> streamed_;
  std::optional<WeightRing> ring_;
};

/// Returns the sizes of a program's model, from which the engine's session follows.
[[nodiscard]] GpuModelDescription describe(const Program& program);

}  // namespace adaptrt
