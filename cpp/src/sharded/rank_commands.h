#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "adapter_message.h"
#include "adaptrt/engine/communicator.h"
#include "message.h"

namespace adaptrt {

/// Adapters that were loaded here and not yet elsewhere. Load workers add to it while a step runs.
class PendingLoads {
 public:
  void add(AdapterLoad load) {
    const std::lock_guard lock(mutex_);
    loads_.push_back(std::move(load));
  }
  [[nodiscard]] std::vector<AdapterLoad> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(loads_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<AdapterLoad> loads_;
};

/// A LogitsSink or a HiddenSink.
using RowSink = std::function<void(std::int64_t first_row, std::int64_t rows, const float* values)>;

/// A sink that keeps what it throws, and takes nothing more then: a step of several ranks goes on.
[[nodiscard]] RowSink guarded(const RowSink& sink, std::exception_ptr* refusal);

/// The side that commands: rank 0 of a communicator, whose other ranks do what they are told.
class RankCommands {
 public:
  explicit RankCommands(std::shared_ptr<Communicator> communicator)
      : communicator_(std::move(communicator)) {}

  [[nodiscard]] const Communicator& communicator() const { return *communicator_; }

  /// What the body of the next command is written to.
  [[nodiscard]] MessageWriter& new_body();
  /// With what was written since new_body().
  void send(CommandKind kind);
  void send_load(const AdapterLoad& load);
  /// Tells the others, once, that no command follows. Those that are lost are not told.
  void dismiss() noexcept;

  /// A rank's answer to a command: what failed, if anything did.
  [[nodiscard]] std::optional<Failure> receive_reply(std::int32_t rank);
  /// The same of a command that may take any time.
  [[nodiscard]] std::optional<Failure> wait_for_reply(std::int32_t rank);

  void receive(std::int32_t rank, std::span<std::byte> bytes);
  /// `count` rows of results of `width` floats, `slice` of them at a time. `tells`: the other rank is in
  /// send_until_taken() with each slice.
  void receive_rows(std::int32_t rank, std::size_t count, std::int64_t width, std::size_t slice, bool tells,
                    const RowSink& sink);

 private:
  void send_to_others(std::span<const std::byte> bytes);
  [[nodiscard]] std::optional<Failure> read_failure(std::int32_t rank, const CommandReply& reply);

  std::shared_ptr<Communicator> communicator_;
  MessageWriter body_;
  std::vector<OutgoingMessage> sent_;
  std::vector<float> received_;
  /// They have not been dismissed.
  bool has_others_ = true;
};

}  // namespace adaptrt
