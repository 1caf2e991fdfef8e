#pragma once

#include <vector>

#include "adaptrt/program/program.h"

namespace adaptrt {

/// Buffers that an op reads, in order, and buffers that it fills with new values. A buffer that an op changes
/// in place, such as a residual stream, is among `reads`.
struct OpBuffers {
  std::vector<BufferId> reads;
  std::vector<BufferId> writes;

  [[nodiscard]] bool does_read(BufferId id) const;
  [[nodiscard]] bool does_write(BufferId id) const;
};

/// Returns the buffers that an op reads and writes. Ids need not belong to existing buffers.
[[nodiscard]] OpBuffers buffers_of(const Op& op, const Program& program);

}  // namespace adaptrt
