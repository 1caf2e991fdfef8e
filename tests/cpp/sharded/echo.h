#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "adaptrt/engine/communicator.h"

namespace adaptrt::testing {

/// Rank 0 of ranks that send back what they receive.
class Echo final : public Communicator {
 public:
  explicit Echo(std::int32_t size) : size_(size) {}

  [[nodiscard]] std::int32_t rank() const override { return 0; }
  [[nodiscard]] std::int32_t size() const override { return size_; }
  [[nodiscard]] bool is_lost() const override { return false; }
  void exchange(std::span<const OutgoingMessage> sent, std::span<const IncomingMessage> received) override {
    for (std::size_t i = 0; i < received.size(); ++i) {
      std::memcpy(received[i].bytes.data(), sent[i].bytes.data(),
                  std::min(received[i].bytes.size(), sent[i].bytes.size()));
    }
  }
  void wait_for(const IncomingMessage& /*message*/) override {}

 private:
  std::int32_t size_;
};

}  // namespace adaptrt::testing
