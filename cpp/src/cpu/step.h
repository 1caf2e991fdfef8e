#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "adaptrt/core/huge_array.h"
#include "adaptrt/core/thread_pool.h"
#include "adaptrt/engine/communicator.h"
#include "adaptrt/engine/engine.h"
#include "adaptrt/program/program.h"
#include "adaptrt/cpu/kernel_table.h"
#include "ops/attention_plan.h"
#include "kv_pool.h"
#include "position_bias.h"

namespace adaptrt {

/// Memory of one thread, reused by every op.
class Scratch {
 public:
  Scratch() = default;
  explicit Scratch(std::size_t floats) : memory_(floats * sizeof(float)) {}
  [[nodiscard]] float* data() const { return reinterpret_cast<float*>(memory_.data()); }

 private:
  HugeArray memory_;
};

/// Rows of an activation, one after another.
struct Rows {
  std::byte* data = nullptr;
  DType dtype = DType::kFloat32;
  std::int64_t width = 0;

  [[nodiscard]] std::int64_t row_bytes() const { return width * static_cast<std::int64_t>(size_of(dtype)); }
  [[nodiscard]] std::byte* row(std::int64_t index) const { return data + index * row_bytes(); }
  [[nodiscard]] float* float_row(std::int64_t index) const { return reinterpret_cast<float*>(row(index)); }
};

/// What KernelTable::pack_rows made of rows.
struct PackedRows {
  std::byte* data = nullptr;  ///< of the first row; nullptr: rows are read as they are
  std::int64_t step_bytes = 0;

  [[nodiscard]] bool is_there() const { return data != nullptr; }
  /// From row `index` on.
  [[nodiscard]] PackedRows from(std::int64_t index) const {
    return {data == nullptr ? nullptr : data + index * PackedSteps::kRowBytes, step_bytes};
  }
};

/// Bytes of a step of so many blocks of packed rows. An odd number of blocks: steps a power of two apart
/// would compete for the same places of a cache.
[[nodiscard]] inline std::int64_t odd_step_bytes(std::int64_t blocks) {
  return (blocks | 1) * PackedSteps::kBlockRows * PackedSteps::kRowBytes;
}

/// The same of so many packed rows, of which tiles may begin at any. No more than they need: a few rows of
/// steps that lie as far apart as those of many would be spread over as many pages as there are steps.
[[nodiscard]] inline std::int64_t packed_step_bytes(std::int64_t rows) {
  return odd_step_bytes(rows / PackedSteps::kBlockRows + 2);
}

/// Consecutive rows of a step that share an adapter.
struct AdapterGroup {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  const DeviceAdapter* adapter = nullptr;
};

/// Consecutive rows of a linear layer that an adapter changes, and where its matrices are.
struct AdaptedRows {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  /// Of lm_head the first of its slices, which all have the same A.
  const DeviceSite* site = nullptr;
};

/// The sum over ranks of what an op makes.
struct SumBehind {
  const AllReduceOp* op = nullptr;
  /// Whether there are other ops in between.
  bool is_later = false;
};

class ExpertMemory;
class OverlappedSum;
class PlacedWeights;
class StepRecorder;
struct LinearScratch;
struct RankMessages;

/// What the ops of a step work with.
struct Step {
  const Program& program;
  const KernelTable& kernels;
  ThreadPool& threads;
  std::byte* arena;
  const KvPool& kv_pool;
  /// Of encoder inputs.
  const KvPool& cross_pool;
  /// Of one layer, for attention that keeps no keys beyond the op.
  const KvPool& own_keys;
  const PositionBiases& position_biases;
  /// By thread; see scratch_floats of the ops.
  const std::vector<Scratch>& scratch;
  /// activation type [rows, shrink_stride]: x A^T of the linear layer that runs.
  std::byte* shrink;
  std::int64_t shrink_stride;
  /// uint8 [rows, int8_stride] and float32 [rows]: what KernelTable::quantize_row made of the input of the
  /// linear layer that runs, where its weights round activations. Of QuantAlgo::kW4A8 what arrange_int8_row
  /// made of them, and int32 [rows, groups] of their sums.
  std::uint8_t* int8_rows;
  std::int64_t int8_stride;
  float* int8_scales;
  std::int32_t* int8_sums;
  /// What KernelTable::pack_rows made of the input of the linear layer that runs, and behind it,
  /// packed_order_bytes apart, of each of `reordered`. nullptr where the kernels read rows as they are.
  std::byte* packed;
  std::int64_t packed_order_bytes;
  [[nodiscard]] PackedRows packed_for(std::int64_t num_rows) const {
    return {packed, packed_step_bytes(num_rows)};
  }
  /// activation type [orders, rows, inputs]: the input of the linear layer that runs in the orders that its
  /// weights have, where they have any; see ReorderedInput.
  std::byte* reordered;
  /// float32 [rows, groups]: what KernelTable::sum_groups made of the input of the linear layer that runs,
  /// where its weights have zero points; [orders, rows, groups] of `reordered`.
  float* group_sums;
  ExpertMemory& experts;
  /// nullptr: the weights are where the program refers to.
  PlacedWeights* weights;
  LinearScratch& linear_scratch;
  /// Of all ranks; nullptr where the program has one.
  Communicator* communicator;
  /// Of those of this stage.
  Communicator* stage_communicator;
  /// See rank_room_floats.
  float* rank_room;
  /// Behind it, for what linear ops exchange while a sum is under way: see low_rank_room_floats.
  float* low_rank_room;
  RankMessages& rank_messages;
  OverlappedSum& overlapped_sum;
  /// nullptr: nobody wants to know what the step's time goes to.
  StepRecorder* recorder;

  /// Of the section that runs: an encoder's sequences are the encoder inputs.
  const StepInput& input;
  std::span<const std::int32_t> sequence_of_token;  // [T]
  /// [S] in own_keys; a sequence's blocks follow one another.
  std::span<const std::int32_t> first_own_blocks;
  /// Groups of the section's rows that have an adapter, in order; empty in a step without adapters.
  std::span<const AdapterGroup> groups;
  /// The same of the step's output rows, which KeepLogitRowsOp makes the rows.
  std::span<const AdapterGroup> groups_of_output_rows;
  /// Rows of the linear op that runs, in order; see LinearWork.
  std::vector<AdaptedRows>& adapted_rows;
  /// The same of LinearWork::new_tokens.
  std::vector<AdaptedRows>& new_token_rows;
  const AttentionPlans& attention_plans;
  /// Of the op that runs.
  SumBehind sum_behind;
  /// Of the op that runs: its input as the op before has packed it, and where it packs its output for the
  /// next; see PackedOutputs. Not there where it is not.
  PackedRows packed_input;
  PackedRows packed_output;
  /// Rows of the section that runs: the step's tokens, or a slice of its output rows.
  std::int64_t rows = 0;
  /// Rows that logits or hidden states are wanted of. Of the body: all of the step's; of the head: those of
  /// the slice. Rows of buffers of RowKind::kTokens.
  std::span<const std::int32_t> output_rows;
  /// 0, 1, ...: what output_rows are after KeepLogitRowsOp.
  std::span<const std::int32_t> kept_output_rows;

  [[nodiscard]] std::int64_t num_tokens() const { return static_cast<std::int64_t>(input.token_ids.size()); }
  [[nodiscard]] std::int64_t num_sequences() const {
    return static_cast<std::int64_t>(input.prompt_lengths.size());
  }
  [[nodiscard]] const Buffer& buffer(BufferId id) const {
    return program.buffers[static_cast<std::size_t>(id)];
  }
  [[nodiscard]] Rows rows_of(BufferId id) const {
    const auto& found = buffer(id);
    return {arena + found.offset, found.dtype, found.width};
  }
  /// The first byte of a row of a buffer.
  [[nodiscard]] std::byte* row(BufferId id, std::int64_t index) const { return rows_of(id).row(index); }
  [[nodiscard]] float* float_row(BufferId id, std::int64_t index) const {
    return reinterpret_cast<float*>(row(id, index));
  }
};

/// Rows of `width` elements that are worth a chunk of a loop that does little with each.
[[nodiscard]] inline std::int64_t rows_per_chunk(std::int64_t width) {
  constexpr std::int64_t kElements = 8192;
  return std::max<std::int64_t>(1, kElements / width);
}

void run_op(const EmbeddingOp& op, const Step& step);
void run_op(const RmsNormOp& op, const Step& step);
void run_op(const LayerNormOp& op, const Step& step);
void run_op(const CastOp& op, const Step& step);
void run_op(const RopeTableOp& op, const Step& step);
void run_op(const AttentionOp& op, const Step& step);
void run_op(const LinearOp& op, const Step& step);
void run_op(const ExpertsOp& op, const Step& step);
void run_op(const GatedAddOp& op, const Step& step);
void run_op(const CrossKeysOp& op, const Step& step);
void run_op(const CrossAttentionOp& op, const Step& step);
void run_op(const AllReduceOp& op, const Step& step);
void run_op(const AllHeadsNormOp& op, const Step& step);
void run_op(const GatherOp& op, const Step& step);
void run_op(const ReceiveOp& op, const Step& step);
void run_op(const SendOp& op, const Step& step);
void run_op(const BroadcastOp& op, const Step& step);
/// Changes which rows the step has.
void run_op(const KeepLogitRowsOp& op, Step& step);

/// Floats of scratch that a thread needs for each kind of op.
[[nodiscard]] std::size_t linear_scratch_floats(const Program& program, const KernelTable& kernels);
[[nodiscard]] std::size_t attention_scratch_floats(const Program& program);
[[nodiscard]] std::size_t row_op_scratch_floats(const Program& program);
[[nodiscard]] std::size_t expert_scratch_floats(const Program& program);

/// Floats of what comes of other ranks in an op.
[[nodiscard]] std::size_t rank_room_floats(const Program& program);

/// Rows that linear layers have at most: a token's, a row of logits', or those of a slice of experts' rows.
[[nodiscard]] std::int64_t most_linear_rows(const Program& program);

/// Step::int8_stride that a program needs; 0 without weights that round activations.
[[nodiscard]] std::int64_t int8_row_bytes(const Program& program);

/// The most groups of inputs that a matrix of QuantAlgo::kW4A8 has.
[[nodiscard]] std::int64_t most_w4a8_groups(const Program& program);

/// Room for Step::packed, of the input or of one order.
struct PackedRowsSize {
  std::int64_t steps = 0;
  std::int64_t step_bytes = 0;

  [[nodiscard]] std::int64_t bytes() const { return steps * step_bytes; }
};
[[nodiscard]] PackedRowsSize packed_rows_size(const Program& program, const KernelTable& kernels);

/// The most groups of inputs that a matrix with zero points has.
[[nodiscard]] std::int64_t most_zero_point_groups(const Program& program);

/// Room for Step::reordered.
struct ReorderedSize {
  std::int64_t orders = 0;  ///< in which the rows of a layer may be needed
  std::int64_t row_bytes = 0;
  std::size_t parts = 0;  ///< of such a layer, of all its experts
};
[[nodiscard]] ReorderedSize reordered_size(const Program& program);

}  // namespace adaptrt
