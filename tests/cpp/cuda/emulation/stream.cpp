#include "emulation/stream.h"

#include <utility>

#include "support/host_device.h"

namespace adaptrt::cuda::emulation {

void submit(void* stream, std::function<void()> work) {
  if (stream == nullptr) {
    work();
  } else {
    testing::submit(testing::host_stream(stream), std::move(work));
  }
}

}  // namespace adaptrt::cuda::emulation
