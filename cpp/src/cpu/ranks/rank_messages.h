#pragma once

#include <vector>

#include "adaptrt/engine/communicator.h"

namespace adaptrt {

/// Messages of one exchange. The memory is kept from step to step, so that steps allocate nothing.
struct RankMessages {
  std::vector<OutgoingMessage> sent;
  std::vector<IncomingMessage> received;

  void clear() {
    sent.clear();
    received.clear();
  }
};

}  // namespace adaptrt
