#pragma once

#include "adaptrt/cpu/kernel_table.h"
#include "adaptrt/engine/engine.h"
#include "adaptrt/program/program.h"
#include "kv_pool.h"
#include "state_memory.h"

namespace adaptrt {

/// Returns the EngineInfo of a CPU engine that runs `program`.
[[nodiscard]] EngineInfo info_of(const Program& program, const KernelTable& kernels, const KvPool& kv_pool,
                                 const KvPool& cross_pool, const StateMemory& state_memory);

}  // namespace adaptrt
