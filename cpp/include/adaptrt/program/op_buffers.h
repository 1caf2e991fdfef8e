#pragma once

#include <vector>

#include "adaptrt/program/program.h"

namespace adaptrt {

/// Buffers whose values an op uses, in order, and buffers in which it begins new values. A buffer that an op
/// changes in place, such as a residual stream, is among its reads.
struct OpBuffers {
  std::vector<BufferId> reads;
  std::vector<BufferId> writes;

  [[nodiscard]] bool does_read(BufferId id) const;
  [[nodiscard]] bool does_write(BufferId id) const;
};

/// Returns the buffers that an op reads and writes. Ids need not belong to existing buffers.
[[nodiscard]] OpBuffers buffers_of(const Op& op, const Program& program);

}  // namespace adaptrt
