// Adapters that one list of requests adds to a LoRA cache.

#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>

#include "adaptrt/lora/lora_cache.h"

namespace adaptrt {

/// Admits adapters for a list of requests. Without keep(), adapters that only this list stored and used are
/// removed from the cache again. An adapter that a request replaced stays replaced.
class AdapterAdmissions {
 public:
  /// `cache` must outlive this object.
  explicit AdapterAdmissions(LoraCache& cache) : cache_(cache) {}
  ~AdapterAdmissions();
  AdapterAdmissions(const AdapterAdmissions&) = delete;
  AdapterAdmissions& operator=(const AdapterAdmissions&) = delete;

  /// Throws the errors of LoraCache::admit.
  [[nodiscard]] std::shared_ptr<const HostAdapter> admit(const LoraConfig& config);
  /// Keeps the adapters: the list was accepted.
  void keep() { admissions_.clear(); }

 private:
  LoraCache& cache_;
  std::unordered_map<std::uint64_t, std::int64_t> admissions_;  // by generation
};

}  // namespace adaptrt
