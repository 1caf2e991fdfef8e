#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "adaptrt/core/huge_array.h"
#include "adaptrt/cpu/int16_spans.h"
#include "adaptrt/cpu/kernel_table.h"
#include "op_sizes.h"

namespace adaptrt {

/// The current linear layer's input for Int16Gemm, in each permutation of its weights.
class Int16Rows {
 public:
  Int16Rows() = default;
  Int16Rows(const Int16RowSize& size, std::size_t rows)
      : stride_(size.inputs),
        values_(rows * static_cast<std::size_t>(size.inputs) * sizeof(std::int16_t)),
        scales_(rows * static_cast<std::size_t>(size.spans) * sizeof(float)),
        sums_(rows * static_cast<std::size_t>(size.spans) * sizeof(std::int32_t)) {}

  /// Elements between rows.
  [[nodiscard]] std::int64_t stride() const { return stride_; }
  [[nodiscard]] std::int16_t* row(std::int64_t row) const {
    return reinterpret_cast<std::int16_t*>(values_.data()) + row * stride_;
  }
  /// [rows, spans] of the layer.
  [[nodiscard]] float* scales() const { return reinterpret_cast<float*>(scales_.data()); }
  [[nodiscard]] std::int32_t* sums() const { return reinterpret_cast<std::int32_t*>(sums_.data()); }

  /// Rounds a bfloat16 row x [inputs] for weights that are quantised like this.
  void round_row(const KernelTable& kernels, const std::byte* x, std::int64_t inputs, const Quantization& how,
                 std::int64_t number) const {
    const std::int64_t first = number * span_count(how, inputs);
    kernels.round_to_int16(x, inputs, how, row(number), scales() + first, sums() + first);
  }

 private:
  std::int64_t stride_ = 0;
  HugeArray values_;
  HugeArray scales_;
  HugeArray sums_;
};

}  // namespace adaptrt
