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

/// The adapters in the pages of an engine that does as another process says.
class RankAdapters {
 public:
  RankAdapters(const LoraLayout& layout, std::unique_ptr<AdapterPages> pages)
      : layout_(layout), index_(layout), pages_(std::move(pages)) {}

  /// Packs the engine's share. What its pages held before is gone.
  void load(ReceivedLoad received, HugeArray weights);

  /// By the load id of the process that commands.
  [[nodiscard]] const DeviceAdapter* find(std::uint64_t load_id) const;

 private:
  const LoraLayout& layout_;
  SiteIndex index_;
  std::unique_ptr<AdapterPages> pages_;
  std::map<std::uint64_t, DeviceAdapter> adapters_;  // by the other process's load id
  std::map<std::int64_t, std::uint64_t> load_of_page_;
};

/// The side that is commanded by rank 0 of a communicator.
class CommandServer {
 public:
  CommandServer(Engine& local, Communicator& communicator) : local_(local), communicator_(communicator) {}
  virtual ~CommandServer() = default;
  CommandServer(const CommandServer&) = delete;
  CommandServer& operator=(const CommandServer&) = delete;
  CommandServer(CommandServer&&) = delete;
  CommandServer& operator=(CommandServer&&) = delete;

  /// Until it is told that no command follows. Throws EngineError when a rank is lost.
  void run();

 protected:
  virtual void step(const StepInput& input) = 0;

  [[nodiscard]] Engine& local() { return local_; }
  [[nodiscard]] Communicator& communicator() const { return communicator_; }
  /// To rank 0.
  void send(std::span<const std::byte> bytes);
  void send_reply(Outcome outcome, const std::string& message);

 private:
  void receive(std::span<std::byte> bytes);
  void make_pages(MessageReader* message);
  void load_adapter(MessageReader* message);
  /// Does what rank 0 waits for, and tells it how that went.
  template <class Action>
  void reply(const Action& action);

  Engine& local_;
  Communicator& communicator_;
  std::optional<RankAdapters> adapters_;
  ReceivedStep step_;
  std::vector<std::byte> body_;
};

}  // namespace adaptrt
