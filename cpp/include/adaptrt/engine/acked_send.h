#pragma once

#include <cstddef>

#include "adaptrt/engine/communicator.h"

namespace adaptrt {

/// Sends the last message of a step, and waits until the other rank acknowledges it, at most for the time
/// limit of an exchange. Without the acknowledgement a rank that hangs would not be noticed, because a short
/// message counts as sent before it is received.
inline void acked_send(const OutgoingMessage& message, Communicator& communicator) {
  std::byte taken{};
  const IncomingMessage receipt{message.to, {&taken, 1}};
  communicator.exchange({&message, 1}, {&receipt, 1});
}

/// Acknowledges the message of a rank that waits in acked_send().
inline void acknowledge(std::int32_t rank, Communicator& communicator) {
  constexpr std::byte kTaken{1};
  const OutgoingMessage receipt{rank, {&kTaken, 1}};
  communicator.exchange({&receipt, 1}, {});
}

}  // namespace adaptrt
