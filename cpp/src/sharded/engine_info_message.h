#pragma once

#include "adaptrt/engine/engine.h"
#include "message.h"

namespace adaptrt {

/// Adds all but what only an engine with an encoder or a second level of the KV cache has.
void add_info(const EngineInfo& info, MessageWriter* message);

/// What add_info() has written.
[[nodiscard]] EngineInfo read_info(MessageReader* message);

}  // namespace adaptrt
