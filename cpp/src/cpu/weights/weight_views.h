#pragma once

#include <variant>
#include <vector>

#include "adaptrt/program/ops.h"

namespace adaptrt {

/// Calls `matrix` for every PanelMatrix of an op, including those without rows.
template <class AnyOp, class Matrix>
void for_each_matrix(AnyOp& op, const Matrix& matrix) {
  const auto of_parts = [&](auto& parts) {
    for (auto& part : parts) matrix(part.weight);
  };
  if (auto* embedding = std::get_if<EmbeddingOp>(&op)) {
    matrix(embedding->table);
    matrix(embedding->positions);
    matrix(embedding->types);
  } else if (auto* linear = std::get_if<LinearOp>(&op)) {
    of_parts(linear->parts);
  } else if (auto* experts = std::get_if<ExpertsOp>(&op)) {
    of_parts(experts->gate_up);
    of_parts(experts->down);
  }
}

/// Calls `vector` for every VectorView of an op, empty ones included.
template <class AnyOp, class Vector>
void for_each_vector(AnyOp& op, const Vector& vector) {
  const auto of_parts = [&](auto& parts) {
    for (auto& part : parts) vector(part.bias);
  };
  if (auto* rms_norm = std::get_if<RmsNormOp>(&op)) {
    vector(rms_norm->weight);
  } else if (auto* layer_norm = std::get_if<LayerNormOp>(&op)) {
    vector(layer_norm->weight);
    vector(layer_norm->bias);
  } else if (auto* rope = std::get_if<RopeTableOp>(&op)) {
    vector(rope->inverse_frequencies);
    vector(rope->long_inverse_frequencies);
  } else if (auto* attention = std::get_if<AttentionOp>(&op)) {
    vector(attention->query_norm);
    vector(attention->key_norm);
    vector(attention->position_bias);
    vector(attention->sinks);
  } else if (auto* linear = std::get_if<LinearOp>(&op)) {
    of_parts(linear->parts);
  } else if (auto* experts = std::get_if<ExpertsOp>(&op)) {
    of_parts(experts->gate_up);
    of_parts(experts->down);
    vector(experts->routing.bias);
  }
}

}  // namespace adaptrt
