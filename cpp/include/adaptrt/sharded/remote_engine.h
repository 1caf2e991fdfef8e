#pragma once

#include <memory>

#include "adaptrt/engine/communicator.h"
#include "adaptrt/engine/engine.h"

namespace adaptrt {

// An engine whose steps other processes run: the executor, its scheduler, caches and sampler are in one
// process, which has no share of the engine; rank 0 of those that have, the leader, does what that one says.
// Each has an end of a communicator of two, on which the executor's process is rank 0.

/// The executor's end. Waits until the leader is in serve_engine(), and has its EngineInfo. What there is no
/// memory for ends in ConfigError, a process that is lost in EngineError. KV blocks cannot be read.
[[nodiscard]] std::unique_ptr<Engine> make_remote_engine(std::shared_ptr<Communicator> communicator);

/// The leader's end: runs `engine` until the other one ends its steps, or has gone. Throws EngineError when
/// the engine is unusable, which the other end is told if it can be.
void serve_engine(Engine& engine, Communicator& communicator);

}  // namespace adaptrt
