#include "lowering.h"

#include "adaptrt/core/error.h"
#include "attention_op.h"
#include "linear_op.h"
#include "row_ops.h"

namespace adaptrt {
namespace {

class Lowering {
 public:
  Lowering(const Program& program, const CudaMemory& memory, const KvPoolAddresses& pools,
           DeviceWeights& weights)
      : program_(program), memory_(memory), pools_(pools), weights_(weights) {}

  CudaOps run() {
    for (const Op& op : program_.body) lower_one(op);
    is_head_ = true;
    for (const Op& op : program_.head) lower_one(op);
    return std::move(ops_);
  }

 private:
  void lower_one(const Op& op) {
    std::visit([this](const auto& each) { lower_one(each); }, op);
  }

  void lower_one(const EmbeddingOp& op) { ops_.push_back(make_embedding(op, program_, memory_, weights_)); }
  void lower_one(const RopeTableOp& op) { ops_.push_back(make_rope_table(op, memory_, weights_)); }
  void lower_one(const AttentionOp& op) { ops_.push_back(make_attention(op, program_, memory_, pools_)); }

  void lower_one(const RmsNormOp& op) {
    const bool adds = op.input == waiting_;
    ops_.push_back(make_rms_norm(op, program_, is_head_, adds, memory_, weights_));
    // A norm of gathered rows leaves the stream as it was.
    if (adds && !op.gather_logit_rows) waiting_ = kNoBuffer;
  }

  void lower_one(const LinearOp& op) {
    if (op.epilogue == LinearEpilogue::kAdd) {
      add_waiting();
      waiting_ = op.output;
    }
    ops_.push_back(make_linear(op, program_, is_head_, memory_, weights_));
  }

  template <typename Other>
  void lower_one(const Other& /*op*/) {
    throw EngineError("an op of the program cannot run on a GPU");  // problems_on_cuda() names it
  }

  /// Adds memory.addend() to its stream, because another layer is about to overwrite it.
  void add_waiting() {
    if (waiting_ == kNoBuffer) return;
    ops_.push_back(make_addition(waiting_, program_, memory_));
    waiting_ = kNoBuffer;
  }

  const Program& program_;
  const CudaMemory& memory_;
  const KvPoolAddresses& pools_;
  DeviceWeights& weights_;
  CudaOps ops_;
  bool is_head_ = false;
  /// The residual stream to which memory.addend() is to be added.
  BufferId waiting_ = kNoBuffer;
};

}  // namespace

CudaOps lower(const Program& program, const CudaMemory& memory, const KvPoolAddresses& pools,
              DeviceWeights& weights) {
  return Lowering(program, memory, pools, weights).run();
}

}  // namespace adaptrt
