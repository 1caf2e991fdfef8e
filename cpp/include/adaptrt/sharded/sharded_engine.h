#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "adaptrt/engine/communicator.h"
#include "adaptrt/engine/engine.h"

namespace adaptrt {

// An engine of several ranks. Each process runs the program of its rank with its share of the weights, the KV
// pool and the adapters. Rank 0 has the executor and commands the other ranks.

/// Facts about a whole pipeline that rank 0's own stage does not know. They come from the EngineInfo of the
/// last stage; limits are the smallest of all stages.
struct PipelineFacts {
  std::int64_t hidden_size = 0;
  bool has_logits = true;
  std::int32_t max_reusable_prompt_len = 0;
  /// Number of layers of all stages.
  std::int32_t num_layers = 0;
  /// Maximum over all stages: stages may have different numbers of layers, but all have the same number of
  /// blocks.
  std::size_t kv_block_bytes = 0;
  std::size_t cross_kv_block_bytes = 0;
  std::size_t state_bytes = 0;
};

/// Makes rank 0's engine. `local` runs rank 0's own program; the other ranks must be in serve_rank() on
/// `communicator`. Methods throw ConfigError, with the rank, if a rank cannot allocate memory, and
/// EngineError if a rank is lost. KV blocks are split over the ranks and cannot be read. In a pipeline, steps
/// pass through the stages as micro-batches, so that all stages work at the same time. `profile` must be the
/// one in which `local` records its steps. It then gets whole steps, including the time that rank 0 spends on
/// sending and waiting.
[[nodiscard]] std::unique_ptr<Engine> make_sharded_engine(std::shared_ptr<Engine> local,
                                                          std::shared_ptr<Communicator> communicator,
                                                          const std::optional<PipelineFacts>& pipeline = {},
                                                          std::shared_ptr<StepProfile> profile = nullptr);

/// Serves any other rank: runs `local` on rank 0's commands, and returns after the last one. Throws
/// EngineError if a rank is lost.
void serve_rank(Engine& local, Communicator& communicator);

}  // namespace adaptrt
