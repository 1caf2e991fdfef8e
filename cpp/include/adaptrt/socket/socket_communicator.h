#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

#include "adaptrt/engine/communicator.h"

namespace adaptrt {

/// Two processes that talk over a connected stream socket.
class SocketCommunicator final : public Communicator {
 public:
  /// Rank 0 or 1 of the two. `socket` is owned and closed here; `peer` is what errors call the other process.
  /// `time_limit` is what exchange() waits at most while nothing moves; nullopt: for ever. `time_to_explain`
  /// is what another thread gets for its lose() when the other process has ended. Throws ConfigError for what
  /// is no socket, which stays the caller's.
  SocketCommunicator(int socket, std::int32_t rank, std::string peer,
                     std::optional<std::chrono::milliseconds> time_limit,
                     std::chrono::milliseconds time_to_explain);
  ~SocketCommunicator() override;
  SocketCommunicator(const SocketCommunicator&) = delete;
  SocketCommunicator& operator=(const SocketCommunicator&) = delete;
  SocketCommunicator(SocketCommunicator&&) = delete;
  SocketCommunicator& operator=(SocketCommunicator&&) = delete;

  [[nodiscard]] std::int32_t rank() const override { return rank_; }
  [[nodiscard]] std::int32_t size() const override { return 2; }
  [[nodiscard]] bool is_lost() const override;
  void exchange(std::span<const OutgoingMessage> sent, std::span<const IncomingMessage> received) override;
  void wait_for(const IncomingMessage& message) override;

  /// From any thread, of one that knows better why the other process is lost: what calls throw from now on,
  /// and the one that waits. Without effect when it is lost already.
  void lose(const std::string& reason);

 private:
  void send(std::span<const std::byte> bytes);
  void receive(std::span<std::byte> bytes, bool has_limit);
  /// Until the socket is ready for `events`; throws when it takes too long.
  void poll_for(short events, bool has_limit);
  [[noreturn]] void throw_closed();
  [[noreturn]] void throw_lost(const std::string& reason);
  void throw_if_lost() const;

  const int socket_;
  const std::int32_t rank_;
  const std::string peer_;
  const std::optional<std::chrono::milliseconds> time_limit_;
  const std::chrono::milliseconds time_to_explain_;
  mutable std::mutex mutex_;
  std::condition_variable is_known_;
  std::optional<std::string> failure_;
};

}  // namespace adaptrt
