#pragma once

#include <cstddef>
#include <cstdint>

#include "adaptrt/program/program.h"

namespace adaptrt {

inline float* floats(std::byte* address) {
  return reinterpret_cast<float*>(address);
}

inline std::int64_t width_of(const Program& program, BufferId id) {
  return program.buffers[static_cast<std::size_t>(id)].width;
}

}  // namespace adaptrt
