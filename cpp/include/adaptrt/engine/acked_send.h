#pragma once

#include <cstddef>

#include "adaptrt/engine/communicator.h"

namespace adaptrt {

/// Sends what ends a step, and waits as long as an exchange may until the other rank has taken it: a short
/// message counts as sent before anybody takes it, and nobody would notice a rank that hangs from then on.
inline void acked_send(const OutgoingMessage& message, Communicator& communicator) {
  std::byte taken{};
  const IncomingMessage receipt{message.to, {&taken, 1}};
  communicator.exchange({&message, 1}, {&receipt, 1});
}

/// Tells a rank, which is in acked_send(), that what it has sent is here.
inline void acknowledge(std::int32_t rank, Communicator& communicator) {
  constexpr std::byte kTaken{1};
  const OutgoingMessage receipt{rank, {&kTaken, 1}};
  communicator.exchange({&receipt, 1}, {});
}

}  // namespace adaptrt
