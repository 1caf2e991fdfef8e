#pragma once

#include <cstddef>
#include <cstdint>
#include <variant>

#include "adaptrt/program/program.h"

namespace adaptrt::testing {

/// Makes a rank's program from the whole model's.
using MakeProgram = Program (*)(const Program& whole, std::int32_t rank, std::int32_t num_ranks);

/// Adds a buffer for the rank's term of a sum.
inline BufferId add_term(BufferId whole, Program* program) {
  Buffer buffer = program->buffers[static_cast<std::size_t>(whole)];
  buffer.name += " of rank";
  buffer.offset = program->arena_bytes;
  const std::size_t bytes = static_cast<std::size_t>(program->max_num_tokens * buffer.width) * sizeof(float);
  program->arena_bytes += (bytes + 63) / 64 * 64;
  program->buffers.push_back(buffer);
  return static_cast<BufferId>(program->buffers.size() - 1);
}

inline Program of_ranks(const Program& whole, std::int32_t rank, std::int32_t num_ranks) {
  Program program = whole;
  program.rank = rank;
  program.num_ranks = num_ranks;
  return program;
}

/// Program of a rank with a part of the experts of each layer, and everything else.
inline Program with_own_experts(const Program& whole, std::int32_t rank, std::int32_t num_ranks) {
  Program program = of_ranks(whole, rank, num_ranks);
  for (std::size_t i = 0; i < program.body.size(); ++i) {
    auto* op = std::get_if<ExpertsOp>(&program.body[i]);
    if (op == nullptr) continue;
    const auto count = op->num_experts_here() / num_ranks;
    const auto first = count * rank;
    op->gate_up = {op->gate_up.begin() + 2 * first, op->gate_up.begin() + 2 * (first + count)};
    op->down = {op->down.begin() + first, op->down.begin() + first + count};
    op->first_expert = static_cast<std::int32_t>(first);
    op->num_remote_experts = static_cast<std::int32_t>(count * (num_ranks - 1));
    op->stores = true;
    const BufferId hidden = op->output;
    const BufferId term = op->output = add_term(hidden, &program);
    program.body.insert(program.body.begin() + static_cast<std::ptrdiff_t>(i) + 1,
                        AllReduceOp{.input = term, .output = hidden, .add = true});
  }
  return program;
}

/// Program of a rank whose term for the residual stream is rank + 1 times the whole.
inline Program with_cut_layers(const Program& whole, std::int32_t rank, std::int32_t num_ranks) {
  Program program = of_ranks(whole, rank, num_ranks);
  for (std::size_t i = 0; i < program.body.size(); ++i) {
    auto* op = std::get_if<LinearOp>(&program.body[i]);
    if (op == nullptr || op->epilogue != LinearEpilogue::kAdd) continue;
    op->epilogue = LinearEpilogue::kStore;
    op->scale = static_cast<float>(rank + 1);
    const BufferId hidden = op->output;
    const BufferId term = op->output = add_term(hidden, &program);
    program.body.insert(program.body.begin() + static_cast<std::ptrdiff_t>(i) + 1,
                        AllReduceOp{.input = term, .output = hidden, .add = true});
  }
  return program;
}

/// The same program with fully sharded adapters. Layers that add to the residual stream are split by inputs,
/// the others by outputs.
inline Program with_shared_adapters(const Program& cut) {
  Program program = cut;
  const std::int64_t elsewhere = program.num_ranks - 1;
  for (LoraSite& site : program.lora.sites) {
    site.num_shares = program.num_ranks;
    site.share = program.rank;
    const LoraModule module = site.parts.front().module;
    if (module == LoraModule::kAttnDense || module == LoraModule::kMlp4HToH) {
      site.num_remote_inputs = elsewhere * site.in_size;
    } else {
      for (LoraPart& part : site.parts) part.num_remote_outputs = elsewhere * part.out_size;
    }
  }
  return program;
}

}  // namespace adaptrt::testing
