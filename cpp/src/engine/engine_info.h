#pragma once

#include "adaptrt/engine/engine.h"
#include "adaptrt/engine/program.h"
#include "adaptrt/kernels/kernel_table.h"
#include "kv_pool.h"

namespace adaptrt {

/// What an engine of `program` says of itself.
[[nodiscard]] EngineInfo info_of(const Program& program, const KernelTable& kernels, const KvPool& kv_pool,
                                 const KvPool& cross_pool);

}  // namespace adaptrt
