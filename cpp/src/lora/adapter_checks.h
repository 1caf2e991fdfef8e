#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
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

/// Number of elements of a row's A and B.
[[nodiscard]] std::size_t matrix_elements(const AdapterRow& row);

/// Number of elements of a row before its padding.
[[nodiscard]] std::size_t row_elements(const AdapterRow& row);

[[nodiscard]] std::optional<DType> weights_dtype(const TensorView& weights, AdapterProblems& problems);
[[nodiscard]] std::optional<MatrixShape> matrix_shape(const TensorView& tensor, std::string_view name,
                                                      AdapterProblems& problems);

/// Place of an element in its row: in A or B, or in a magnitude or shift.
enum class ValueKind : std::uint8_t { kMatrix, kVector };

/// Finds elements of an adapter's rows that are not finite in the engine's type (vectors stay float32), and
/// elements of norms' A and B that are not zero. Elements come in pieces, in any order.
class ValueChecks {
 public:
  /// `dtype`: the type of the elements. `target`: the engine's.
  ValueChecks(std::span<const AdapterRow> rows, DType dtype, DType target)
      : rows_(rows), dtype_(dtype), target_(target), bad_(rows.size()) {}

  /// Checks `count` elements of row `row`, the first of which is element `first` of the row.
  void check(std::size_t row, std::size_t first, const std::byte* values, std::size_t count, ValueKind kind);
  /// Checks a whole row.
  void check_row(std::size_t row, const std::byte* values);
  /// Adds what other checks of the same rows found.
  void merge(const ValueChecks& other);
  /// Adds the problem of the first bad element of a row, if there is one.
  void add_problem(std::size_t row, std::size_t sent_index, AdapterProblems& problems) const;

 private:
  struct BadValue {
    /// Elements that are not finite come before those that are not zero.
    bool is_finite = false;
    std::size_t element = 0;
    float value = 0.0F;
  };
  void note(std::size_t row, const BadValue& bad);

  std::span<const AdapterRow> rows_;
  DType dtype_;
  DType target_;
  std::vector<std::optional<BadValue>> bad_;
};

/// Refuses rows of lm_head with different A (the engine multiplies by one A) or with missing vocabulary
/// slices. `a_of` returns the bytes of a row's A.
void check_lm_head(std::span<const AdapterRow> rows,
                   const std::function<std::span<const std::byte>(std::size_t row)>& a_of,
                   const LoraLayout& layout, AdapterProblems& problems);

/// Returns the problem of nonzero values in the `count` elements after a row.
[[nodiscard]] std::optional<std::string> padding_problem(const CheckedRow& checked, const std::byte* padding,
                                                         DType dtype, std::size_t count);

}  // namespace adaptrt
