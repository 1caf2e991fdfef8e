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

/// Returns EngineInfo::kv_block_bytes of a program's engine.
[[nodiscard]] std::size_t kv_block_bytes(const Program& program);

/// Returns the EngineInfo of the CPU engine of a valid program, without allocating blocks or reading weights.
/// `kernels`: see make_cpu_engine. With several pipeline stages, it is the info of the first stage without
/// its attention windows, which an engine of all stages does not have either. Throws ConfigError for kernels
/// that this CPU cannot run.
[[nodiscard]] EngineInfo cpu_engine_info(const Program& program, std::string_view kernels);

/// Numbers of tokens that used the neurons and experts of a body. They may decide which weights stay in
/// memory, but results do not depend on them.
struct WeightUsage {
  std::int64_t tokens = 0;  ///< number of counted tokens; 0: nothing is known
  /// Counts by the op's index. ReLU-gated layer: number of tokens that opened each neuron's gate. Experts:
  /// number of tokens that chose each expert.
  std::map<std::size_t, std::vector<std::uint32_t>> of_ops;
};

/// WeightUsage that an engine updates while other threads read it.
class WeightUsageCounter {
 public:
  explicit WeightUsageCounter(WeightUsage usage = {}) : usage_(std::move(usage)) {}

  [[nodiscard]] WeightUsage read() const {
    const std::lock_guard lock(mutex_);
    return usage_;
  }
  /// Calls change(WeightUsage&), which must not throw after it has changed something.
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
  /// The whole file, mapped; the program's weights point into it.
  std::span<const std::byte> mapping;
  /// Bytes for resident weights and for the memory into which other weights are read.
  std::size_t bytes = 0;
  WeightUsage usage = {};
};

/// Throws ConfigError if a program's engine cannot have a weight memory of this size. Reads neither the file
/// nor the mapping.
void check_weight_memory(const Program& program, const WeightMemory& memory);

/// Makes the CPU engine of a program. Weights in `program` must outlive the engine.
///
/// - `pool`: used during step().
/// - `kernels`: name of a KernelTable; empty: the table that is chosen for this CPU.
/// - `profile`: the engine times every op of every step and records it here; the pool measures its busy time.
/// - `communicator`: needed for a program of several ranks.
/// - `weight_memory`: as many weights as fit stay in memory; the others are read from the file when they are
///   used. The mapping is not read.
/// - `usage`: every step adds the neurons and experts that it used.
///
/// Throws EngineError with all problems of program.validate(), for a communicator with other ranks, and for a
/// file that cannot be read. Throws ConfigError for kernels that this CPU cannot run, and if `weight_memory`
/// is smaller than the weights need at least.
[[nodiscard]] std::unique_ptr<Engine> make_cpu_engine(Program program, std::shared_ptr<ThreadPool> pool,
                                                      std::string_view kernels = {},
                                                      std::shared_ptr<StepProfile> profile = nullptr,
                                                      std::shared_ptr<Communicator> communicator = nullptr,
                                                      const WeightMemory* weight_memory = nullptr,
                                                      std::shared_ptr<WeightUsageCounter> usage = nullptr);
/// The same with a table of kernels, which must outlive the engine.
[[nodiscard]] std::unique_ptr<Engine> make_cpu_engine(Program program, std::shared_ptr<ThreadPool> pool,
                                                      const KernelTable& kernels,
                                                      std::shared_ptr<StepProfile> profile = nullptr,
                                                      std::shared_ptr<Communicator> communicator = nullptr,
                                                      const WeightMemory* weight_memory = nullptr,
                                                      std::shared_ptr<WeightUsageCounter> usage = nullptr);

}  // namespace adaptrt
