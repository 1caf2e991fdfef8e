#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <string>

#include "engine_handle.h"

namespace adaptrt::bindings {

/// A native engine made by Python, and the Python object that keeps its weights mapped.
class CpuEngine : public EngineHandle {
 public:
  /// `storage` lives as long as the engine does, whoever holds it last. `kernels` and `profile` as in
  /// make_cpu_engine, `identity` is Program::identity. With `beside`, another engine whose steps the same
  /// thread runs, num_threads is without effect: they share their threads. `communicator` is that of a
  /// program of several ranks; `weight_memory` as in make_cpu_engine, `storage` owns its mapping.
  /// `mapped_file` is Program::mapped_file.
  CpuEngine(Program program, pybind11::object storage, int num_threads, const std::string& kernels,
            std::optional<std::shared_ptr<StepProfile>> profile, const std::string& identity,
            std::optional<const CpuEngine*> beside, std::optional<std::shared_ptr<Communicator>> communicator,
            const std::optional<WeightMemory>& weight_memory,
            std::optional<std::shared_ptr<WeightUsageCounter>> usage,
            std::optional<std::shared_ptr<MappedFile>> mapped_file);

 private:
  std::weak_ptr<ThreadPool> pool_;  // the engine keeps it for as long as it needs it
};

}  // namespace adaptrt::bindings
