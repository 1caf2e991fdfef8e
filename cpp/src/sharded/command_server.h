#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "adapter_message.h"
#include "adaptrt/core/error.h"
#include "adaptrt/core/huge_array.h"
#include "adaptrt/engine/communicator.h"
#include "adaptrt/engine/engine.h"
#include "adaptrt/lora/pack_adapter.h"
#include "adaptrt/lora/site_index.h"
#include "message.h"
#include "step_message.h"

namespace adaptrt {

/// The adapters in the pages of an engine that runs on another process's commands.
class RankAdapters {
 public:
  RankAdapters(const LoraLayout& layout, std::unique_ptr<AdapterPages> pages)
      : layout_(layout), index_(layout), pages_(std::move(pages)) {}

  /// Packs this engine's share. Earlier contents of the pages are lost.
  void load(ReceivedLoad received, HugeArray weights);

  /// Finds an adapter by the commanding process's load id.
  [[nodiscard]] const DeviceAdapter* find(std::uint64_t load_id) const;

 private:
  const LoraLayout& layout_;
  SiteIndex index_;
  std::unique_ptr<AdapterPages> pages_;
  std::map<std::uint64_t, DeviceAdapter> adapters_;  // key: load id of the commanding process
  std::map<std::int64_t, std::uint64_t> load_of_page_;
};

/// The end of a communicator that executes rank 0's commands.
class CommandServer {
 public:
  CommandServer(Engine& local, Communicator& communicator) : local_(local), communicator_(communicator) {}
  virtual ~CommandServer() = default;
  CommandServer(const CommandServer&) = delete;
  CommandServer& operator=(const CommandServer&) = delete;
  CommandServer(CommandServer&&) = delete;
  CommandServer& operator=(CommandServer&&) = delete;

  /// Runs until rank 0 says that no command follows. Throws EngineError if a rank is lost.
  void run();

 protected:
  virtual void step(const StepInput& input) = 0;

  [[nodiscard]] Engine& local() { return local_; }
  [[nodiscard]] Communicator& communicator() const { return communicator_; }
  /// Sends to rank 0.
  void send(std::span<const std::byte> bytes);
  void send_reply(Outcome outcome, const std::string& message);

 private:
  void receive(std::span<std::byte> bytes);
  void allocate_states(std::int32_t num_slots);
  void make_pages(MessageReader* message);
  void load_adapter(MessageReader* message);
  /// Runs an action that rank 0 waits for, and reports its outcome.
  template <class Action>
  void reply(const Action& action);

  Engine& local_;
  Communicator& communicator_;
  std::optional<RankAdapters> adapters_;
  ReceivedStep step_;
  std::vector<std::byte> body_;
};

}  // namespace adaptrt
