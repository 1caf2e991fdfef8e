#pragma once

#include <vector>

#include "adaptrt/engine/communicator.h"

namespace adaptrt {

/// Messages of one exchange. Steps reuse the memory, so they allocate nothing.
struct RankMessages {
  std::vector<OutgoingMessage> sent;
  std::vector<IncomingMessage> received;

  void clear() {
    sent.clear();
    received.clear();
  }
};

}  // namespace adaptrt
