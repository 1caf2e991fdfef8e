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

/// Which exchange one is of those that a rank has begun: the numbers ascend.
using ExchangeNumber = std::int64_t;

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

  /// Begins what exchange() does. It goes on in has_ended() and end_exchange(), of whichever exchange; until
  /// it has ended, what is sent stays as it is and what is received is not looked at. All ranks begin their
  /// exchanges in the same order. A communicator that cannot do two things at a time does all of it here.
  virtual ExchangeNumber begin_exchange(std::span<const OutgoingMessage> sent,
                                        std::span<const IncomingMessage> received) {
    exchange(sent, received);
    return 0;
  }

  /// Whether this exchange has happened, and all that were begun before it. Throws as exchange() does where a
  /// rank is known to be lost; silence is left to end_exchange().
  [[nodiscard]] virtual bool has_ended(ExchangeNumber /*exchange*/) { return true; }

  /// Returns when it has ended. The time limit is counted from this call on.
  virtual void end_exchange(ExchangeNumber /*exchange*/) {}

  /// Whether a call has thrown, so that every later one will.
  [[nodiscard]] virtual bool is_lost() const = 0;

  /// Waits for a message without a limit of time, and without keeping a CPU busy.
  virtual void wait_for(const IncomingMessage& message) = 0;
};

}  // namespace adaptrt
