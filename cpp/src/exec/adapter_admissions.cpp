#include "adapter_admissions.h"

namespace adaptrt {

AdapterAdmissions::~AdapterAdmissions() {
  for (const auto& [generation, admissions] : admissions_) cache_.withdraw(generation, admissions);
}

std::shared_ptr<const HostAdapter> AdapterAdmissions::admit(const LoraConfig& config) {
  auto adapter = cache_.admit(config);
  ++admissions_[adapter->generation()];
  return adapter;
}

}  // namespace adaptrt
