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

/// An op that is ready to run: its buffers, its kernels, the form of its input and the place of its weights
/// are resolved.
class LoweredOp {
 public:
  virtual ~LoweredOp() = default;
  /// Runs the op over the rows of a step. KeepLogitRowsOp changes which rows the step has; the others leave
  /// `step` as it is. Throws StepError for weights that cannot be read, EngineError for a rank that is lost.
  virtual void run(Step& step) = 0;
};

/// The sum over ranks of an op's output, after the op.
struct FusedAllReduce {
  const AllReduceOp* op = nullptr;
  /// There are other ops in between.
  bool is_later = false;
};

/// The surroundings of an op in its program, as it is lowered.
struct OpPlace {
  const CpuContext& context;
  const SectionRows& rows;
  /// Places where the op before packs this op's input, and where this op packs its output.
  PackedPlace packed_input = {};
  PackedPlace packed_output = {};
  /// nullopt: no sum over ranks follows.
  std::optional<FusedAllReduce> all_reduce = std::nullopt;
};

using LoweredOpPtr = std::unique_ptr<LoweredOp>;

[[nodiscard]] LoweredOpPtr lower(const EmbeddingOp& op, const OpPlace& place);
[[nodiscard]] LoweredOpPtr lower(const RmsNormOp& op, const OpPlace& place);
[[nodiscard]] LoweredOpPtr lower(const LayerNormOp& op, const OpPlace& place);
[[nodiscard]] LoweredOpPtr lower(const CastOp& op, const OpPlace& place);
[[nodiscard]] LoweredOpPtr lower(const RopeTableOp& op, const OpPlace& place);
[[nodiscard]] LoweredOpPtr lower(const AttentionOp& op, const OpPlace& place);
[[nodiscard]] LoweredOpPtr lower(const LinearOp& op, const OpPlace& place);
[[nodiscard]] LoweredOpPtr lower(const ExpertsOp& op, const OpPlace& place);
[[nodiscard]] LoweredOpPtr lower(const GatedAddOp& op, const OpPlace& place);
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
