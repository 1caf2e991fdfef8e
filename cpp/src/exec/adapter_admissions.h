// The adapters that one list of requests brings to a LoRA cache.

#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>

#include "adaptrt/lora/lora_cache.h"

namespace adaptrt {

/// Admits adapters for a list of requests. Adapters that only the list stored and used leave the cache again,
/// unless keep() says that the list was accepted. An adapter that a request replaced stays replaced.
class AdapterAdmissions {
 public:
  /// `cache` must outlive this object.
  explicit AdapterAdmissions(LoraCache& cache) : cache_(cache) {}
  ~AdapterAdmissions();
  AdapterAdmissions(const AdapterAdmissions&) = delete;
  AdapterAdmissions& operator=(const AdapterAdmissions&) = delete;

  /// Throws as LoraCache::admit.
  [[nodiscard]] std::shared_ptr<const HostAdapter> admit(const LoraConfig& config);
  /// The list was accepted: its adapters stay.
  void keep() { admissions_.clear(); }

 private:
  LoraCache& cache_;
  std::unordered_map<std::uint64_t, std::int64_t> admissions_;  // by generation
};

}  // namespace adaptrt
