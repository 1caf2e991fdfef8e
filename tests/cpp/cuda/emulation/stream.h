#pragma once

#include <functional>

namespace adaptrt::cuda::emulation {

/// Puts work into the stream of a testing::HostDevice that `stream` is the handle of, which captures and
/// delays it as it does copies; nullptr is the stream that does it at once.
void submit(void* stream, std::function<void()> work);

}  // namespace adaptrt::cuda::emulation
