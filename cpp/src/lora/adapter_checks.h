#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/lora/host_adapter.h"
#include "adaptrt/lora/layout.h"

namespace adaptrt {

/// Problems of one adapter. Keeps only the first few texts: an adapter may have thousands of rows, all of
/// them wrong.
class AdapterProblems {
 public:
  void add(std::string problem);
  [[nodiscard]] bool empty() const { return count_ == 0; }
  /// Throws AdapterError("<subject>: <problem>; ... and N more") if there are problems.
  void throw_if_any(std::string_view subject);

 private:
  static constexpr std::size_t kMaxTexts = 20;
  Problems problems_;
  std::size_t count_ = 0;
};

/// A tensor [rows, columns] or [1, rows, columns].
struct MatrixShape {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
};

/// A row that passed its checks, with its index in the tensors.
struct CheckedRow {
  AdapterRow row;
  std::size_t index = 0;
};

/// Returns "row 3 (attn_q, layer 0)".
[[nodiscard]] std::string describe_row(const CheckedRow& checked);

/// Number of elements of a row before its padding.
[[nodiscard]] std::size_t row_elements(const AdapterRow& row);

[[nodiscard]] std::optional<DType> weights_dtype(const TensorView& weights, AdapterProblems& problems);
[[nodiscard]] std::optional<MatrixShape> matrix_shape(const TensorView& tensor, std::string_view name,
                                                      AdapterProblems& problems);

/// Refuses elements of a row that are not finite in the engine's type; vectors stay float32.
void check_values(const CheckedRow& checked, const std::byte* data, DType dtype, DType target,
                  AdapterProblems& problems);

/// Refuses rows of lm_head with different A (the engine multiplies by one A) or with missing vocabulary
/// slices. `data`: the elements that the rows' offsets refer to.
void check_lm_head(std::span<const AdapterRow> rows, const std::byte* data, DType dtype,
                   const LoraLayout& layout, AdapterProblems& problems);

/// Refuses nonzero values in the `count` elements after a row.
void check_padding(const CheckedRow& checked, const std::byte* padding, DType dtype, std::size_t count,
                   AdapterProblems& problems);

}  // namespace adaptrt
