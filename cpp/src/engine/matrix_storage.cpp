#include "matrix_storage.h"

#include <cstdint>

#include "adaptrt/core/compressed_panels.h"
#include "adaptrt/core/quantized_panels.h"

namespace adaptrt {
namespace {

std::string text(std::int64_t value) {
  return std::to_string(value);
}

void check_quantization(const PanelMatrix& matrix, std::vector<std::string>* problems) {
  constexpr std::int64_t kGroupSizeLimit = std::int64_t{1} << 31;
  const Quantization& how = matrix.quantization;
  if (how.algo > QuantAlgo::kW4A16) problems->push_back("is quantised in a way that is unknown");
  if (how.algo != QuantAlgo::kW4A16 && (how.group_size != 0 || how.zero_points)) {
    problems->push_back("has groups or zero points, which only " + std::string(name_of(QuantAlgo::kW4A16)) +
                        " has");
  }
  if (how.group_size < 0 || how.group_size >= kGroupSizeLimit || how.group_size % kInt4Inputs != 0) {
    problems->push_back("has a group_size of " + text(how.group_size) + "; it must be a multiple of " +
                        text(kInt4Inputs));
  }
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

}  // namespace

std::vector<std::string> problems_of_storage(const PanelMatrix& matrix) {
  std::vector<std::string> problems;
  check_quantization(matrix, &problems);
  if (matrix.is_compressed()) check_compression(matrix, &problems);
  return problems;
}

}  // namespace adaptrt
