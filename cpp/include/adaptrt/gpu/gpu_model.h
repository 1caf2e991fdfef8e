#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "adaptrt/core/highest_logits.h"
#include "adaptrt/device/device.h"
#include "adaptrt/gpu/adapter_arrivals.h"
#include "adaptrt/gpu/step_arrays.h"

namespace adaptrt {

/// An array on the device that keeps its address.
struct DeviceArray {
  std::vector<std::int64_t> dims;
  std::byte* address = nullptr;
};

/// The tables in which kernels find a slot's adapter. AdapterEntries says where each part is.
struct AdapterArrays {
  DeviceArray ranks;     ///< int32 [slots, layers, modules]
  DeviceArray pointers;  ///< int64 [slots, layers, modules, 3]: addresses of A, B and the magnitudes
  /// int64 [slots, layers, modules]: addresses of the shifts; empty unless GpuModelDescription::adds_shifts.
  DeviceArray shifts;
};

/// The memory that all steps of a model use.
struct GpuModelArrays {
  /// The arrays of a step begin here, at the offsets of StepArrays::places().
  std::byte* step_memory = nullptr;
  std::optional<AdapterArrays> adapters;  ///< nullopt without LoRA
  std::byte* logits = nullptr;            ///< float32 [logit rows, logits_width()]
  /// [logit rows], written in every run like the logits (see StepInput::best_tokens); nullptr unless
  /// GpuModelDescription::finds_best_tokens.
  std::int32_t* best_tokens = nullptr;
  /// Results of find_highest(): [logit rows] and [logit rows, kMaxHighestLogits]; nullptr unless
  /// GpuModelDescription::finds_highest_logits.
  RowSummary* summaries = nullptr;
  TokenLogit* highest = nullptr;
};

/// Kinds of steps, each with limits of its own (GpuModelDescription).
enum class GpuStepKind {
  kPrefill,  ///< any step
  kDecode,   ///< one token per sequence
};

/// A network on a device. It reads the arrays of a step and writes KV pools and logits. One thread at a time.
class GpuModel {
 public:
  virtual ~GpuModel() = default;
  /// Copies weights to the device, and remembers where the arrays of steps are. Called once, before
  /// everything else; `arrays` stays valid as long as the model. Throws ConfigError if the device has no
  /// memory left, StepError if it fails.
  virtual void load(const StepArrays& step_arrays, const GpuModelArrays& arrays, Device& device,
                    Stream& stream) = 0;
  /// Sets each layer's KV pool [blocks, 2, kv_heads, tokens_per_block, head_dim]; int8 pools have their
  /// scales after each block. Layers without a pool have no address. Called once, before the first run.
  virtual void set_kv_pools(std::span<const DeviceArray> pools) = 0;
  /// Sets the slots of sequences' states, of GpuModelDescription::state_bytes each. Called once, before the
  /// first run, and only with states.
  virtual void set_states(std::byte* slots);
  /// Enqueues a run of this shape. Throws StepError.
  virtual void run(GpuStepKind kind, const RunShape& shape, Stream& stream) = 0;
  /// Does the same while adapters of the run are still being copied: each op waits for the sites that it
  /// reads. Without an override, the whole run waits for all sites.
  virtual void run_on_arrival(GpuStepKind kind, const RunShape& shape, const StepArrivals& arrivals,
                              Stream& stream);
  /// Returns what a graph of decode steps of this shape captures: a function that enqueues a run. The graph
  /// keeps it for as long as it may be launched. Throws StepError.
  [[nodiscard]] virtual std::function<void(Stream&)> make_graph_work(const RunShape& shape) = 0;
  /// False if a graph cannot capture a run of this shape: it enqueues work that goes on after it.
  [[nodiscard]] virtual bool can_be_captured(const RunShape& /*shape*/) const { return true; }
  /// Enqueues the search for the `count` highest logits of rows [first_row, first_row + rows) of the run
  /// before. Writes the summaries of `rows` rows and [rows, count] logits to the beginning of their arrays.
  /// Called only with GpuModelDescription::finds_highest_logits. Throws StepError.
  virtual void find_highest(std::int32_t first_row, std::int32_t rows, std::int32_t count, Stream& stream);
  /// Enqueues the replacement of each token id -1 - r of the next run, of this shape, by the best token of
  /// row r of the run before; by 0 if that row has none. Called after the step's arrays were copied, and only
  /// with GpuModelDescription::finds_best_tokens. Throws StepError.
  virtual void take_tokens(const RunShape& shape, Stream& stream);
};

}  // namespace adaptrt
