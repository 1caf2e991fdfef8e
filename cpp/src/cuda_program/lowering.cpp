#include "lowering.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/program/op_buffers.h"
#include "attention_op.h"
#include "experts_op.h"
#include "latent_ops.h"
#include "linear_op.h"
#include "read_positions.h"
#include "row_ops.h"
#include "sparse_mlp_op.h"
#include "state_ops.h"

namespace adaptrt {
namespace {

class Lowering {
 public:
  Lowering(const Program& program, const CudaMemory& memory, const KvPoolAddresses& pools,
           const DeviceStates& states, DeviceWeights& weights, bool hopper_prefill)
      : program_(program),
        memory_(memory),
        pools_(pools),
        states_(states),
        weights_(weights),
        hopper_prefill_(hopper_prefill) {}

  LoweredProgram run() {
    for (std::size_t i = 0; i < program_.body.size(); ++i) {
      if (i + 1 < program_.body.size() && lower_mlp(program_.body[i], program_.body[i + 1])) {
        ++i;
      } else {
        lower_one(program_.body[i]);
      }
    }
    weights_.enter(kNoSection);
    sections_.push_back(ops_.size());
    is_head_ = true;
    for (const Op& op : program_.head) lower_one(op);
    return {.ops = std::move(ops_),
            .read_positions = std::move(read_positions_),
            .sections = std::move(sections_),
            .sparse_mlps = std::move(sparse_mlps_)};
  }

 private:
  /// Lowers two ops as one MLP if they are one and its neurons have places.
  bool lower_mlp(const Op& first, const Op& second) {
    const LinearOp* gated = sparse_gate(first, second);
    if (gated == nullptr) return false;
    const auto& down = std::get<LinearOp>(second);
    const auto neurons = weights_.neurons(gated->parts[1].weight, down.parts[0].weight);
    if (!neurons) return false;
    add_waiting();  // the MLP overwrites memory.addend()
    if (down.epilogue == LinearEpilogue::kAdd) waiting_ = down.output;
    sparse_mlps_.push_back(ops_.size());
    ops_.push_back(make_sparse_mlp(*gated, down, *neurons, program_, memory_, weights_));
    read_positions_.resize(ops_.size(), std::max(last_read_position(first, program_.lora),
                                                 last_read_position(second, program_.lora)));
    return true;
  }

  void lower_one(const Op& op) {
    if (waiting_ != kNoBuffer && !adds_waiting(op)) {
      const OpBuffers buffers = buffers_of(op, program_);
      if (buffers.does_read(waiting_) || buffers.does_write(waiting_)) add_waiting();
    }
    std::visit([this](const auto& each) { lower_one(each); }, op);
    read_positions_.resize(ops_.size(), last_read_position(op, program_.lora));
  }

  void lower_one(const EmbeddingOp& op) {
    ops_.push_back(make_embedding(op, program_, memory_, weights_));
    if (auto adapted = make_adapted_embedding(op, program_, memory_, weights_)) {
      ops_.push_back(std::move(adapted));
    }
  }
  void lower_one(const RopeTableOp& op) { ops_.push_back(make_rope_table(op, memory_, weights_)); }
  void lower_one(const CastOp& op) { ops_.push_back(make_cast(op, program_, is_head_, memory_)); }
  void lower_one(const XieluOp& op) { ops_.push_back(make_xielu(op, program_, memory_)); }
  void lower_one(const ExpertsOp& op) { ops_.push_back(make_experts(op, program_, memory_, weights_)); }
  void lower_one(const GatedAddOp& op) { ops_.push_back(make_gated_add(op, program_, memory_)); }
  void lower_one(const GatedColumnsOp& op) { ops_.push_back(make_gated_columns(op, program_, memory_)); }
  void lower_one(const AttentionOp& op) {
    begin_section();
    ops_.push_back(op.shape.values_are_keys
                       ? make_latent_attention(op, program_, memory_, pools_)
                       : make_attention(op, program_, memory_, pools_, weights_, hopper_prefill_));
  }
  void lower_one(const LatentQueriesOp& op) {
    if (op.shape.num_heads != numbered_heads_) {
      ops_.push_back(make_head_numbers(op.shape, memory_));
      numbered_heads_ = op.shape.num_heads;
    }
    ops_.push_back(make_latent_queries(op, program_, memory_, weights_));
  }
  void lower_one(const LatentValuesOp& op) {
    ops_.push_back(make_latent_values(op, program_, memory_, weights_));
  }
  void lower_one(const CausalConvolutionOp& op) {
    begin_section();
    ops_.push_back(make_causal_convolution(op, program_, memory_, states_, weights_));
  }
  void lower_one(const GatedConvolutionOp& op) {
    begin_section();
    ops_.push_back(make_gated_convolution(op, program_, memory_, states_, weights_));
  }
  void lower_one(const GatedDeltaOp& op) {
    ops_.push_back(make_gated_delta(op, program_, memory_, states_, weights_));
  }
  void lower_one(const SelectiveScanOp& op) {
    ops_.push_back(make_selective_scan(op, program_, memory_, states_, weights_));
  }
  void lower_one(const GatedRmsNormOp& op) {
    ops_.push_back(make_gated_rms_norm(op, program_, memory_, weights_));
  }
  void lower_one(const SigmoidGateOp& op) { ops_.push_back(make_sigmoid_gate(op, program_, memory_)); }

  void begin_section() {
    weights_.enter(static_cast<std::int32_t>(sections_.size()));
    sections_.push_back(ops_.size());
  }

  void lower_one(const RmsNormOp& op) {
    if (op.add) {
      ops_.push_back(make_added_norm(op, program_, memory_, weights_));
    } else {
      lower_norm(op,
                 [&](bool adds) { return make_rms_norm(op, program_, is_head_, adds, memory_, weights_); });
    }
  }

  void lower_one(const LayerNormOp& op) {
    lower_norm(op,
               [&](bool adds) { return make_layer_norm(op, program_, is_head_, adds, memory_, weights_); });
  }

  template <typename Norm, typename Make>
  void lower_norm(const Norm& op, const Make& make) {
    const bool adds = op.input == waiting_;
    ops_.push_back(make(adds));
    // A norm of gathered rows leaves the stream as it was.
    if (adds && !op.gather_logit_rows) waiting_ = kNoBuffer;
  }

  void lower_one(const LinearOp& op) {
    if (op.epilogue == LinearEpilogue::kAdd) {
      add_waiting();  // the product overwrites memory.addend()
      waiting_ = op.output;
    }
    ops_.push_back(make_linear(op, program_, is_head_, memory_, weights_));
  }

  template <typename Other>
  void lower_one(const Other& /*op*/) {
    throw EngineError("an op of the program cannot run on a GPU");  // problems_on_cuda() names it
  }

  /// True if the op is a norm that adds memory.addend() to the stream that it reads.
  [[nodiscard]] bool adds_waiting(const Op& op) const {
    if (const auto* norm = std::get_if<RmsNormOp>(&op)) return !norm->add && norm->input == waiting_;
    const auto* norm = std::get_if<LayerNormOp>(&op);
    return norm != nullptr && norm->input == waiting_;
  }

  /// Adds memory.addend() to its stream.
  void add_waiting() {
    if (waiting_ == kNoBuffer) return;
    ops_.push_back(make_addition(waiting_, program_, memory_));
    waiting_ = kNoBuffer;
  }

  const Program& program_;
  const CudaMemory& memory_;
  const KvPoolAddresses& pools_;
  const DeviceStates& states_;
  DeviceWeights& weights_;
  const bool hopper_prefill_;
  CudaOps ops_;
  std::vector<std::int32_t> read_positions_;
  std::vector<std::size_t> sections_;
  std::vector<std::size_t> sparse_mlps_;
  bool is_head_ = false;
  /// Heads of latent attention for which the slots have numbers.
  std::int64_t numbered_heads_ = 0;
  /// The residual stream to which memory.addend() is to be added.
  BufferId waiting_ = kNoBuffer;
};

}  // namespace

LoweredProgram lower(const Program& program, const CudaMemory& memory, const KvPoolAddresses& pools,
                     const DeviceStates& states, DeviceWeights& weights, bool hopper_prefill) {
  return Lowering(program, memory, pools, states, weights, hopper_prefill).run();
}

}  // namespace adaptrt
