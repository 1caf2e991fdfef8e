#pragma once

#include "adaptrt/engine/engine.h"
#include "message.h"

namespace adaptrt {

/// Adds all but what only an engine with a second level of the KV cache has, or one that takes embeddings.
void add_info(const EngineInfo& info, MessageWriter* message);

/// What add_info() has written.
[[nodiscard]] EngineInfo read_info(MessageReader* message);

}  // namespace adaptrt
