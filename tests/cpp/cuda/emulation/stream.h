#pragma once

#include <functional>

namespace adaptrt::cuda::emulation {

/// Submits work to the testing::HostDevice stream with the handle `stream`, which captures and delays it like
/// copies. nullptr is the stream that runs it at once.
void submit(void* stream, std::function<void()> work);

}  // namespace adaptrt::cuda::emulation
