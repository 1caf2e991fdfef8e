// Decides what the CUDA engine runs. Everything that is not listed here as accepted is a problem.

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>

#include "adaptrt/cuda/expert_kernels.h"
#include "adaptrt/cuda/latent_kernels.h"
#include "adaptrt/cuda/state_kernels.h"
#include "adaptrt/cuda_program/cuda_engine.h"
#include "kernel_configs.h"
#include "sparse_mlp_op.h"

namespace adaptrt {
namespace {

/// Products and vector loads move eight elements at a time.
constexpr std::int64_t kVector = 8;
constexpr std::int64_t kMaxHeadDim = 512;
constexpr std::int64_t kMaxRotatedHeadDim = 256;

class Checker {
 public:
  explicit Checker(const Program& program) : program_(program) {}

  Problems run() {
    if (program_.matrix_layout != MatrixLayout::kRows) problems_.add("its matrices are in panels, for CPUs");
    refuse(program_.has_encoder(), "an encoder");
    refuse(program_.num_ranks != 1, "several ranks");
    refuse(program_.logits == kNoBuffer, "no logits");
    check_lora();
    check_section(program_.body, "body");
    check_section(program_.head, "head");
    return std::move(problems_);
  }

 private:
  void refuse(bool is_there, std::string_view what) {
    if (is_there) problems_.add("it has " + std::string(what));
  }
  void refuse_op(bool is_there, std::string_view what) {
    if (is_there) problems_.add(where_ + " has " + std::string(what));
  }

  void check_lora() {
    const LoraLayout& lora = program_.lora;
    refuse(!lora.rotary_factors.empty(), "factors for adapters' rotary positions");
    for (const LoraSite& site : lora.sites) {
      refuse(site.num_shares != 1, "adapters that are divided among ranks");
    }
  }

  void check_section(const std::vector<Op>& ops, std::string_view section) {
    for (std::size_t i = 0; i < ops.size(); ++i) {
      where_ = std::string(section) + " op " + std::to_string(i) + " (" + std::string(name_of(ops[i])) + ")";
      has_sparse_gate_ = i > 0 && sparse_gate(ops[i - 1], ops[i]) != nullptr;
      std::visit([this](const auto& op) { check(op); }, ops[i]);
    }
  }

  void check_width(std::int64_t width, std::string_view what) { check_multiple(width, kVector, what); }
  void check_multiple(std::int64_t width, std::int64_t unit, std::string_view what) {
    if (width % unit != 0) {
      problems_.add(where_ + ": " + std::string(what) + " is " + std::to_string(width) +
                    "; expected a multiple of " + std::to_string(unit));
    }
  }

  void check(const EmbeddingOp& op) {
    refuse_op(op.types.n != 0, "token types");
    refuse_op(op.num_later_elements != 0 || op.num_coordinates != 0, "coordinates of given rows");
    check_width(op.table.k, "the width");
  }
  void check(const RopeTableOp& /*op*/) {}
  void check(const RmsNormOp& op) {
    const Buffer& output = program_.buffers[static_cast<std::size_t>(op.output)];
    refuse_op(op.weight.size != output.width && !op.add, "norms of groups that are not added");
    check_width(op.weight.size, "the width");
  }
  void check(const LayerNormOp& op) { check_width(op.weight.size, "the width"); }
  void check(const CastOp& op) {
    check_width(program_.buffers[static_cast<std::size_t>(op.input)].width, "the width");
  }
  void check(const AttentionOp& op) {
    refuse_op(op.kind != AttentionKind::kCausal, "bidirectional attention");
    refuse_op(op.position_bias.size != 0, "biases of positions");
    if (op.norms_after_rotation) check_norms_after_rotation(op);
    refuse_op(op.value_norm.size != 0 && op.norms_after_rotation,
              "a norm of values, and others after a rotation");
    refuse_op(op.values_from_keys && (op.key_norm.size != op.shape.head_dim || op.value_norm.size == 0),
              "values from keys without a norm of each; expected both");
    refuse_op(op.joint_column >= 0, "rows that attend to later ones");
    if (op.shape.values_are_keys) check_keys_as_values(op);
    check_most(op.shape.head_dim, op.shape.values_are_keys ? cuda::kMaxKeyDim : kMaxHeadDim, "head_dim");
    check_width(op.shape.head_dim, "head_dim");
  }
  /// A kernel of its own attends to compressed rows.
  void check_keys_as_values(const AttentionOp& op) {
    refuse_op(op.softcap != 0.0F, "a soft cap with keys as values");
    refuse_op(op.sinks.size != 0, "sinks with keys as values");
    refuse_op(op.query_norm.size != 0 || op.key_norm.size != 0, "norms of heads with keys as values");
    refuse_op(op.chunk != 0, "chunks with keys as values");
    refuse_op(op.query_scaling_beta != 0.0F,
              "queries that are scaled by their position, with keys as values");
    const std::int64_t rotated = 2 * program_.buffers[static_cast<std::size_t>(op.cosine)].width;
    check_multiple(rotated, cuda::kRotatedUnit, "the rotated part of a key that is a value");
  }
  void check(const LatentQueriesOp& op) {
    check_width(op.shape.latent_dim, "latent_dim");
    check_width(op.shape.rotary_dim, "rotary_dim");
    check_width(op.shape.plain_dim, "plain_dim");
    check_heads(op.shape, op.keys);
  }
  void check(const LatentValuesOp& op) {
    check_width(op.shape.latent_dim, "latent_dim");
    check_width(op.shape.rotary_dim, "rotary_dim");
    check_width(op.shape.value_dim, "value_dim");
    check_heads(op.shape, op.values);
  }
  void check_heads(const LatentShape& shape, const std::vector<LinearPart>& heads) {
    check_most(shape.num_heads, cuda::kMaxExperts, "num_heads");
    for (const LinearPart& part : heads) {
      refuse_op(part.weight.quantization.algo != QuantAlgo::kNone, "quantised matrices of heads");
    }
  }
  /// One kernel rotates and normalises, a warp for each head.
  void check_norms_after_rotation(const AttentionOp& op) {
    if (op.shape.head_dim > kMaxRotatedHeadDim) {
      problems_.add(where_ + " has head_dim " + std::to_string(op.shape.head_dim) +
                    " with norms after the rotation; expected at most " + std::to_string(kMaxRotatedHeadDim));
    }
    refuse_op(op.query_norm.size == 0 || op.key_norm.size == 0,
              "a norm after the rotation of either queries or keys; expected both");
    check_width(program_.buffers[static_cast<std::size_t>(op.cosine)].width,
                "half of the rotated part of a head with norms after the rotation");
  }
  void check(const XieluOp& op) {
    check_width(program_.buffers[static_cast<std::size_t>(op.input)].width, "the width");
  }
  void check(const LinearOp& op) {
    refuse_op(op.has_sparse_input && !has_sparse_gate_,
              "a sparse input without a ReLU-gated layer before it");
    refuse_op(op.scores != kNoBuffer, "predicted scores of neurons");
    refuse_op(!op.neurons.is_empty(), "records of neurons");
    for (const LinearPart& part : op.parts) {
      check_width(part.weight.k, "the input's width");
      check_quantization(part.weight);
      if (!stores_float32(op, program_)) check_width(part.weight.n, "an output's width");
    }
    if (op.output != program_.logits) return;
    refuse_op(op.epilogue != LinearEpilogue::kStore, "logits after an activation");
  }
  void check(const GatedColumnsOp& op) {
    check_width(program_.buffers[static_cast<std::size_t>(op.gate)].width, "the gate's width");
    check_width(program_.buffers[static_cast<std::size_t>(op.values)].width, "the values' width");
    check_width(op.first_column, "first_column");
    refuse_op(op.activation == LinearEpilogue::kClampedSiluMul, "a clamped activation");
  }
  void check(const GatedAddOp& op) {
    check_width(program_.buffers[static_cast<std::size_t>(op.output)].width, "the width");
  }
  void check(const ExpertsOp& op) {
    refuse_op(op.num_remote_experts != 0, "experts of other ranks");
    refuse_op(op.num_experts() > cuda::kMaxExperts, "more than 1024 experts");
    refuse_op(op.routing.top_k > cuda::kMaxTopK, "more than 32 experts for a token");
    for (const std::vector<LinearPart>* parts : {&op.gate_up, &op.down}) {
      for (const LinearPart& part : *parts) {
        check_quantization(part.weight);
        check_width(part.weight.k, "the input's width");
        check_width(part.weight.n, "an output's width");
      }
    }
  }
  void check(const CausalConvolutionOp& op) { check_most(op.taps, cuda::kMaxTaps, "taps"); }
  void check(const GatedConvolutionOp& op) { check_most(op.taps, cuda::kMaxTaps, "taps"); }
  void check(const GatedDeltaOp& op) { check_most(op.shape.key_dim, cuda::kMaxStateRows, "key_dim"); }
  void check(const SelectiveScanOp& op) { check_most(op.shape.state_dim, cuda::kMaxStateRows, "state_dim"); }
  void check(const GatedRmsNormOp& op) { refuse_op(op.group_ranks != 1, "groups of several ranks"); }
  void check(const SigmoidGateOp& op) {
    check_width(program_.buffers[static_cast<std::size_t>(op.gate)].width, "the gate's width");
    check_width(program_.buffers[static_cast<std::size_t>(op.output)].width, "the width");
  }
  void check_most(std::int64_t value, std::int64_t most, std::string_view what) {
    if (value <= most) return;
    problems_.add(where_ + " has " + std::string(what) + " " + std::to_string(value) + "; expected at most " +
                  std::to_string(most));
  }
  /// Copies move 16 bytes of integers, and instructions multiply 16 of them.
  void check_quantization(const PanelMatrix& matrix) {
    constexpr std::int64_t kTogether = 16;
    const Quantization& how = matrix.quantization;
    if (how.algo == QuantAlgo::kNone) return;
    const std::int64_t unit = has_few_bits(how.algo) ? 2 * kTogether : kTogether;
    const auto refuse_size = [&](std::string_view what, std::int64_t size, std::int64_t expected) {
      if (size % expected == 0) return;
      problems_.add(where_ + ": " + std::string(what) + " of quantised weights is " + std::to_string(size) +
                    "; expected a multiple of " + std::to_string(expected));
    };
    refuse_size("the input's width", matrix.k, unit);
    refuse_size("the group size", how.group_size, kTogether);
  }
  template <typename Other>
  void check(const Other& /*op*/) {
    problems_.add(where_ + " is one that GPUs do not run yet");
  }

  const Program& program_;
  Problems problems_;
  std::string where_;
  bool has_sparse_gate_ = false;  ///< of the op that is checked: see sparse_gate()
};

}  // namespace

Problems problems_on_cuda(const Program& program) {
  return Checker(program).run();
}

}  // namespace adaptrt
