#pragma once

#include <cstdint>

namespace adaptrt {

/// A range of consecutive layers.
struct StageLayers {
  std::int32_t first = 0;
  std::int32_t count = 0;
};

/// Returns the layers of a pipeline stage, distributed as in vLLM. Every stage gets num_layers / num_stages
/// layers. The remaining layers go, one each, to the last stage but one and to the stages before it. The last
/// stage gets none of them because it also computes the logits.
///
/// `num_stages` is at least 1, `stage` is from 0 to num_stages - 1.
[[nodiscard]] constexpr StageLayers stage_layers(std::int32_t num_layers, std::int32_t num_stages,
                                                 std::int32_t stage) {
  const std::int32_t each = num_layers / num_stages, left_over = num_layers % num_stages;
  const std::int32_t first_with_more = num_stages - 1 - left_over;
  const auto more_before = [&](std::int32_t before) {
    const std::int32_t more = before - first_with_more;
    return more < 0 ? 0 : (more > left_over ? left_over : more);
  };
  const std::int32_t first = each * stage + more_before(stage);
  return {first, each * (stage + 1) + more_before(stage + 1) - first};
}

}  // namespace adaptrt
