#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "adaptrt/engine/communicator.h"

namespace adaptrt {

/// A communicator of an MPI library that the process has initialised. Its handles are numbers or pointers,
/// whichever the library has; `handle_bytes` says how long.
struct MpiHandles {
  /// A shared library through which MPI's functions are found, such as an extension module linked to it.
  std::string library;
  std::int32_t handle_bytes = 0;
  std::uint64_t communicator = 0;
  /// MPI_BYTE.
  std::uint64_t byte_type = 0;
};

/// Ranks that talk over MPI. `time_limit` is what exchange() waits for others at most. Throws ConfigError
/// where the library lacks a function of MPI, or its handles are neither numbers nor pointers.
[[nodiscard]] std::shared_ptr<Communicator> make_mpi_communicator(const MpiHandles& handles,
                                                                  std::chrono::milliseconds time_limit);

}  // namespace adaptrt
