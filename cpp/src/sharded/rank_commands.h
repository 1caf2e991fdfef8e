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

/// Adapters that are loaded here but not yet on the other ranks. Load workers add to it during steps.
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

/// Wraps a sink: stores its first exception in `refusal` and then drops rows, because a step of several ranks
/// cannot stop.
[[nodiscard]] RowSink guarded(const RowSink& sink, std::exception_ptr* refusal);

/// The commanding end: rank 0 of a communicator, whose other ranks execute its commands.
class RankCommands {
 public:
  explicit RankCommands(std::shared_ptr<Communicator> communicator)
      : communicator_(std::move(communicator)) {}

  [[nodiscard]] const Communicator& communicator() const { return *communicator_; }

  /// Starts the body of the next command and returns its writer.
  [[nodiscard]] MessageWriter& new_body();
  /// Sends the body that was written since new_body().
  void send(CommandKind kind);
  void send_load(const AdapterLoad& load);
  /// Tells the other ranks, once, that no command follows. Lost ranks are not told.
  void dismiss() noexcept;

  /// Receives a rank's reply to a command; nullopt on success.
  [[nodiscard]] std::optional<Failure> receive_reply(std::int32_t rank);
  /// The same without a time limit.
  [[nodiscard]] std::optional<Failure> wait_for_reply(std::int32_t rank);

  void receive(std::int32_t rank, std::span<std::byte> bytes);
  /// Receives `count` rows of `width` floats, `slice` rows at a time. `tells`: the other rank uses
  /// acked_send() for each slice.
  void receive_rows(std::int32_t rank, std::size_t count, std::int64_t width, std::size_t slice, bool tells,
                    const RowSink& sink);

 private:
  void send_to_others(std::span<const std::byte> bytes);
  [[nodiscard]] std::optional<Failure> read_failure(std::int32_t rank, const CommandReply& reply);

  std::shared_ptr<Communicator> communicator_;
  MessageWriter body_;
  std::vector<OutgoingMessage> sent_;
  std::vector<float> received_;
  /// True until dismiss().
  bool has_others_ = true;
};

}  // namespace adaptrt
