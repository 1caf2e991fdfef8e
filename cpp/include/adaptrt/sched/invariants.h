#pragma once

#include <string>
#include <vector>

#include "adaptrt/lora/lora_cache.h"
#include "adaptrt/sched/scheduler.h"

namespace adaptrt {

/// Lists every violated invariant of the scheduler, its sequences' memory and the LoRA cache; empty if none.
/// Tests call it after every plan, commit, add and remove. `lora_cache` may be nullptr.
[[nodiscard]] std::vector<std::string> check_invariants(const Scheduler& scheduler,
                                                        const LoraCache* lora_cache);

/// The same for a new plan: token budgets, order of tokens, memory that covers them, leases.
[[nodiscard]] std::vector<std::string> check_invariants(const StepPlan& plan, const Scheduler& scheduler);

}  // namespace adaptrt
