#include "adaptrt/program/op_buffers.h"

#include <algorithm>
#include <variant>

namespace adaptrt {
namespace {

OpBuffers find(const EmbeddingOp& op, const Program& /*program*/) {
  return {.reads = {}, .writes = {op.output}};
}

OpBuffers find(const RopeTableOp& op, const Program& /*program*/) {
  return {.reads = {}, .writes = {op.cosine, op.sine}};
}

OpBuffers find(const RmsNormOp& op, const Program& /*program*/) {
  if (op.add) return {.reads = {op.input, op.output}, .writes = {}};
  return {.reads = {op.input}, .writes = {op.output}};
}

OpBuffers find(const LayerNormOp& op, const Program& /*program*/) {
  return {.reads = {op.input}, .writes = {op.output}};
}

OpBuffers find(const CastOp& op, const Program& /*program*/) {
  return {.reads = {op.input}, .writes = {op.output}};
}

OpBuffers find(const AddGivenColumnsOp& op, const Program& /*program*/) {
  return {.reads = {op.output}, .writes = {}};
}

OpBuffers find(const JoinNeighboursOp& op, const Program& /*program*/) {
  return {.reads = {op.input}, .writes = {op.output}};
}

OpBuffers find(const JoinColumnsOp& op, const Program& /*program*/) {
  return {.reads = op.inputs, .writes = {op.output}};
}

OpBuffers find(const AttentionOp& op, const Program& /*program*/) {
  return {.reads = {op.qkv, op.cosine, op.sine}, .writes = {op.output}};
}

OpBuffers find(const CrossKeysOp& op, const Program& /*program*/) {
  return {.reads = {op.kv}, .writes = {}};
}

OpBuffers find(const CrossAttentionOp& op, const Program& /*program*/) {
  return {.reads = {op.q}, .writes = {op.output}};
}

OpBuffers find(const LinearOp& op, const Program& /*program*/) {
  OpBuffers buffers{.reads = {op.input}, .writes = {}};
  if (op.scores != kNoBuffer) buffers.reads.push_back(op.scores);
  (op.epilogue == LinearEpilogue::kAdd ? buffers.reads : buffers.writes).push_back(op.output);
  return buffers;
}

OpBuffers find(const ExpertsOp& op, const Program& /*program*/) {
  OpBuffers buffers{.reads = {op.input, op.router_logits}, .writes = {}};
  (op.stores ? buffers.writes : buffers.reads).push_back(op.output);
  return buffers;
}

OpBuffers find(const GatedAddOp& op, const Program& /*program*/) {
  return {.reads = {op.input, op.gate, op.output}, .writes = {}};
}

OpBuffers find(const SigmoidGateOp& op, const Program& /*program*/) {
  return {.reads = {op.gate, op.output}, .writes = {}};
}

OpBuffers find(const GatedColumnsOp& op, const Program& /*program*/) {
  return {.reads = {op.gate, op.values}, .writes = {op.output}};
}

OpBuffers find(const GatedRmsNormOp& op, const Program& /*program*/) {
  return {.reads = {op.input, op.gate}, .writes = {op.output}};
}

OpBuffers find(const CausalConvolutionOp& op, const Program& /*program*/) {
  return {.reads = {op.values}, .writes = {}};
}

OpBuffers find(const SelectiveScanOp& op, const Program& /*program*/) {
  return {.reads = {op.values}, .writes = {op.output}};
}

OpBuffers find(const XieluOp& op, const Program& /*program*/) {
  return {.reads = {op.input}, .writes = {op.output}};
}

OpBuffers find(const GatedConvolutionOp& op, const Program& /*program*/) {
  return {.reads = {op.input}, .writes = {op.output}};
}

OpBuffers find(const GatedDeltaOp& op, const Program& /*program*/) {
  return {.reads = {op.qkv, op.gates}, .writes = {op.output}};
}

OpBuffers find(const LatentQueriesOp& op, const Program& /*program*/) {
  return {.reads = {op.queries, op.rows}, .writes = {op.output}};
}

OpBuffers find(const LatentValuesOp& op, const Program& /*program*/) {
  return {.reads = {op.input}, .writes = {op.output}};
}

OpBuffers find(const AllReduceOp& op, const Program& /*program*/) {
  OpBuffers buffers{.reads = {op.input}, .writes = {}};
  (op.add ? buffers.reads : buffers.writes).push_back(op.output);
  return buffers;
}

OpBuffers find(const AllHeadsNormOp& op, const Program& /*program*/) {
  return {.reads = {op.qkv}, .writes = {}};
}

OpBuffers find(const GatherOp& op, const Program& /*program*/) {
  return {.reads = {op.input}, .writes = {op.output}};
}

OpBuffers find(const ReceiveOp& op, const Program& /*program*/) {
  return {.reads = {}, .writes = {op.output}};
}

OpBuffers find(const SendOp& op, const Program& /*program*/) {
  return {.reads = {op.input}, .writes = {}};
}

OpBuffers find(const BroadcastOp& op, const Program& program) {
  if (program.is_last_stage()) return {.reads = {op.buffer}, .writes = {}};
  return {.reads = {}, .writes = {op.buffer}};
}

OpBuffers find(const KeepLogitRowsOp& op, const Program& /*program*/) {
  return {.reads = op.buffers, .writes = {}};
}

}  // namespace

bool OpBuffers::does_read(BufferId id) const {
  return std::ranges::find(reads, id) != reads.end();
}

bool OpBuffers::does_write(BufferId id) const {
  return std::ranges::find(writes, id) != writes.end();
}

OpBuffers buffers_of(const Op& op, const Program& program) {
  return std::visit([&](const auto& found) { return find(found, program); }, op);
}

}  // namespace adaptrt
