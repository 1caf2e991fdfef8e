#pragma once

// Weight formats of the tests' models.

#include <cstdint>

#include "adaptrt/core/dtype.h"
#include "adaptrt/core/panels.h"

namespace adaptrt::testing {

inline constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
inline constexpr Quantization kQuantizations[] = {
    {.algo = QuantAlgo::kW8A16},
    {.algo = QuantAlgo::kW8A8},
    {.algo = QuantAlgo::kW4A16, .group_size = 16},
    {.algo = QuantAlgo::kW4A16, .group_size = 32, .zero_points = true},
    {.algo = QuantAlgo::kW4A16, .group_size = 8, .zero_points = true, .scale_type = DType::kFloat16},
    {.algo = QuantAlgo::kW8A16, .group_size = 24, .scale_type = DType::kFloat16},
    {.algo = QuantAlgo::kW8A16, .zero_points = true},
    {.algo = QuantAlgo::kW8A16, .group_size = 24, .zero_points = true, .act_order = true},
    {.algo = QuantAlgo::kW4A16, .group_size = 16, .scale_type = DType::kFloat16, .act_order = true},
    {.algo = QuantAlgo::kW4A16, .group_size = 16, .minimums = true, .scale_type = DType::kFloat32},
    {.algo = QuantAlgo::kW8A16, .group_size = 16, .minimums = true, .scale_type = DType::kFloat16},
    {.algo = QuantAlgo::kW4A8, .group_size = 16, .zero_points = true},
    {.algo = QuantAlgo::kW4A8, .group_size = 8, .scale_type = DType::kFloat16},
};
/// LLM.int8() in an engine of type `dtype`.
inline Quantization llm_int8(DType dtype) {
  return {.algo = QuantAlgo::kW8A16,
          .scale_type = DType::kFloat32,
          .code = WeightCode::kLLMInt8,
          .value_type = dtype};
}

/// NF4 in an engine of type `dtype`.
inline Quantization codebook(DType dtype) {
  return {.algo = QuantAlgo::kW4A16,
          .group_size = 8,
          .scale_type = DType::kFloat32,
          .code = WeightCode::kNF4,
          .value_type = dtype == DType::kFloat32 ? DType::kBFloat16 : dtype};
}
/// FP8 with this group size.
inline Quantization float8(DType dtype, std::int64_t group_size) {
  return {.algo = QuantAlgo::kW8A16,
          .group_size = group_size,
          .scale_type = DType::kFloat32,
          .code = WeightCode::kE4M3,
          .value_type = dtype};
}

}  // namespace adaptrt::testing
