#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>

#include "engine_handle.h"

namespace adaptrt::bindings {

/// A native engine made by Python, and the Python object that keeps its weights mapped.
class CpuEngine : public EngineHandle {
 public:
  /// `storage` lives as long as the engine does, whoever holds it last. `kernels` and `profile` as in
  /// make_cpu_engine, `identity` is Program::identity.
  CpuEngine(Program program, pybind11::object storage, int num_threads, const std::string& kernels,
            std::shared_ptr<StepProfile> profile, const std::string& identity);
};

}  // namespace adaptrt::bindings
