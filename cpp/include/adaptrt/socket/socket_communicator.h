#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

#include "adaptrt/engine/communicator.h"

namespace adaptrt {

/// Connects two processes over a connected stream socket.
class SocketCommunicator final : public Communicator {
 public:
  /// `rank` is 0 or 1. `socket` is owned and closed here. `peer` names the other process in errors.
  /// `time_limit` is the maximum time that exchange() waits without progress; nullopt waits indefinitely.
  /// `time_to_explain` is the time that another thread has to call lose() after the other process has ended.
  /// Throws ConfigError if `socket` is not a socket; the caller then still owns it.
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

  /// Marks the other process as lost, with the reason that a waiting call and all later calls throw. Called
  /// from any thread that knows the reason. No effect if it is already lost.
  void lose(const std::string& reason);

 private:
  void send(std::span<const std::byte> bytes);
  void receive(std::span<std::byte> bytes, bool has_limit);
  /// Waits until the socket is ready for `events`; throws at the time limit.
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
