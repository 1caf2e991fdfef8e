#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "adaptrt/program/program.h"

namespace adaptrt {

/// Values of AttentionOp::position_bias in the form that kernels read: one for every distance between a
/// program's queries and keys, multiplied by log2(e).
class PositionBiases {
 public:
  explicit PositionBiases(const Program& program);

  /// AttentionRows::bias for heads from `head` on; nullptr for an empty `bias`.
  [[nodiscard]] const float* of(const VectorView& bias, std::int64_t head) const;
  /// AttentionRows::bias_stride.
  [[nodiscard]] std::int64_t stride() const { return stride_; }

 private:
  void add(const AttentionOp& op);

  std::int64_t furthest_;
  std::int64_t stride_;
  /// Keys are the vectors' data pointers, because layers share vectors.
  std::map<const float*, std::vector<float>> spread_;
};

}  // namespace adaptrt
