#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "adaptrt/device/device.h"
#include "adaptrt/engine/engine.h"
#include "adaptrt/gpu/adapter_entries.h"
#include "adaptrt/gpu/gpu_model.h"
#include "adaptrt/gpu/gpu_model_description.h"

namespace adaptrt {

/// The tables in which kernels find the adapters: one row of ranks, of addresses, and of shifts' addresses
/// per slot.
/// Adapters keep their slot over steps; the least recently used one is evicted.
class AdapterTable {
 public:
  /// Throws ConfigError if the device cannot allocate the memory.
  AdapterTable(const GpuModelDescription& model, Device& device, Stream& stream);

  [[nodiscard]] AdapterArrays arrays() const;

  /// Returns the slot of each sequence's adapter; kNoSlot for the base model. Enqueues the copies of rows for
  /// adapters without a slot so far. There are at least as many slots as adapters in a step. The result is
  /// valid until the next call, which must come after the copies have finished.
  [[nodiscard]] std::span<const std::int32_t> place(std::span<const DeviceAdapter* const> adapters,
                                                    Stream& stream);
  /// Marks all rows as unknown after a failure, so that each is written again before it is used.
  void forget();

 private:
  struct Slot {
    std::uint64_t load_id = 0;
    std::int64_t last_step = 0;  ///< 0: empty
  };

  [[nodiscard]] std::int32_t slot_of(const DeviceAdapter& adapter, Stream& stream);
  [[nodiscard]] std::size_t least_recently_used() const;
  void write_row(std::size_t slot, const DeviceAdapter& adapter, Stream& stream);

  LoraLayout layout_;
  AdapterEntries places_;
  std::size_t entries_;  ///< per slot
  Allocation ranks_;
  Allocation pointers_;
  Allocation shifts_;  ///< empty unless the model adds shifts
  Allocation host_ranks_;
  Allocation host_pointers_;
  Allocation host_shifts_;
  std::vector<Slot> slots_;
  std::unordered_map<std::uint64_t, std::size_t> slot_by_load_id_;
  std::vector<std::int32_t> slot_of_sequence_;
  std::int64_t step_ = 0;
};

}  // namespace adaptrt
