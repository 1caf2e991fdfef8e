#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <vector>

#include "adaptrt/lora/layout.h"
#include "adaptrt/program/program.h"
#include "cpu/random_model.h"

namespace adaptrt::testing {

/// The program and the adapters of a RandomModel with row-major matrices, as a build for GPUs has them.
class RowsOfModel {
 public:
  explicit RowsOfModel(RandomModel& model) : model_(model), program(model.program) {
    program.matrix_layout = MatrixLayout::kRows;
    program.hidden = kNoBuffer;
    for (std::vector<Op>* section : {&program.body, &program.head}) {
      for (Op& op : *section) {
        if (auto* embedding = std::get_if<EmbeddingOp>(&op)) embedding->table = rows(embedding->table);
        if (auto* attention = std::get_if<AttentionOp>(&op)) buffer(attention->qkv).dtype = program.dtype;
        if (auto* norm = std::get_if<RmsNormOp>(&op)) buffer(norm->output).dtype = program.dtype;
        if (auto* experts = std::get_if<ExpertsOp>(&op)) {
          buffer(experts->input).dtype = program.dtype;
          for (auto* parts : {&experts->gate_up, &experts->down}) {
            for (LinearPart& part : *parts) part.weight = rows(part.weight);
          }
        }
        auto* linear = std::get_if<LinearOp>(&op);
        if (linear == nullptr) continue;
        buffer(linear->input).dtype = program.dtype;
        if (is_activated(linear->epilogue)) buffer(linear->output).dtype = program.dtype;
        for (LinearPart& part : linear->parts) part.weight = rows(part.weight);
      }
    }
  }

  /// See RandomModel::adapter.
  DeviceAdapter adapter(std::uint64_t seed, bool dora, bool shift = false) {
    DeviceAdapter adapter = model_.adapter(seed, dora, 0, shift);
    adapter.load_id = seed;
    for (std::size_t i = 0; i < adapter.sites.size(); ++i) {
      const LoraSite& place = program.lora.sites[i];
      DeviceSite& site = adapter.sites[i];
      if (site.total_rank > 0) site.a = rows({site.a, program.dtype, site.total_rank, place.in_size}).data;
      for (std::size_t p = 0; p < place.parts.size(); ++p) {
        DevicePart& part = site.parts[p];
        if (part.rank > 0) part.b = rows({part.b, program.dtype, place.parts[p].out_size, part.rank}).data;
      }
    }
    return adapter;
  }

 private:
  Buffer& buffer(BufferId id) { return program.buffers[static_cast<std::size_t>(id)]; }

  /// Copies a matrix to rows without padding. A tied table stays one matrix.
  PanelMatrix rows(const PanelMatrix& panels) {
    for (const auto& [from, to] : made_) {
      if (from == panels.data) return {to, panels.dtype, panels.n, panels.k};
    }
    auto& bytes =
        memories_.emplace_back(static_cast<std::size_t>(panels.n * panels.k) * size_of(panels.dtype));
    std::vector<float> row(static_cast<std::size_t>(panels.k));
    for (std::int64_t i = 0; i < panels.n; ++i) {
      unpack_panel_row(panels, i, row.data());
      for (std::int64_t j = 0; j < panels.k; ++j) {
        const float value = row[static_cast<std::size_t>(j)];
        const std::uint16_t bits =
            panels.dtype == DType::kBFloat16 ? float_to_bfloat16(value) : float_to_float16(value);
        std::memcpy(bytes.data() + static_cast<std::size_t>(i * panels.k + j) * sizeof bits, &bits,
                    sizeof bits);
      }
    }
    made_.emplace_back(panels.data, bytes.data());
    return {bytes.data(), panels.dtype, panels.n, panels.k};
  }

  RandomModel& model_;
  std::deque<std::vector<std::byte>> memories_;
  std::vector<std::pair<const std::byte*, const std::byte*>> made_;

 public:
  Program program;
};

/// Lets MLPs of a program read single neurons.
inline const Program& with_sparse_inputs(Program& program) {
  for (std::size_t i = 1; i < program.body.size(); ++i) {
    const auto* gated = std::get_if<LinearOp>(&program.body[i - 1]);
    if (gated != nullptr && is_relu_gated(gated->epilogue)) {
      std::get<LinearOp>(program.body[i]).has_sparse_input = true;
    }
  }
  return program;
}

}  // namespace adaptrt::testing
