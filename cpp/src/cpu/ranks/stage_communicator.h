#pragma once

#include <memory>

#include "adaptrt/engine/communicator.h"
#include "adaptrt/program/program.h"

namespace adaptrt {

/// Communicator of the ranks of one pipeline stage, counted from 0: a view of `all`, or `all` itself if there
/// is one stage.
[[nodiscard]] std::shared_ptr<Communicator> communicator_of_stage(const Program& program,
                                                                  const std::shared_ptr<Communicator>& all);

}  // namespace adaptrt
