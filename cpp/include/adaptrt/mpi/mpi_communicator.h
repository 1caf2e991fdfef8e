#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "adaptrt/engine/communicator.h"

namespace adaptrt {

/// A communicator of an MPI library that the process has initialised. The library's handles are numbers or
/// pointers of `handle_bytes` bytes.
struct MpiHandles {
  /// Shared library in which MPI's functions are found, such as an extension module linked to MPI.
  std::string library;
  std::int32_t handle_bytes = 0;
  std::uint64_t communicator = 0;
  /// MPI_BYTE.
  std::uint64_t byte_type = 0;
};

/// Makes a communicator over MPI. `time_limit` is the maximum wait of exchange(). Throws ConfigError if the
/// library lacks an MPI function, or if its handles are neither numbers nor pointers.
[[nodiscard]] std::shared_ptr<Communicator> make_mpi_communicator(const MpiHandles& handles,
                                                                  std::chrono::milliseconds time_limit);

}  // namespace adaptrt
