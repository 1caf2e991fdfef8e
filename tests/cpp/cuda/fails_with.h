#pragma once

#include <boost/test/unit_test.hpp>
#include <functional>
#include <string>

#include "emulation/grid.h"

namespace adaptrt::cuda::emulation_test {

/// True if a launch fails with a message that contains `part`.
inline bool fails_with(const std::function<void()>& launch, const std::string& part) {
  try {
    launch();
  } catch (const emulation::EmulationError& error) {
    BOOST_TEST_MESSAGE(error.what());
    return std::string(error.what()).find(part) != std::string::npos;
  }
  return false;
}

}  // namespace adaptrt::cuda::emulation_test
