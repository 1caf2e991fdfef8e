// Validates ops except attention, linear layers, and exchanges between ranks.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "matrix_storage.h"
#include "validator.h"

namespace adaptrt {
namespace {

/// Maximum of EmbeddingOp::num_coordinates.
constexpr std::int64_t kMostCoordinates = 16;

}  // namespace

void Validator::check_vector(std::string_view name, const VectorView& vector, std::int64_t size) {
  if (vector.size != size || (size > 0 && vector.data == nullptr)) {
    add(where_ + ": " + std::string(name) + " has " + text(vector.size) + " elements; it must have " +
        text(size));
  }
}

void Validator::check_optional_vector(std::string_view name, const VectorView& vector, std::int64_t size) {
  if (vector.size != 0) check_vector(name, vector, size);
}

void Validator::check_matrix(std::string_view name, const PanelMatrix& matrix, std::int64_t n, std::int64_t k,
                             MatrixAccess access) {
  if (matrix.dtype != program_.dtype) {
    add(where_ + ": " + std::string(name) + " is " + std::string(name_of(matrix.dtype)) + ", the program " +
        std::string(name_of(program_.dtype)));
  }
  if (matrix.n != n || matrix.k != k) {
    add(where_ + ": " + std::string(name) + " is [" + text(matrix.n) + ", " + text(matrix.k) +
        "]; it must be [" + text(n) + ", " + text(k) + "]");
  }
  if (matrix.data == nullptr) add(where_ + ": " + std::string(name) + " has no data");
  if (matrix.has_rows && access != MatrixAccess::kSomeOutputs) {
    add(where_ + ": " + std::string(name) + " has rows, which only what a ReLU gates can have");
  }
  if (matrix.has_columns && access != MatrixAccess::kSomeInputs) {
    add(where_ + ": " + std::string(name) + " has columns, which only one layer of a sparse input can have");
  }
  if (program_.matrix_layout == MatrixLayout::kRows) {
    for (const std::string& problem : problems_of_rows(matrix)) {
      add(where_ + ": " + std::string(name) + " " + problem);
    }
  }
  for (std::string& problem : problems_of_storage(matrix)) {
    add(where_ + ": " + std::string(name) + " " + std::move(problem));
  }
}

void Validator::check_finite(std::string_view name, float value, float low) {
  if (!std::isfinite(value) || value < low) {
    add(where_ + ": " + std::string(name) + " is " + std::to_string(value) +
        "; it must be finite and at least " + std::to_string(low));
  }
}

void Validator::all_tokens_only() {
  if (rows_ == RowKind::kLogits) add(where_ + ": belongs in the body");
  if (has_logit_rows_) add(where_ + ": belongs before the op that keeps rows of logits alone");
}

void Validator::check(const EmbeddingOp& op) {
  all_tokens_only();
  if (rows_ == RowKind::kTokens) ++num_embeddings_;
  if (num_embeddings_ > 1 && (program_.lora.max_extra_tokens > 0 || op.lora_site != -1)) {
    add(where_ + ": is not the first embedding; adapters cannot change it or have tokens for it");
  }
  const Buffer* output = operand("output", op.output, DType::kFloat32, rows_);
  const std::int64_t width = op.table.k;
  check_matrix("the table", op.table, program_.vocab_size, width);
  if (op.table.quantization.algo != QuantAlgo::kNone || op.table.is_compressed()) {
    add(where_ + ": the table is quantised or compressed, which only linear layers can be");
  }
  check_width("output", output, width);
  check_finite("scale", op.scale, 0.0F);
  if (op.positions.n != 0 || op.positions.data != nullptr) {
    check_matrix("the positions' table", op.positions, op.positions.n, width);
    const bool is_encoder = rows_ == RowKind::kEncoderTokens;
    check_range_(where_ + ": learned positions", op.positions.n,
                 is_encoder ? program_.max_encoder_input_len : program_.max_seq_len, kSizeLimit - 1);
    if (op.positions.quantization.algo != QuantAlgo::kNone || op.positions.is_compressed()) {
      add(where_ + ": the positions' table is quantised or compressed, which only linear layers can be");
    }
  }
  if (op.types.n != 0 || op.types.data != nullptr) {
    check_matrix("the token types' table", op.types, op.types.n, width);
    check_range_(where_ + ": token types", op.types.n, 1, kSizeLimit - 1);
    if (op.types.quantization.algo != QuantAlgo::kNone || op.types.is_compressed()) {
      add(where_ + ": the token types' table is quantised or compressed, which only linear layers can be");
    }
  }
  if (op.lora_site != -1) check_slices(op.lora_site, LoraModule::kEmbedding, {op.table.n, op.table.k});
  check_new_tokens(width);
  check_range_(where_ + ": num_later_elements", op.num_later_elements, 0, kSizeLimit - 1);
  check_range_(where_ + ": num_coordinates", op.num_coordinates, 0, kMostCoordinates);
  if (rows_ == RowKind::kTokens && num_embeddings_ == 1) {
    given_size_ = op.given_size();
    first_coordinate_ = given_size_ - op.num_coordinates;
    num_later_elements_ = op.num_later_elements;
  } else if (op.num_later_elements != 0 || op.num_coordinates != 0) {
    add(where_ + ": only the first embedding of the body can have given rows with other elements");
  }
}

void Validator::check_coordinate(std::string_view name, std::int64_t column) {
  if (rows_ == RowKind::kTokens && column >= first_coordinate_ && column < given_size_ - 1) return;
  add(where_ + ": " + std::string(name) + " is " + text(column) + "; the coordinates of given rows are [" +
      text(first_coordinate_) + ", " + text(given_size_ - 1) + ")");
}

void Validator::check(const AddGivenColumnsOp& op) {
  all_tokens_only();
  if (rows_ != RowKind::kTokens) add(where_ + ": belongs in the body");
  const auto* output = operand("output", op.output, DType::kFloat32, rows_);
  if (output == nullptr) return;
  const std::int64_t first = first_coordinate_ - num_later_elements_;
  if (op.first_column < first || op.first_column > first_coordinate_ - output->width) {
    add(where_ + ": first_column is " + text(op.first_column) + "; the columns that given rows have for '" +
        output->name + "' are [" + text(first) + ", " + text(first_coordinate_) + ")");
  }
}

void Validator::check(const JoinNeighboursOp& op) {
  all_tokens_only();
  sees_behind_ = true;
  if (rows_ != RowKind::kTokens) add(where_ + ": belongs in the body");
  const DType type = norm_type(op.input);
  const auto* input = operand("input", op.input, type, rows_);
  const auto* output = operand("output", op.output, type, rows_);
  check_range_(where_ + ": count", op.count, 1, 1 << 10);
  if (input != nullptr) check_width("output", output, input->width * op.count);
  if (op.input == op.output) add(where_ + ": input and output are one buffer");
}

void Validator::check(const JoinColumnsOp& op) {
  if (rows_ != RowKind::kLogits) add(where_ + ": belongs in the head");
  const auto* output = operand("output", op.output, program_.activation_type(), rows_);
  std::int64_t width = 0;
  for (const BufferId id : op.inputs) {
    const auto* input = operand("an input", id, program_.activation_type(), RowKind::kTokens);
    if (input == nullptr) return;
    width += std::min(input->width, kSizeLimit);
  }
  check_width("output", output, width);
}

void Validator::check(const RopeTableOp& op) {
  all_tokens_only();
  const std::int64_t half = op.inverse_frequencies.size;
  if (op.inverse_frequencies.data == nullptr || half < 1 || half >= kSizeLimit) {
    add(where_ + ": there are " + text(half) + " inverse_frequencies; there must be at least one");
  }
  check_finite("attention_scaling", op.attention_scaling, 0.0F);
  if (op.kind == RopeKind::kDynamic) {
    check_finite("base", op.base, 1.0F);
    check_finite("factor", op.factor, 1.0F);
    if (half < 2) add(where_ + ": dynamic frequencies need at least two of them");
    check_range_(where_ + ": original_max_position", op.original_max_position, 1, 1 << 30);
  } else if (op.kind == RopeKind::kLong) {
    check_vector("long_inverse_frequencies", op.long_inverse_frequencies, half);
    check_range_(where_ + ": original_max_position", op.original_max_position, 1, 1 << 30);
  } else if (op.kind != RopeKind::kStatic) {
    add(where_ + ": the kind is unknown");
  }
  check_width("cosine", operand("cosine", op.cosine, DType::kFloat32, rows_), half);
  check_width("sine", operand("sine", op.sine, DType::kFloat32, rows_), half);
  if (op.cosine == op.sine) add(where_ + ": cosine and sine are one buffer");
  if (op.columns.empty()) return;
  if (std::ssize(op.columns) != half) {
    add(where_ + ": there are " + std::to_string(op.columns.size()) + " columns; there must be " +
        text(half));
  }
  for (const std::int32_t column : op.columns) check_coordinate("a column", column);
}

void Validator::check(const RmsNormOp& op) {
  if (op.gather_logit_rows && rows_ != RowKind::kLogits)
    add(where_ + ": gathers logit rows outside the head");
  const RowKind input_rows = op.gather_logit_rows ? RowKind::kTokens : rows_;
  // A norm whose result is added reads a sublayer's output, other norms read a residual stream.
  const DType input_type = op.add && !keeps_float32(op.input) ? program_.stored_type() : DType::kFloat32;
  const auto* input = operand("input", op.input, input_type, input_rows);
  const DType output_type = op.add ? DType::kFloat32 : norm_type(op.output);
  const auto* output = operand("output", op.output, output_type, rows_);
  if (input != nullptr) {
    check_width("output", output, input->width);
    const bool has_groups = op.weight.size > 0 && input->width % op.weight.size == 0;
    check_vector("the weight", op.weight, has_groups ? op.weight.size : input->width);
  }
  check_optional_vector("sum_scale", op.sum_scale, 1);
  if (op.sum_scale.size != 0 && !op.add) add(where_ + ": has sum_scale, and adds nothing");
  if (op.add && (op.gather_logit_rows || rows_ == RowKind::kLogits)) add(where_ + ": adds outside the body");
  if (op.add && op.input == op.output) add(where_ + ": input and output are one buffer");
  check_finite("epsilon", op.epsilon, 0.0F);
}

DType Validator::norm_type(BufferId output) const {
  const bool is_stream =
      live_.holds(output) && program_.buffers[static_cast<std::size_t>(output)].dtype == DType::kFloat32;
  return is_stream ? DType::kFloat32 : program_.activation_type();
}

void Validator::check(const LayerNormOp& op) {
  if (op.gather_logit_rows && rows_ != RowKind::kLogits) {
    add(where_ + ": gathers logit rows outside the head");
  }
  const RowKind input_rows = op.gather_logit_rows ? RowKind::kTokens : rows_;
  const auto* input = operand("input", op.input, DType::kFloat32, input_rows);
  const auto* output = operand("output", op.output, norm_type(op.output), rows_);
  if (input != nullptr) {
    check_width("output", output, input->width);
    check_vector("the weight", op.weight, input->width);
    check_optional_vector("the bias", op.bias, input->width);
    check_norm_site(op.lora_site, op.bias.size);
  }
  check_finite("epsilon", op.epsilon, 0.0F);
}

void Validator::check(const CastOp& op) {
  const auto* input = operand("input", op.input, DType::kFloat32, rows_);
  const auto* output = operand("output", op.output, program_.activation_type(), rows_);
  if (input != nullptr) check_width("output", output, input->width);
  if (op.input == op.output) add(where_ + ": input and output are one buffer");
}

void Validator::check(const KeepLogitRowsOp& op) {
  all_tokens_only();
  if (rows_ != RowKind::kTokens) add(where_ + ": belongs in the body");
  has_logit_rows_ = true;
  lost_.assign(lost_.size(), true);
  for (const BufferId id : op.buffers) {
    if (!live_.holds(id)) {
      add(where_ + ": names buffer " + text(id) + " of " + std::to_string(program_.buffers.size()));
      continue;
    }
    const Buffer& buffer = program_.buffers[static_cast<std::size_t>(id)];
    if (buffer.rows != RowKind::kTokens) add(where_ + ": '" + buffer.name + "' has a row a row of logits");
    if (!lost_[static_cast<std::size_t>(id)]) add(where_ + ": names '" + buffer.name + "' twice");
    lost_[static_cast<std::size_t>(id)] = false;
  }
}

void Validator::check(const GatedAddOp& op) {
  const auto* input = operand("input", op.input, program_.stored_type(), rows_);
  const auto* output = operand("output", op.output, DType::kFloat32, rows_);
  check_width("gate", operand("gate", op.gate, DType::kFloat32, rows_), 1);
  if (input != nullptr) check_width("output", output, input->width);
  if (op.input == op.output) add(where_ + ": input and output are one buffer");
}

}  // namespace adaptrt
