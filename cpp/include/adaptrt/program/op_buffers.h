#pragma once

#include <vector>

#include "adaptrt/program/program.h"

namespace adaptrt {

/// The buffers whose values an op uses, in order, and those in which it begins new values. A buffer that an
/// op changes in place, such as a residual stream, is among its reads.
struct OpBuffers {
  std::vector<BufferId> reads;
  std::vector<BufferId> writes;

  [[nodiscard]] bool does_read(BufferId id) const;
  [[nodiscard]] bool does_write(BufferId id) const;
};

/// The one place that says what each kind of op reads and writes. Ids need not be those of buffers.
[[nodiscard]] OpBuffers buffers_of(const Op& op, const Program& program);

}  // namespace adaptrt
