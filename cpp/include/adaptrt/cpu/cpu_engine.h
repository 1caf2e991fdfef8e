#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "adaptrt/core/thread_pool.h"
#include "adaptrt/engine/communicator.h"
#include "adaptrt/engine/engine.h"
#include "adaptrt/engine/step_profile.h"
#include "adaptrt/program/program.h"

namespace adaptrt {

struct KernelTable;

/// EngineInfo::kv_block_bytes of a program's engine.
[[nodiscard]] std::size_t kv_block_bytes(const Program& program);

/// Returns what an executor would know of the CPU engine of a valid program. Allocates no blocks and reads no
/// weights. `kernels` as in make_cpu_engine. With several pipeline stages, the facts are the first stage's,
/// and its attention windows are left out as in an engine of all stages. Throws ConfigError for kernels that
/// this CPU cannot run.
[[nodiscard]] EngineInfo cpu_engine_info(const Program& program, std::string_view kernels);

/// How often the tokens of a text used what ops of a body choose from. Which weights are kept in memory may
/// depend on it, and no result does.
struct WeightUsage {
  std::int64_t tokens = 0;  ///< 0: nothing is known
  /// By op: of a layer that a ReLU gates, how often each neuron's gate was open; of experts, how often each
  /// was taken.
  std::map<std::size_t, std::vector<std::uint32_t>> of_ops;
};

/// A usage that an engine counts while other threads read it.
class WeightUsageCounter {
 public:
  explicit WeightUsageCounter(WeightUsage usage = {}) : usage_(std::move(usage)) {}

  [[nodiscard]] WeightUsage read() const {
    const std::lock_guard lock(mutex_);
    return usage_;
  }
  /// Calls change(WeightUsage&), which must not throw half-way.
  template <class Change>
  void update(const Change& change) {
    const std::lock_guard lock(mutex_);
    change(usage_);
  }

 private:
  mutable std::mutex mutex_;
  WeightUsage usage_;
};

/// Memory for the weights of a program that is mapped from an engine file.
struct WeightMemory {
  std::string path;
  /// The whole file, as the program refers to it.
  std::span<const std::byte> mapping;
  /// Bytes of the resident weights, and of the memory that others are read into.
  std::size_t bytes = 0;
  WeightUsage usage = {};
};

/// Throws ConfigError if a program's engine cannot have a weight memory of this size. Reads neither the file
/// nor the mapping.
void check_weight_memory(const Program& program, const WeightMemory& memory);

/// The CPU engine. Weights in `program` must outlive it; `pool` is used during step(). `kernels` names a
/// table of kernels/kernel_table.h; empty for the one that is chosen for this CPU. With a `profile`, every op
/// of every step is timed and recorded there, and the pool measures its busy time. `communicator` is that of
/// a program of several ranks. With `weight_memory`, as many weights as fit into it are kept in memory, and
/// the others are read from the file as they are used; the mapping is not read. Every step adds what it used
/// to `usage`. Throws EngineError with all
/// of program.validate()'s problems, for a communicator of other ranks and a file that cannot be read,
/// ConfigError for kernels that this CPU cannot run and for less memory than the weights need at least.
[[nodiscard]] std::unique_ptr<Engine> make_cpu_engine(Program program, std::shared_ptr<ThreadPool> pool,
                                                      std::string_view kernels = {},
                                                      std::shared_ptr<StepProfile> profile = nullptr,
                                                      std::shared_ptr<Communicator> communicator = nullptr,
                                                      const WeightMemory* weight_memory = nullptr,
                                                      std::shared_ptr<WeightUsageCounter> usage = nullptr);
/// The same with a table of kernels that outlives the engine.
[[nodiscard]] std::unique_ptr<Engine> make_cpu_engine(Program program, std::shared_ptr<ThreadPool> pool,
                                                      const KernelTable& kernels,
                                                      std::shared_ptr<StepProfile> profile = nullptr,
                                                      std::shared_ptr<Communicator> communicator = nullptr,
                                                      const WeightMemory* weight_memory = nullptr,
                                                      std::shared_ptr<WeightUsageCounter> usage = nullptr);

}  // namespace adaptrt
