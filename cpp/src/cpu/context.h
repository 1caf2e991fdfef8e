#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "adaptrt/core/thread_pool.h"
#include "adaptrt/cpu/kernel_table.h"
#include "adaptrt/engine/communicator.h"
#include "adaptrt/program/program.h"
#include "kv_pool.h"
#include "packed_rows.h"
#include "position_bias.h"
#include "ranks/rank_messages.h"
#include "state_memory.h"
#include "step.h"
#include "step_memory.h"

namespace adaptrt {

class OverlappedSum;
class PlacedWeights;
class StepRecorder;

/// The parts of an engine that its ops use. They stay the same from step to step. The engine owns this
/// struct, which outlives the ops.
struct CpuContext {
  const Program& program;
  const KernelTable& kernels;
  ThreadPool& threads;
  StepMemory& memory;
  const KvPool& kv_pool;
  /// Keys and values of encoder inputs.
  const KvPool& cross_pool;
  /// Keys and values of one layer, for attention that needs them only during the op.
  const KvPool& step_local_kv;
  const PositionBiases& position_biases;
  const StateMemory& state_memory;
  /// nullptr: all weights are in memory, where the program's ops point.
  PlacedWeights* weights;
  /// All ranks; nullptr if the program has one rank.
  Communicator* communicator;
  /// The ranks of this stage.
  Communicator* stage_communicator;
  RankMessages& rank_messages;
  OverlappedSum& overlapped_sum;
  /// nullptr: steps are not profiled.
  StepRecorder* recorder;

  [[nodiscard]] const Buffer& buffer(BufferId id) const {
    return program.buffers[static_cast<std::size_t>(id)];
  }
  [[nodiscard]] Rows rows_of(BufferId id) const {
    const Buffer& found = buffer(id);
    return {memory.arena.data() + found.offset, found.dtype, found.width};
  }
  [[nodiscard]] float* scratch(int thread) const {
    return memory.scratch[static_cast<std::size_t>(thread)].data();
  }
};

/// Number of rows of `width` elements for one chunk of a parallel loop that does little per element.
[[nodiscard]] inline std::int64_t rows_per_chunk(std::int64_t width) {
  constexpr std::int64_t kElements = 8192;
  return std::max<std::int64_t>(1, kElements / width);
}

}  // namespace adaptrt
