#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "adaptrt/kv/kv_cache_events.h"
#include "bind_exec.h"
#include "bind_struct.h"
#include "exec_casters.h"
#include "waiting.h"

namespace py = pybind11;

namespace adaptrt::bindings {

template <>
struct detail::Accepted<KVCacheEventData> {
  static std::string text() {
    return "KVCacheCreatedData, KVCacheStoredData, KVCacheRemovedData, KVCacheUpdatedData";
  }
};

namespace {

std::vector<KVCacheEvent> get_latest_events(KVCacheEventManager& self,
                                            std::optional<std::chrono::milliseconds> timeout) {
  return await_interruptibly(timeout, [&](auto piece, bool is_last) {
    const bool is_closed = self.is_closed();  // before: the last events come with the end
    std::optional events = self.get_latest_events(piece);
    if (events->empty() && !is_last && !is_closed) events.reset();
    return events;
  });
}

}  // namespace

void bind_kv_cache_events(py::module_& module) {
  bind_struct<KVCacheCreatedData>(module, "KVCacheCreatedData", "The cache was created.");
  bind_struct<UniqueToken>(module, "UniqueToken", "A token of a block.");
  bind_struct<KVCacheStoredBlockData>(module, "KVCacheStoredBlockData", "A block that can be reused.")
      .def_property_readonly(
          "mm_keys", [](const KVCacheStoredBlockData& /*self*/) { return py::list(); },
          "Always []: inputs are tokens.");
  bind_struct<KVCacheStoredData>(module, "KVCacheStoredData", "Blocks that can be reused from now on.");
  bind_struct<KVCacheRemovedData>(module, "KVCacheRemovedData", "Blocks that can no longer be reused.");
  bind_struct<KVCacheEventDiffInt>(module, "KVCacheEventDiffInt", "A value that changed.");
  bind_struct<KVCacheUpdatedData>(module, "KVCacheUpdatedData",
                                  "A stored block's level or priority changed.");
  bind_struct<KVCacheEvent>(module, "KVCacheEvent", "A change of the KV cache.");
  py::class_<KVCacheEventManager, std::shared_ptr<KVCacheEventManager>>(
      module, "KVCacheEventManager",
      "Keeps the newest KvCacheConfig.event_buffer_max_size KV cache events of an executor.")
      .def("get_latest_events", &get_latest_events, py::arg("timeout_ms") = py::none(),
           "Waits until there are events, and returns the KVCacheEvents since the last call, oldest first; "
           "[] after the timeout (timedelta or milliseconds), or if the executor has ended.");
}

}  // namespace adaptrt::bindings
