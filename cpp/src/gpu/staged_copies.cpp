#include "adaptrt/gpu/staged_copies.h"

#include <algorithm>
#include <cstring>

namespace adaptrt {

StagedCopies::StagedCopies(Device& device, Stream& stream, std::size_t half_bytes) : stream_(stream) {
  for (Half& half : halves_) half = {device.allocate_pinned(half_bytes), device.make_event()};
}

void StagedCopies::copy(std::byte* to, std::span<const std::byte> from) {
  for (std::size_t done = 0; done < from.size();) {
    Half& half = halves_[next_half_];
    next_half_ = (next_half_ + 1) % halves_.size();
    half.copied->synchronize();
    const std::size_t bytes = std::min(half.memory.bytes(), from.size() - done);
    std::memcpy(half.memory.data(), from.data() + done, bytes);
    stream_.copy_to_device(to + done, half.memory.data(), bytes);
    stream_.record(*half.copied);
    done += bytes;
  }
}

void StagedCopies::finish() {
  stream_.synchronize();
  for (Half& half : halves_) half = {};
}

}  // namespace adaptrt
