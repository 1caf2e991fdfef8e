#include "adaptrt/engine/engine.h"

#include "adaptrt/lora/host_pages.h"

namespace adaptrt {

std::unique_ptr<AdapterPages> Engine::make_adapter_pages(std::size_t page_bytes, std::int64_t num_pages,
                                                         std::int32_t /*num_copy_streams*/) {
  return std::make_unique<HostPages>(page_bytes, num_pages);
}

}  // namespace adaptrt
