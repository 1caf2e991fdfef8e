#pragma once

#include "adaptrt/engine/engine.h"
#include "message.h"

namespace adaptrt {

/// Writes all fields except those for a second level of the KV cache and for prompt embeddings.
void add_info(const EngineInfo& info, MessageWriter* message);

/// Reads the data that add_info() writes.
[[nodiscard]] EngineInfo read_info(MessageReader* message);

}  // namespace adaptrt
