#pragma once

#include <cstddef>
#include <memory>
#include <optional>

#include "adaptrt/engine/step_profile.h"
#include "adaptrt/program/program.h"
#include "context.h"
#include "packed_rows.h"
#include "section_rows.h"
#include "step.h"

namespace adaptrt {

/// An op that is ready to run: its buffers, kernels, input form and weights are resolved.
class LoweredOp {
 public:
  virtual ~LoweredOp() = default;
  /// Runs the op over the rows of a step. Only KeepLogitRowsOp changes `step`. Throws StepError if weights
  /// cannot be read, and EngineError if a rank is lost.
  virtual void run(Step& step) = 0;
};

/// Sum of an op's output over ranks; it runs after the op or overlaps with it.
struct FusedAllReduce {
  const AllReduceOp* op = nullptr;
  /// True if other ops run between the op and the sum.
  bool is_later = false;
};

/// The surroundings of an op in its program, needed to lower it.
struct OpPlace {
  const CpuContext& context;
  const SectionRows& rows;
  /// Where the previous op packs this op's input, and where this op packs its output.
  PackedPlace packed_input = {};
  PackedPlace packed_output = {};
  /// nullopt: no sum over ranks follows.
  std::optional<FusedAllReduce> all_reduce = std::nullopt;
};

using LoweredOpPtr = std::unique_ptr<LoweredOp>;

[[nodiscard]] LoweredOpPtr lower(const EmbeddingOp& op, const OpPlace& place);
[[nodiscard]] LoweredOpPtr lower(const AddGivenColumnsOp& op, const OpPlace& place);
[[nodiscard]] LoweredOpPtr lower(const JoinColumnsOp& op, const OpPlace& place);
[[nodiscard]] LoweredOpPtr lower(const JoinNeighboursOp& op, const OpPlace& place);
[[nodiscard]] LoweredOpPtr lower(const RmsNormOp& op, const OpPlace& place);
[[nodiscard]] LoweredOpPtr lower(const LayerNormOp& op, const OpPlace& place);
[[nodiscard]] LoweredOpPtr lower(const CastOp& op, const OpPlace& place);
[[nodiscard]] LoweredOpPtr lower(const RopeTableOp& op, const OpPlace& place);
[[nodiscard]] LoweredOpPtr lower(const AttentionOp& op, const OpPlace& place);
[[nodiscard]] LoweredOpPtr lower(const LinearOp& op, const OpPlace& place);
[[nodiscard]] LoweredOpPtr lower(const ExpertsOp& op, const OpPlace& place);
[[nodiscard]] LoweredOpPtr lower(const GatedAddOp& op, const OpPlace& place);
[[nodiscard]] LoweredOpPtr lower(const SigmoidGateOp& op, const OpPlace& place);
[[nodiscard]] LoweredOpPtr lower(const GatedColumnsOp& op, const OpPlace& place);
[[nodiscard]] LoweredOpPtr lower(const GatedRmsNormOp& op, const OpPlace& place);
[[nodiscard]] LoweredOpPtr lower(const CausalConvolutionOp& op, const OpPlace& place);
[[nodiscard]] LoweredOpPtr lower(const GatedDeltaOp& op, const OpPlace& place);
[[nodiscard]] LoweredOpPtr lower(const GatedConvolutionOp& op, const OpPlace& place);
[[nodiscard]] LoweredOpPtr lower(const XieluOp& op, const OpPlace& place);
[[nodiscard]] LoweredOpPtr lower(const SelectiveScanOp& op, const OpPlace& place);
[[nodiscard]] LoweredOpPtr lower(const LatentQueriesOp& op, const OpPlace& place);
[[nodiscard]] LoweredOpPtr lower(const LatentValuesOp& op, const OpPlace& place);
[[nodiscard]] LoweredOpPtr lower(const CrossKeysOp& op, const OpPlace& place);
[[nodiscard]] LoweredOpPtr lower(const CrossAttentionOp& op, const OpPlace& place);
[[nodiscard]] LoweredOpPtr lower(const AllReduceOp& op, const OpPlace& place);
[[nodiscard]] LoweredOpPtr lower(const AllHeadsNormOp& op, const OpPlace& place);
[[nodiscard]] LoweredOpPtr lower(const GatherOp& op, const OpPlace& place);
[[nodiscard]] LoweredOpPtr lower(const ReceiveOp& op, const OpPlace& place);
[[nodiscard]] LoweredOpPtr lower(const SendOp& op, const OpPlace& place);
[[nodiscard]] LoweredOpPtr lower(const BroadcastOp& op, const OpPlace& place);
[[nodiscard]] LoweredOpPtr lower(const KeepLogitRowsOp& op, const OpPlace& place);

}  // namespace adaptrt
