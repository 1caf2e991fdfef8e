#include "position_bias.h"

#include <algorithm>
#include <numbers>

#include "adaptrt/cpu/attention_tile.h"
#include "op_members.h"

namespace adaptrt {

PositionBiases::PositionBiases(const Program& program)
    : furthest_(std::max(program.max_seq_len, program.max_encoder_input_len)),
      stride_(2 * furthest_ + kKeyGroup) {
  for_each_member<AttentionOp>(program, [&](const AttentionOp& op) { add(op); });
}

void PositionBiases::add(const AttentionOp& op) {
  const VectorView& bias = op.position_bias;
  const std::int64_t heads = op.shape.num_attention_heads;
  if (bias.size == 0) return;
  std::vector<float>& values = spread_[bias.data];
  if (!values.empty()) return;
  values.resize(static_cast<std::size_t>(heads * stride_));
  const std::int64_t width = bias.size / heads;
  const std::int64_t reach = width / 2;
  for (std::int64_t head = 0; head < heads; ++head) {
    for (std::int64_t i = 0; i < stride_; ++i) {
      const std::int64_t distance = std::clamp(i - furthest_, -reach, reach);
      values[static_cast<std::size_t>(head * stride_ + i)] =
          bias.data[head * width + reach + distance] * std::numbers::log2e_v<float>;
    }
  }
}

const float* PositionBiases::of(const VectorView& bias, std::int64_t head) const {
  if (bias.size == 0) return nullptr;
  return spread_.at(bias.data).data() + head * stride_ + furthest_;
}

}  // namespace adaptrt
