#include "command_server.h"

namespace adaptrt {

void RankAdapters::load(ReceivedLoad received, HugeArray weights) {
  const auto adapter = HostAdapter::received(received.task_id, received.dtype, std::move(received.rows),
                                             std::move(weights), std::move(received.stored_parts));
  const DevicePlan plan = plan_device_images(adapter->rows(), layout_, index_, pages_->page_bytes(),
                                             adapter->stored_parts().image_bytes);
  if (plan.pages != std::ssize(received.pages)) {
    throw EngineError("an adapter takes " + std::to_string(plan.pages) + " pages here and " +
                      std::to_string(received.pages.size()) + " on rank 0");
  }
  std::vector<std::byte*> addresses;
  for (const std::int64_t page : received.pages) {
    if (const auto before = load_of_page_.find(page); before != load_of_page_.end()) {
      adapters_.erase(before->second);
    }
    load_of_page_[page] = received.load_id;
    addresses.push_back(pages_->address(page));
  }
  DeviceAdapter& packed = adapters_[received.load_id];
  AdapterPacker packer(*adapter, layout_, plan, addresses);
  pages_->load(received.pages,
               [&](std::size_t page, std::byte* host_page) { return packer.write_page(page, host_page); });
  packed = packer.take();
  pages_->share(adapter, received.pages, packed.load_id);
}

const DeviceAdapter* RankAdapters::find(std::uint64_t load_id) const {
  const auto found = adapters_.find(load_id);
  if (found == adapters_.end()) throw EngineError("rank 0 names an adapter that it has not sent");
  return &found->second;
}

void CommandServer::run() {
  for (;;) {
    CommandHeader header;
    communicator_.wait_for({0, std::as_writable_bytes(std::span(&header, 1))});
    body_.resize(header.body_bytes);
    if (!body_.empty()) receive(body_);
    MessageReader message(body_);
    switch (header.kind) {
      case CommandKind::kAllocateKv:
        reply([&] { local_.allocate_kv_blocks(message.number<std::int32_t>()); });
        break;
      case CommandKind::kAllocateCrossKv:
        reply([&] { local_.allocate_cross_kv_blocks(message.number<std::int32_t>()); });
        break;
      case CommandKind::kAllocateStates:
        reply([&] { allocate_states(message.number<std::int32_t>()); });
        break;
      case CommandKind::kMakePages:
        reply([&] { make_pages(&message); });
        break;
      case CommandKind::kLoadAdapter:
        load_adapter(&message);
        break;
      case CommandKind::kStep:
        step_.read(
            &message, [&](std::uint64_t load_id) { return adapters_.value().find(load_id); },
            local_.info().encoder_hidden_size);
        step(step_.input());
        break;
      case CommandKind::kEnd:
        local_.end_steps();
        return;
    }
  }
}

void CommandServer::allocate_states(std::int32_t num_slots) {
  // In a pipeline, some stages may have only layers without states.
  if (local_.info().has_states()) local_.allocate_states(num_slots);
}

void CommandServer::make_pages(MessageReader* message) {
  const auto page_bytes = message->number<std::uint64_t>();
  const auto num_pages = message->number<std::int64_t>();
  adapters_.emplace(local_.info().lora, local_.make_adapter_pages(page_bytes, num_pages, 1));
}

void CommandServer::load_adapter(MessageReader* message) {
  ReceivedLoad load = read_load(message);
  HugeArray weights(load.weight_bytes);
  if (load.weight_bytes > 0) receive({weights.data(), weights.bytes()});
  adapters_.value().load(std::move(load), std::move(weights));
}

template <class Action>
void CommandServer::reply(const Action& action) {
  try {
    action();
  } catch (const ConfigError& error) {
    send_reply(Outcome::kConfigError, error.what());
    return;
  }
  send_reply(Outcome::kDone, {});
}

void CommandServer::send_reply(Outcome outcome, const std::string& message) {
  const CommandReply reply{.outcome = outcome, .message_bytes = static_cast<std::uint32_t>(message.size())};
  std::vector<OutgoingMessage> sent{{0, std::as_bytes(std::span(&reply, 1))}};
  if (!message.empty()) sent.push_back({0, std::as_bytes(std::span(message))});
  communicator_.exchange(sent, {});
}

void CommandServer::receive(std::span<std::byte> bytes) {
  const IncomingMessage message{0, bytes};
  communicator_.exchange({}, {&message, 1});
}

void CommandServer::send(std::span<const std::byte> bytes) {
  const OutgoingMessage message{0, bytes};
  communicator_.exchange({&message, 1}, {});
}

}  // namespace adaptrt
