#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "adaptrt/device/device.h"
#include "adaptrt/engine/engine.h"
#include "adaptrt/tensorrt/tensorrt_engine.h"
#include "plan_runner.h"

namespace adaptrt {

/// The tables by which the plugins find the adapters: a row of ranks and a row of addresses for each slot.
/// Adapters keep their slot from step to step; the least recently used one gives its slot up.
class AdapterTable {
 public:
  /// Throws ConfigError when the device refuses the memory.
  AdapterTable(const TensorRtProgram& program, Device& device, Stream& stream);

  /// Names the tables to a context.
  void bind(PlanRunner& runner) const;

  /// The slot of each sequence's adapter, kNoSlot for the base model; rows of adapters that had none are put
  /// into the stream. There are at least as many slots as adapters in a step. Valid until the next call; the
  /// rows must be on the device by then.
  [[nodiscard]] std::span<const std::int32_t> place(std::span<const DeviceAdapter* const> adapters,
                                                    Stream& stream);
  /// After a failure nobody knows which rows got to the device: all are written again before they are used.
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
  std::int64_t num_modules_;
  std::size_t entries_;  ///< of a row: layers * modules
  Allocation ranks_;
  Allocation pointers_;
  Allocation host_ranks_;
  Allocation host_pointers_;
  std::vector<Slot> slots_;
  std::unordered_map<std::uint64_t, std::size_t> slot_by_load_id_;
  std::vector<std::int32_t> slot_of_sequence_;
  std::int64_t step_ = 0;
};

}  // namespace adaptrt
