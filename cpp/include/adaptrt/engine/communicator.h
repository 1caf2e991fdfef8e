#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace adaptrt {

/// What a rank sends to another.
struct OutgoingMessage {
  std::int32_t to = 0;
  std::span<const std::byte> bytes;
};

/// Where what another rank sends goes; both sides know its size.
struct IncomingMessage {
  std::int32_t from = 0;
  std::span<std::byte> bytes;
};

/// How the ranks of one engine talk to each other. Messages from one rank to another come in the order in
/// which they were sent. One thread at a time.
class Communicator {
 public:
  virtual ~Communicator() = default;
  [[nodiscard]] virtual std::int32_t rank() const = 0;
  [[nodiscard]] virtual std::int32_t size() const = 0;

  /// Sends and receives at the same time, and returns when all of it has happened. Throws EngineError that
  /// names the ranks that have not done their part within the communicator's time limit; every later call
  /// throws it as well.
  virtual void exchange(std::span<const OutgoingMessage> sent, std::span<const IncomingMessage> received) = 0;

  /// Whether a call has thrown, so that every later one will.
  [[nodiscard]] virtual bool is_lost() const = 0;

  /// Waits for a message without a limit of time, and without keeping a CPU busy.
  virtual void wait_for(const IncomingMessage& message) = 0;
};

}  // namespace adaptrt
