#include "matrix_storage.h"

#include <cstdint>

#include "adaptrt/core/compressed_panels.h"
#include "adaptrt/core/quantized_panels.h"

namespace adaptrt {
namespace {

std::string text(std::int64_t value) {
  return std::to_string(value);
}

/// Each group must be whole, and the engine's type must hold the values.
void check_code(const PanelMatrix& matrix, std::vector<std::string>* problems) {
  const Quantization& how = matrix.quantization;
  if (!how.is_coded()) {
    if (how.value_type != DType::kFloat32) {
      problems->push_back("says what its values are rounded to, which only those of a code are");
    }
    return;
  }
  if (how.code > FourBitCode::kE2M1) problems->push_back("has an unknown code");
  if (how.zero_points) problems->push_back("has both a code and zero points");
  if (how.group_size <= 0 || matrix.k % how.group_size != 0) {
    problems->push_back("has " + text(matrix.k) + " inputs in groups of " + text(how.group_size) + " of " +
                        std::string(name_of(how.code)) + ", which must be whole");
  }
  if (matrix.dtype != DType::kFloat32 && how.value_type != matrix.dtype) {
    problems->push_back("has values of " + std::string(name_of(how.value_type)) + " in an engine of " +
                        std::string(name_of(matrix.dtype)));
  }
}

void check_quantization(const PanelMatrix& matrix, std::vector<std::string>* problems) {
  constexpr std::int64_t kGroupSizeLimit = std::int64_t{1} << 31;
  const Quantization& how = matrix.quantization;
  if (how.algo > QuantAlgo::kW4A16) problems->push_back("is quantised in a way that is unknown");
  if (how.algo != QuantAlgo::kW4A16 && !(how == Quantization{.algo = how.algo})) {
    problems->push_back("has groups, zero points, types of scales or values, or a code, which only " +
                        std::string(name_of(QuantAlgo::kW4A16)) + " has");
  }
  if (how.scale_type > DType::kBFloat16 || how.value_type > DType::kBFloat16) {
    problems->push_back("has scales or values of an unknown type");
  }
  if (how.group_size < 0 || how.group_size >= kGroupSizeLimit || how.group_size % kInt4Inputs != 0) {
    problems->push_back("has a group_size of " + text(how.group_size) + "; it must be a multiple of " +
                        text(kInt4Inputs));
  }
  check_code(matrix, problems);
  if (how.algo == QuantAlgo::kW8A8 && matrix.k > kMaxW8A8Inputs) {
    problems->push_back("has " + text(matrix.k) + " inputs; W8A8 sums at most " + text(kMaxW8A8Inputs) +
                        " without overflow");
  }
}

void check_compression(const PanelMatrix& matrix, std::vector<std::string>* problems) {
  if (matrix.dtype != DType::kBFloat16 || matrix.quantization.algo != QuantAlgo::kNone) {
    problems->push_back("is compressed, which only bfloat16 can be");
  }
  if (!can_be_compressed(matrix.n, matrix.k)) {
    problems->push_back("is compressed and [" + text(matrix.n) + ", " + text(matrix.k) +
                        "]; these must be multiples of " + text(kPanelColumns) + " and " +
                        text(kPieceInputs));
  }
  if (matrix.exceptions < 0 || matrix.exceptions > matrix.k * kPanelColumns) {
    problems->push_back("has places for " + text(matrix.exceptions) + " exceptions in a panel of " +
                        text(matrix.k * kPanelColumns) + " elements");
  }
}

void check_rows(const PanelMatrix& matrix, std::vector<std::string>* problems) {
  if (!matrix.is_plain()) problems->push_back("has rows, and is quantised or compressed");
  if (!can_have_rows(matrix.dtype, matrix.n, matrix.k)) {
    problems->push_back("has rows, and is " + std::string(name_of(matrix.dtype)) + " and [" + text(matrix.n) +
                        ", " + text(matrix.k) +
                        "]; it must be float32 or bfloat16, and the sizes multiples of " +
                        text(kPanelColumns) + " and " + text(k_interleave(matrix.dtype)));
  }
}

}  // namespace

std::vector<std::string> problems_of_storage(const PanelMatrix& matrix) {
  std::vector<std::string> problems;
  check_quantization(matrix, &problems);
  if (matrix.is_compressed()) check_compression(matrix, &problems);
  if (matrix.has_rows) check_rows(matrix, &problems);
  return problems;
}

}  // namespace adaptrt
