#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "adaptrt/engine/communicator.h"
#include "adaptrt/engine/engine.h"

namespace adaptrt {

// An engine of several ranks: each process runs the program of its rank, with its share of the weights, of
// the KV pool and of the adapters. Rank 0 has the executor; the others do what it tells them.

/// What an engine of several stages is, as rank 0's own stage does not know: EngineInfo's of the last stage,
/// and the least of all.
struct PipelineFacts {
  std::int64_t hidden_size = 0;
  bool has_logits = true;
  std::int32_t max_reusable_prompt_len = 0;
  /// Layers of all stages together.
  std::int32_t num_layers = 0;
  /// The largest of all stages, which may have different numbers of layers: all have as many blocks.
  std::size_t kv_block_bytes = 0;
  std::size_t cross_kv_block_bytes = 0;
};

/// Rank 0's. `local` runs its own program and talks to the others over `communicator`, where each of them is
/// in serve_rank(). What a rank has no memory for ends in ConfigError that names it; a rank that is lost, in
/// EngineError. KV blocks are in pieces on every rank, and cannot be read. Steps of a pipeline pass through
/// its stages in pieces, so that all work at the same time. A `profile` is that which `local` records its
/// steps in: they become parts of whole steps there, beside what rank 0 sends and waits for.
[[nodiscard]] std::unique_ptr<Engine> make_sharded_engine(std::shared_ptr<Engine> local,
                                                          std::shared_ptr<Communicator> communicator,
                                                          const std::optional<PipelineFacts>& pipeline = {},
                                                          std::shared_ptr<StepProfile> profile = nullptr);

/// Any other rank's: runs `local` as rank 0 says, and returns when the engine there has ended its steps.
/// Throws EngineError when a rank is lost.
void serve_rank(Engine& local, Communicator& communicator);

}  // namespace adaptrt
