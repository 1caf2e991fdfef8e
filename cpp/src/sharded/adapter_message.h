#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "adaptrt/lora/host_adapter.h"
#include "message.h"

namespace adaptrt {

/// A submitted adapter and the pages that hold each rank's share of it.
struct AdapterLoad {
  std::shared_ptr<const HostAdapter> adapter;
  std::vector<std::int64_t> pages;
  std::uint64_t load_id = 0;
};

/// Writes everything except the weights (HostAdapter::bytes() bytes), which are sent separately.
void add_load(const AdapterLoad& load, MessageWriter* message);

/// The data that add_load() writes.
struct ReceivedLoad {
  std::uint64_t task_id = 0;
  std::uint64_t load_id = 0;
  DType dtype = DType::kFloat32;
  std::vector<AdapterRow> rows;
  StoredParts stored_parts;
  std::vector<std::int64_t> pages;
  std::uint64_t weight_bytes = 0;
};
[[nodiscard]] ReceivedLoad read_load(MessageReader* message);

}  // namespace adaptrt
