#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "adaptrt/lora/device_plan.h"
#include "adaptrt/lora/host_adapter.h"
#include "adaptrt/lora/layout.h"

namespace adaptrt {

/// Writes the images of an adapter, as sent or packed, page by page. Accesses nothing else, so any thread can
/// use it. The arguments must outlive it.
class AdapterPacker {
 public:
  /// `addresses`: the adapter's pages on the device, plan.pages of them.
  AdapterPacker(const HostAdapter& adapter, const LoraLayout& layout, const DevicePlan& plan,
                std::span<std::byte* const> addresses);
  ~AdapterPacker();
  AdapterPacker(const AdapterPacker&) = delete;
  AdapterPacker& operator=(const AdapterPacker&) = delete;

  /// Writes a page of the plan to `to`, which is aligned to kImageAlignment. Returns the number of bytes
  /// written.
  std::size_t write_page(std::size_t page, std::byte* to);
  /// Returns the adapter with its addresses on the device, after all pages were written.
  [[nodiscard]] DeviceAdapter take();

 private:
  class PartPacker;
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// Returns a packed adapter whose pages have been copied, as they are, to `addresses`.
[[nodiscard]] DeviceAdapter device_adapter_on_pages(const HostAdapter& adapter, const LoraLayout& layout,
                                                    std::span<std::byte* const> addresses);

/// Returns a packed adapter whose images are read where the host level keeps them.
[[nodiscard]] DeviceAdapter device_adapter_in_place(const HostAdapter& adapter, const LoraLayout& layout);

/// One module of a packed adapter, as float32.
struct UnpackedModule {
  LoraModule module = LoraModule::kAttnQ;
  std::int32_t layer = 0;
  std::int32_t expert = 0;
  std::int32_t rank = 0;
  std::vector<float> a;          // [rank, in]
  std::vector<float> b;          // [out, rank]
  std::vector<float> magnitude;  // [out] or empty
  std::vector<float> shift;      // [out] or empty
};

/// The inverse of packing, for inspection, if the device's memory is the host's. attn_qkv and
/// mlp_gate_up are returned as their parts. Rows of A and B on other ranks are zeros. If they are int8, B has
/// the integers and A the values times B's scales, whose product is the adapter's.
[[nodiscard]] std::vector<UnpackedModule> unpack_adapter(const DeviceAdapter& adapter,
                                                         const LoraLayout& layout);

}  // namespace adaptrt
