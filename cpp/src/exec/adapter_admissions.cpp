#include "adapter_admissions.h"

#include "adaptrt/core/error.h"

namespace adaptrt {

AdapterAdmissions::~AdapterAdmissions() {
  for (const std::uint64_t task_id : stored_) {
    try {
      cache_.unload(task_id);
    } catch (const PeftTaskNotCachedError&) {  // evicted, or unloaded by another thread: it is gone as wanted
    }
  }
}

std::shared_ptr<const HostAdapter> AdapterAdmissions::admit(const LoraConfig& config) {
  const bool is_new = config.weights && !cache_.contains(config.task_id);
  if (is_new) stored_.reserve(stored_.size() + 1);
  auto adapter = cache_.admit(config);
  if (is_new) stored_.push_back(config.task_id);
  return adapter;
}

}  // namespace adaptrt
