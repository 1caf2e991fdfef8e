#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace adaptrt {

/// A message to another rank.
struct OutgoingMessage {
  std::int32_t to = 0;
  std::span<const std::byte> bytes;
};

/// Destination of a message from another rank. Both ranks know its size.
struct IncomingMessage {
  std::int32_t from = 0;
  std::span<std::byte> bytes;
};

/// Number of an exchange that a rank has begun; later exchanges have higher numbers.
using ExchangeNumber = std::int64_t;

/// Exchanges messages between the ranks of one engine. Messages from one rank to another arrive in the order
/// in which they were sent. Only one thread may use it at a time.
class Communicator {
 public:
  virtual ~Communicator() = default;
  [[nodiscard]] virtual std::int32_t rank() const = 0;
  [[nodiscard]] virtual std::int32_t size() const = 0;

  /// Sends and receives at the same time, and returns when all messages have passed. Throws EngineError with
  /// the ranks that did not take part within the communicator's time limit; every later call throws it too.
  virtual void exchange(std::span<const OutgoingMessage> sent, std::span<const IncomingMessage> received) = 0;

  /// Begins an exchange. It continues whenever has_ended() or end_exchange() is called for any exchange.
  /// Until it has ended, the sent bytes must not change, and the received bytes must not be read. All ranks
  /// must begin their exchanges in the same order. A communicator without overlap does the whole exchange
  /// here.
  virtual ExchangeNumber begin_exchange(std::span<const OutgoingMessage> sent,
                                        std::span<const IncomingMessage> received) {
    exchange(sent, received);
    return 0;
  }

  /// True if this exchange and all earlier ones have ended. Throws like exchange() if a rank is known to be
  /// lost; the time limit applies only in end_exchange().
  [[nodiscard]] virtual bool has_ended(ExchangeNumber /*exchange*/) { return true; }

  /// Waits until the exchange has ended. The time limit starts with this call.
  virtual void end_exchange(ExchangeNumber /*exchange*/) {}

  /// True if a call has thrown; every later call then throws.
  [[nodiscard]] virtual bool is_lost() const = 0;

  /// Waits for a message without a time limit, and without keeping a CPU busy.
  virtual void wait_for(const IncomingMessage& message) = 0;
};

}  // namespace adaptrt
