#include "attention_plan.h"

#include <algorithm>
#include <tuple>

namespace adaptrt {
namespace {

/// Rows (positions times the query heads that share a key-value head) that share a tile's keys and values.
constexpr std::int64_t kTargetRows = 48;

}  // namespace

std::int64_t positions_per_task(const ModelShape& shape) {
  return std::max<std::int64_t>(1, kTargetRows * shape.num_key_value_heads / shape.num_attention_heads);
}

void plan_attention(const StepInput& input, const ModelShape& shape, std::vector<AttentionTask>* tasks) {
  const auto most = static_cast<std::int32_t>(positions_per_task(shape));
  const auto heads = static_cast<std::int32_t>(shape.num_key_value_heads);
  tasks->clear();
  for (std::size_t sequence = 0; sequence < input.prompt_lengths.size(); ++sequence) {
    const std::int32_t end = input.sequence_offsets[sequence + 1];
    for (std::int32_t first = input.sequence_offsets[sequence]; first < end; first += most) {
      for (std::int32_t head = 0; head < heads; ++head) {
        tasks->push_back({static_cast<std::int32_t>(sequence), first, std::min(most, end - first), head});
      }
    }
  }
  const auto order = [&](const AttentionTask& task) {
    const std::int64_t keys = input.positions[static_cast<std::size_t>(task.first_token)] + 1;
    return std::tuple(-task.tokens * keys, task.first_token, task.kv_head);
  };
  // std::stable_sort would allocate.
  std::sort(tasks->begin(), tasks->end(),
            [&](const AttentionTask& a, const AttentionTask& b) { return order(a) < order(b); });
}

}  // namespace adaptrt
