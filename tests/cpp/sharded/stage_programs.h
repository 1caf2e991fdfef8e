#pragma once

#include <algorithm>
#include <cstdint>
#include <variant>
#include <vector>

#include "adaptrt/program/program.h"

namespace adaptrt::testing {

/// Returns the ops of one layer. Each layer begins with the norm before its attention. The first one includes
/// the ops before the layers, the last one those after. All include the rotary tables.
inline std::vector<Op> ops_of_layer(const std::vector<Op>& ops, std::int32_t number) {
  std::vector<Op> own;
  std::int32_t layer = -1;
  std::int32_t norms = 0;
  std::int32_t num_layers = 0;
  for (const Op& op : ops) num_layers += std::holds_alternative<AttentionOp>(op) ? 1 : 0;
  for (const Op& op : ops) {
    if (std::holds_alternative<RmsNormOp>(op) && norms++ % 2 == 0)
      layer = std::min(layer + 1, num_layers - 1);
    const bool is_table = std::holds_alternative<RopeTableOp>(op);
    if (!is_table && std::max(layer, 0) != number) continue;
    own.push_back(op);
    if (auto* attention = std::get_if<AttentionOp>(&own.back())) attention->layer = 0;
    if (auto* cross = std::get_if<CrossAttentionOp>(&own.back())) cross->layer = 0;
  }
  return own;
}

/// Adds the ops that receive and send the stream at the ends of a stage.
inline std::vector<Op> between_stages(std::vector<Op> ops, BufferId stream, std::int32_t stage,
                                      std::int32_t num_stages) {
  if (stage > 0) ops.insert(ops.begin(), ReceiveOp{stream});
  if (stage + 1 < num_stages) ops.push_back(SendOp{stream});
  return ops;
}

/// Returns a stage of `whole`, which has no encoder; there are as many stages as layers.
inline Program of_stage(const Program& whole, std::int32_t stage) {
  Program program = whole;
  program.num_stages = program.num_ranks = whole.num_layers;
  program.rank = stage;
  program.num_layers = 1;
  program.lora.num_stages = program.num_stages;
  program.lora.stage = stage;
  const BufferId stream = std::get<EmbeddingOp>(whole.body.front()).output;
  program.body = between_stages(ops_of_layer(whole.body, stage), stream, stage, whole.num_layers);
  if (stage + 1 < whole.num_layers) {
    program.head.clear();
    program.logits = program.hidden = kNoBuffer;
  }
  return program;
}

}  // namespace adaptrt::testing
