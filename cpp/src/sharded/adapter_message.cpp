#include "adapter_message.h"

#include <type_traits>

namespace adaptrt {

// All ranks run the same build, so a row is sent as raw bytes.
static_assert(std::is_trivially_copyable_v<AdapterRow>);

void add_load(const AdapterLoad& load, MessageWriter* message) {
  const HostAdapter& adapter = *load.adapter;
  message->add(adapter.task_id());
  message->add(load.load_id);
  message->add(adapter.dtype());
  message->add_list(std::span<const AdapterRow>(adapter.rows()));
  const StoredParts& stored = adapter.stored_parts();
  message->add(stored.storage);
  message->add_list(std::span<const std::uint64_t>(stored.image_bytes));
  message->add_list(std::span<const float>(stored.scales));
  message->add_list(std::span<const std::int64_t>(load.pages));
  message->add(static_cast<std::uint64_t>(adapter.bytes()));
}

ReceivedLoad read_load(MessageReader* message) {
  ReceivedLoad load;
  load.task_id = message->number<std::uint64_t>();
  load.load_id = message->number<std::uint64_t>();
  load.dtype = message->number<DType>();
  load.rows = message->list<AdapterRow>();
  load.stored_parts.storage = message->number<LoraStorage>();
  load.stored_parts.image_bytes = message->list<std::uint64_t>();
  load.stored_parts.scales = message->list<float>();
  load.pages = message->list<std::int64_t>();
  load.weight_bytes = message->number<std::uint64_t>();
  return load;
}

}  // namespace adaptrt
