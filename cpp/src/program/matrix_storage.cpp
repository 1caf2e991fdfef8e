#include "matrix_storage.h"

#include <cstdint>
#include <vector>

#include "adaptrt/core/compressed_panels.h"
#include "adaptrt/core/quantized_panels.h"
#include "program_sizes.h"

namespace adaptrt {
namespace {

/// The engine's type must hold the values.
void check_code(const PanelMatrix& matrix, std::vector<std::string>* problems) {
  const Quantization& how = matrix.quantization;
  if (!how.is_codebook()) {
    if (how.value_type != DType::kFloat32) {
      problems->push_back("says what its values are rounded to, which only those of a code are");
    }
    return;
  }
  if (how.code > WeightCode::kLLMInt8) problems->push_back("has an unknown code");
  if (how.zero_points) problems->push_back("has both a code and zero points");
  if (matrix.dtype != DType::kFloat32 && how.value_type != matrix.dtype) {
    problems->push_back("has values of " + std::string(name_of(how.value_type)) + " in an engine of " +
                        std::string(name_of(matrix.dtype)));
  }
}

bool is_of_eight_bits(WeightCode code) {
  return code == WeightCode::kE4M3 || code == WeightCode::kLLMInt8;
}

/// Tables are of four bits and whole groups, the others are of eight and read in pairs.
void check_groups_of_code(const PanelMatrix& matrix, std::vector<std::string>* problems) {
  const Quantization& how = matrix.quantization;
  if (is_of_eight_bits(how.code)) {
    const std::string code(name_of(how.code));
    if (how.algo != QuantAlgo::kW8A16) {
      problems->push_back("is " + std::string(name_of(how.algo)) + " of " + code +
                          ", which only W8A16 may be");
    }
    if (matrix.k % 2 != 0) {
      problems->push_back("has " + text(matrix.k) + " inputs of " + code + ", an odd number");
    }
    if (how.code == WeightCode::kLLMInt8 && (how.group_size != 0 || how.scale_type != DType::kFloat32)) {
      problems->push_back("is of " + code + ", which has one float32 scale an output");
    }
  } else if (how.is_codebook() && (how.group_size <= 0 || matrix.k % how.group_size != 0)) {
    problems->push_back("has " + text(matrix.k) + " inputs in groups of " + text(how.group_size) + " of " +
                        std::string(name_of(how.code)) + ", which must be whole");
  }
}

/// Two and three bits are integers in whole words.
void check_bits(const PanelMatrix& matrix, std::vector<std::string>* problems) {
  const Quantization& how = matrix.quantization;
  if (how.bits == 4) return;
  if (how.bits != 2 && how.bits != 3) {
    problems->push_back("has weights of " + text(how.bits) + " bits; they may have 2, 3 or 4");
    return;
  }
  if (how.is_codebook()) problems->push_back("has both a code and weights of " + text(how.bits) + " bits");
  if (matrix.k % packed_inputs(how.bits) != 0) {
    problems->push_back("has " + text(matrix.k) + " inputs; of " + text(how.bits) +
                        " bits they must be a multiple of " + text(packed_inputs(how.bits)));
  }
}

/// Only integers can have a permutation (act-order); every input occurs once in the order.
void check_order(const PanelMatrix& matrix, std::vector<std::string>* problems) {
  const Quantization& how = matrix.quantization;
  if (!how.act_order) return;
  const bool is_weight_only = how.algo == QuantAlgo::kW4A16 || how.algo == QuantAlgo::kW8A16;
  if (!is_weight_only || how.is_codebook()) {
    problems->push_back("has act_order, which only integers of W4A16 and W8A16 may have");
    return;
  }
  if (matrix.data == nullptr || matrix.k < 0) return;
  std::vector<bool> seen(static_cast<std::size_t>(matrix.k));
  for (const std::int32_t input : matrix.permutation()) {
    if (input < 0 || input >= matrix.k || seen[static_cast<std::size_t>(input)]) {
      problems->push_back("has input " + text(input) + " of " + text(matrix.k) +
                          " in the order of its inputs, which must have each of them once");
      return;
    }
    seen[static_cast<std::size_t>(input)] = true;
  }
}

/// Minimums replace zero points, for integers in groups.
void check_minimums(const Quantization& how, std::vector<std::string>* problems) {
  if (!how.minimums) return;
  if (how.algo != QuantAlgo::kW8A16 && how.algo != QuantAlgo::kW4A16) {
    problems->push_back("has minimums, and is " + std::string(name_of(how.algo)) +
                        "; only W8A16 and W4A16 may have minimums");
  }
  if (how.group_size == 0) problems->push_back("has minimums, and no groups");
  if (how.zero_points) problems->push_back("has both minimums and zero points");
  if (how.is_codebook()) problems->push_back("has both minimums and a code");
}

void check_quantization(const PanelMatrix& matrix, std::vector<std::string>* problems) {
  constexpr std::int64_t kGroupSizeLimit = std::int64_t{1} << 31;
  const Quantization& how = matrix.quantization;
  if (how.algo > QuantAlgo::kW4A8) problems->push_back("is quantised in a way that is unknown");
  Quantization accepted{.algo = how.algo};
  if (how.algo == QuantAlgo::kW8A16) {
    accepted.zero_points = how.zero_points;
    accepted.minimums = how.minimums;
    if (how.group_size != 0) {
      accepted.group_size = how.group_size;
      accepted.scale_type = how.scale_type;
    }
  }
  accepted.act_order = how.act_order;
  if (how.algo == QuantAlgo::kW4A8 && how.is_codebook()) {
    problems->push_back("has a code, which only weights may have that are multiplied as W4A16");
  }
  if (!has_few_bits(how.algo) && !is_of_eight_bits(how.code) && !(how == accepted)) {
    problems->push_back("has groups, zero points, types of scales or values, bits, or a code, which " +
                        std::string(name_of(how.algo)) + " does not have");
  }
  if (how.scale_type > DType::kBFloat16 || how.value_type > DType::kBFloat16) {
    problems->push_back("has scales or values of an unknown type");
  }
  const std::int64_t together = packed_inputs(how.bits);
  if (how.group_size < 0 || how.group_size >= kGroupSizeLimit || how.group_size % together != 0) {
    problems->push_back("has a group_size of " + text(how.group_size) + "; it must be a multiple of " +
                        text(together));
  }
  check_minimums(how, problems);
  check_bits(matrix, problems);
  check_code(matrix, problems);
  check_groups_of_code(matrix, problems);
  check_order(matrix, problems);
  if (rounds_activations(how.algo) && matrix.k > kMaxInt8Inputs) {
    problems->push_back("has " + text(matrix.k) + " inputs; " + std::string(name_of(how.algo)) +
                        " sums at most " + text(kMaxInt8Inputs) + " without overflow");
  }
}

void check_compression(const PanelMatrix& matrix, std::vector<std::string>* problems) {
  if (matrix.dtype != DType::kBFloat16 || matrix.quantization.algo != QuantAlgo::kNone) {
    problems->push_back("is compressed, which only bfloat16 can be");
  }
  if (!can_be_compressed(matrix.n, matrix.k)) {
    problems->push_back("is compressed and has " + text(matrix.k) + " inputs, which must be a multiple of " +
                        text(kPieceInputs));
  }
  if (matrix.outliers < 0 || matrix.outliers > matrix.k * kPanelColumns) {
    problems->push_back("has places for " + text(matrix.outliers) + " outliers in a panel of " +
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

void check_columns(const PanelMatrix& matrix, std::vector<std::string>* problems) {
  if (!matrix.is_plain()) problems->push_back("has columns, and is quantised or compressed");
  if (matrix.has_rows) problems->push_back("has both rows and columns");
  if (!can_have_columns(matrix.dtype, matrix.n, matrix.k)) {
    problems->push_back("has columns, and is [" + text(matrix.n) + ", " + text(matrix.k) +
                        "]; the sizes must be multiples of " + text(kPanelColumns) + " and " +
                        text(k_interleave(matrix.dtype)));
  }
}

}  // namespace

std::vector<std::string> problems_of_rows(const PanelMatrix& matrix) {
  std::vector<std::string> problems;
  if (matrix.is_compressed() || matrix.is_stored_twice()) {
    problems.push_back("is compressed or stored twice, which no row-major matrix is");
  }
  const Quantization& how = matrix.quantization;
  if (how.algo == QuantAlgo::kNone) return problems;
  const bool is_weight_only = how.algo == QuantAlgo::kW8A16 || how.algo == QuantAlgo::kW4A16;
  if (!is_weight_only || how.is_codebook() || how.minimums || how.act_order || how.bits != 4) {
    problems.push_back(
        "is quantised in a way that no row-major matrix is; it may have integers of W8A16 or of 4 bits of "
        "W4A16, without minimums and a permutation");
  }
  if (has_typed_scales(how) && how.scale_type != DType::kFloat32) {
    problems.push_back("is row-major and has scales of " + std::string(name_of(how.scale_type)) +
                       "; they must be float32");
  }
  if (matrix.k % packed_inputs(4) != 0) {
    problems.push_back("is row-major, quantised and has " + text(matrix.k) +
                       " inputs, which must be a multiple of " + text(packed_inputs(4)));
  }
  return problems;
}

std::vector<std::string> problems_of_storage(const PanelMatrix& matrix) {
  std::vector<std::string> problems;
  check_quantization(matrix, &problems);
  if (matrix.is_compressed()) check_compression(matrix, &problems);
  if (matrix.has_rows) check_rows(matrix, &problems);
  if (matrix.has_columns) check_columns(matrix, &problems);
  return problems;
}

}  // namespace adaptrt
