#pragma once

#include <memory>

#include "adaptrt/engine/communicator.h"
#include "adaptrt/engine/engine.h"

namespace adaptrt {

// An engine that runs in other processes. One process has the executor with its scheduler, caches and
// sampler, and no part of the engine. The leader, rank 0 of the engine's ranks, follows its commands. The two
// are connected by a communicator of two ranks, on which the executor's process is rank 0.

/// Makes the executor's end. Waits until the leader is in serve_engine() and has sent its EngineInfo. Its
/// methods throw ConfigError if memory cannot be allocated and EngineError if a process is lost. KV blocks
/// cannot be read.
[[nodiscard]] std::unique_ptr<Engine> make_remote_engine(std::shared_ptr<Communicator> communicator);

/// Runs the leader's end: commands run on `engine` until the other end sends the last one or is lost. Throws
/// EngineError if the engine is unusable; the other end is told if possible.
void serve_engine(Engine& engine, Communicator& communicator);

}  // namespace adaptrt
