#include "adapter_checks.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <sstream>
#include <utility>

#include "adaptrt/core/element_scan.h"

namespace adaptrt {
namespace {

std::string text_of(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  const char* separator = "";
  for (const std::int64_t size : shape) {
    text.append(separator).append(std::to_string(size));
    separator = ", ";
  }
  return text + "]";
}

std::string text_of(float value) {
  std::ostringstream text;
  text << value;
  return text.str();
}

/// Returns "magnitude and shift", or the one that the row has.
std::string names_of(RowVectors vectors) {
  if (vectors.magnitude && vectors.shift) return "magnitude and shift";
  return vectors.magnitude ? "magnitude" : "shift";
}

/// Returns "B[2, 1]", or "B[5, 2, 1]" for expert 5.
std::string position_in_row(const AdapterRow& row, std::size_t element) {
  const auto in = static_cast<std::size_t>(row.sizes.in);
  const auto out = static_cast<std::size_t>(row.sizes.out);
  const auto rank = static_cast<std::size_t>(row.rank);
  const std::size_t in_a = static_cast<std::size_t>(row.rank * row.sizes.a_per_rank());
  const std::size_t in_b = static_cast<std::size_t>(row.rank * row.sizes.b_per_rank());
  const auto text = [&](const char* name, std::size_t i, std::size_t rows, std::size_t columns) {
    std::string position = std::string(name) + "[";
    if (row.sizes.experts != 1) position += std::to_string(i / (rows * columns)) + ", ";
    return position + std::to_string(i / columns % rows) + ", " + std::to_string(i % columns) + "]";
  };
  if (element < in_a) return text("A", element, rank, in);
  if (element < in_a + in_b) return text("B", element - in_a, out, rank);
  const auto vector = static_cast<std::size_t>(row.sizes.vector());
  const std::size_t i = (element - in_a - in_b) % vector;
  const bool is_magnitude = row.vectors.magnitude && element - in_a - in_b < vector;
  return (is_magnitude ? "magnitude[" : "shift[") +
         (row.sizes.experts == 1 ? "" : std::to_string(i / out) + ", ") + std::to_string(i % out) + "]";
}

}  // namespace

void AdapterProblems::add(std::string problem) {
  if (count_++ < kMaxTexts) problems_.add(std::move(problem));
}

void AdapterProblems::throw_if_any(std::string_view subject) {
  if (count_ > kMaxTexts) problems_.add("and " + std::to_string(count_ - kMaxTexts) + " more");
  problems_.throw_if_any<AdapterError>(subject);
}

std::string describe_row(const CheckedRow& checked) {
  return "row " + std::to_string(checked.index) + " (" + std::string(info_of(checked.row.module).name) +
         ", layer " + std::to_string(checked.row.layer) + ")";
}

std::size_t matrix_elements(const AdapterRow& row) {
  return static_cast<std::size_t>(row.rank * (row.sizes.a_per_rank() + row.sizes.b_per_rank()));
}

std::size_t row_elements(const AdapterRow& row) {
  return matrix_elements(row) + static_cast<std::size_t>(row.vectors.count() * row.sizes.vector());
}

std::optional<DType> weights_dtype(const TensorView& weights, AdapterProblems& problems) {
  switch (weights.type) {
    case TensorType::kFloat32:
      return DType::kFloat32;
    case TensorType::kFloat16:
      return DType::kFloat16;
    case TensorType::kBFloat16:
      return DType::kBFloat16;
    default:
      problems.add("weights is of type " + weights.type_name + "; accepted: float32, float16, bfloat16");
      return std::nullopt;
  }
}

std::optional<MatrixShape> matrix_shape(const TensorView& tensor, std::string_view name,
                                        AdapterProblems& problems) {
  const auto& shape = tensor.shape;
  const bool leading_one = shape.size() == 3 && shape[0] == 1;
  if ((shape.size() != 2 && !leading_one) ||
      std::ranges::any_of(shape, [](std::int64_t n) { return n < 0; })) {
    problems.add(std::string(name) + " has shape " + text_of(shape) +
                 "; accepted: two dimensions, or three with the first equal to 1");
    return std::nullopt;
  }
  return MatrixShape{shape[shape.size() - 2], shape[shape.size() - 1]};
}

void ValueChecks::check(std::size_t row, std::size_t first, const std::byte* values, std::size_t count,
                        ValueKind kind) {
  const DType target = kind == ValueKind::kMatrix ? target_ : DType::kFloat32;
  auto found = find_not_finite(values, dtype_, count, target);
  const bool is_finite = !found;
  if (is_finite && kind == ValueKind::kMatrix && is_norm(rows_[row].module)) {
    found = find_not_zero(values, dtype_, count);
  }
  if (!found) return;
  note(row, {is_finite, first + *found, load_as_float(values, dtype_, *found)});
}

void ValueChecks::merge(const ValueChecks& other) {
  for (std::size_t row = 0; row < bad_.size(); ++row) {
    if (other.bad_[row]) note(row, *other.bad_[row]);
  }
}

void ValueChecks::note(std::size_t row, const BadValue& bad) {
  std::optional<BadValue>& known = bad_[row];
  if (!known || std::pair(bad.is_finite, bad.element) < std::pair(known->is_finite, known->element)) {
    known = bad;
  }
}

void ValueChecks::check_row(std::size_t row, const std::byte* values) {
  const AdapterRow& checked = rows_[row];
  const std::size_t matrices = matrix_elements(checked);
  check(row, 0, values, matrices, ValueKind::kMatrix);
  check(row, matrices, values + matrices * size_of(dtype_), row_elements(checked) - matrices,
        ValueKind::kVector);
}

void ValueChecks::add_problem(std::size_t row, std::size_t sent_index, AdapterProblems& problems) const {
  if (!bad_[row]) return;
  const BadValue& bad = *bad_[row];
  std::string problem = describe_row({rows_[row], sent_index}) + ": element " + std::to_string(bad.element) +
                        ", " + position_in_row(rows_[row], bad.element) + ", is " + text_of(bad.value);
  if (bad.is_finite) {
    problem += "; accepted: 0, because a norm has only a shift";
  } else if (std::isfinite(bad.value)) {
    problem += ", too large for the engine's " + std::string(name_of(target_));
  }
  problems.add(std::move(problem));
}

void check_lm_head(std::span<const AdapterRow> rows,
                   const std::function<std::span<const std::byte>(std::size_t row)>& a_of,
                   const LoraLayout& layout, AdapterProblems& problems) {
  std::optional<std::size_t> first;
  std::int64_t found = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (rows[i].module != LoraModule::kLmHead) continue;
    ++found;
    if (!first) first = i;
    if (rows[i].rank != rows[*first].rank || !std::ranges::equal(a_of(i), a_of(*first))) {
      problems.add("lm_head's slices " + std::to_string(rows[*first].layer) + " and " +
                   std::to_string(rows[i].layer) + " have different A; all have the same");
      return;
    }
  }
  const auto slices = std::ranges::count_if(layout.sites, &LoraSite::is_lm_head);
  if (found != 0 && found != slices) {
    problems.add("lm_head has rows for " + std::to_string(found) + " of the vocabulary's " +
                 std::to_string(slices) + " slices; accepted: all or none");
  }
}

std::optional<std::string> padding_problem(const CheckedRow& checked, const std::byte* padding, DType dtype,
                                           std::size_t count) {
  const auto bad = find_not_zero(padding, dtype, count);
  if (!bad) return std::nullopt;
  const std::size_t elements = row_elements(checked.row);
  return describe_row(checked) + ": element " + std::to_string(elements + *bad) + " is " +
         text_of(load_as_float(padding, dtype, *bad)) + ", but rank " + std::to_string(checked.row.rank) +
         " with" + (checked.row.vectors.count() == 0 ? "out vectors" : " " + names_of(checked.row.vectors)) +
         " describes " + std::to_string(elements) + " elements, and the padding after them must be zero";
}

}  // namespace adaptrt
