#pragma once

#include <cmath>

#include "adaptrt/program/ops.h"

namespace adaptrt {

/// Coefficients of xIELU, made from XieluOp::parameters.
struct XieluCoefficients {
  float positive = 0.0F;  ///< a of XieluOp
  float negative = 0.0F;  ///< n
  float linear = 0.0F;    ///< beta
  float bound = 0.0F;     ///< epsilon
};

/// Returns the coefficients of a valid op.
[[nodiscard]] inline XieluCoefficients coefficients_of(const XieluOp& op) {
  constexpr float kLinearFrom = 20.0F;  // softplus(x) is x for such values in float32
  const auto softplus = [](float x) { return x > kLinearFrom ? x : std::log1p(std::exp(x)); };
  const float* given = op.parameters.data;
  return {.positive = softplus(given[0]),
          .negative = given[2] + softplus(given[1]),
          .linear = given[2],
          .bound = given[3]};
}

}  // namespace adaptrt
