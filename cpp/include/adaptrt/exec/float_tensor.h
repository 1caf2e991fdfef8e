#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace adaptrt {

/// float32 values in C order; copies share them.
struct FloatTensor {
  std::shared_ptr<const std::vector<float>> values;
  std::vector<std::int64_t> shape;
};

}  // namespace adaptrt
