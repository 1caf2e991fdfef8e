#include "adaptrt/cpu/cpu_engine.h"

#include <algorithm>
#include <memory>
#include <new>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/engine/check_step_input.h"
#include "adaptrt/engine/engine.h"
#include "adaptrt/engine/microbatches.h"
#include "encoder_step.h"
#include "engine_info.h"
#include "kv_pool.h"
#include "lowered_program.h"
#include "measure/count_usage.h"
#include "measure/step_recorder.h"
#include "ops/linear/relu_gated.h"
#include "output_rows.h"
#include "ranks/overlapped_sum.h"
#include "ranks/stage_communicator.h"
#include "section_rows.h"
#include "state_memory.h"
#include "step.h"
#include "step_memory.h"
#include "weights/placed_weights.h"
#include "weights/weight_plan.h"

namespace adaptrt {
namespace {

class CpuEngine final : public Engine {
 public:
  CpuEngine(Program program, std::shared_ptr<ThreadPool> pool, const KernelTable& kernels,
            std::shared_ptr<StepProfile> profile, std::shared_ptr<Communicator> communicator,
            std::unique_ptr<PlacedWeights> weights, std::shared_ptr<WeightUsageCounter> usage)
      : program_(std::move(program)),
        weights_(std::move(weights)),
        usage_(std::move(usage)),
        kernels_(kernels),
        threads_(std::move(pool)),
        communicator_(std::move(communicator)),
        stage_communicator_(communicator_of_stage(program_, communicator_)),
        kv_pool_(make_kv_pool(program_)),
        cross_pool_(make_cross_pool(program_)),
        step_local_kv_(make_own_keys(program_)),
        position_biases_(program_),
        state_memory_(program_),
        memory_(program_, kernels_, threads_->num_threads()),
        recorder_(profile ? std::make_unique<StepRecorder>(std::move(profile), *threads_) : nullptr),
        context_(make_context()),
        overlapped_sum_(context_),
        rows_(program_.body),
        encoder_rows_(program_.encoder),
        encoder_(StepSection::kEncoder, program_.encoder, context_, encoder_rows_),
        body_(StepSection::kBody, program_.body, context_, rows_),
        head_(StepSection::kHead, program_.head, context_, rows_) {
    info_ = info_of(program_, kernels_, kv_pool_, cross_pool_, state_memory_);
    if (step_local_kv_.block_bytes() > 0) {
      // Each sequence may have a block that is not full.
      const std::int64_t most = std::min(program_.max_batch_size, program_.max_num_tokens) +
                                program_.max_num_tokens / step_local_kv_.tokens_per_block();
      step_local_kv_.allocate(static_cast<std::int32_t>(most));
    }
    if (program_.hidden != kNoBuffer) {
      num_hidden_ops_ = program_.num_ops_to_hidden();
      hidden_rows_.resize(static_cast<std::size_t>(program_.max_batch_size) *
                          static_cast<std::size_t>(info_.hidden_size));
    }
    if (program_.num_stages > 1 && program_.has_encoder()) {
      const auto broadcasts = [](const Op& op) { return std::holds_alternative<BroadcastOp>(op); };
      num_encoder_layer_ops_ = static_cast<std::size_t>(std::ranges::find_if(program_.encoder, broadcasts) -
                                                        program_.encoder.begin());
    }
  }

  [[nodiscard]] const EngineInfo& info() const override { return info_; }

  [[nodiscard]] std::optional<WeightPlacement> weight_placement() const override {
    return weights_ ? std::optional(weights_->placement()) : std::nullopt;
  }

  void allocate_kv_blocks(std::int32_t num_blocks) override {
    if (!info_.has_kv_cache) throw EngineError("the engine keeps no keys and values, so it has no KV blocks");
    kv_pool_.allocate(num_blocks);
  }
  void allocate_cross_kv_blocks(std::int32_t num_blocks) override {
    if (!program_.has_encoder()) return Engine::allocate_cross_kv_blocks(num_blocks);
    cross_pool_.allocate(num_blocks);
  }
  void allocate_states(std::int32_t num_slots) override {
    if (!info_.has_states()) return Engine::allocate_states(num_slots);
    state_memory_.allocate(num_slots);
  }
  void end_steps() override {
    recorder_.reset();
    threads_.reset();
  }

  void read_kv_block(std::int32_t block, std::span<std::byte> bytes) const override {
    const auto content = kv_pool_.block(block);
    require_block_size(bytes.size());
    std::ranges::copy(content, bytes.begin());
  }

  void write_kv_block(std::int32_t block, std::span<const std::byte> bytes) override {
    const auto content = kv_pool_.block(block);
    require_block_size(bytes.size());
    std::ranges::copy(bytes, content.begin());
  }

  void read_states(std::int32_t slot, std::span<std::byte> bytes) const override {
    state_memory_.read(slot, bytes);
  }

  void write_states(std::int32_t slot, std::span<const std::byte> bytes) override {
    state_memory_.write(slot, bytes);
  }

  using Engine::step;
  void step(const StepInput& input, const LogitsSink& sink, const HiddenSink& hidden_sink) override {
    if (!threads_) throw EngineError("the engine's steps have ended: its executor was shut down");
    checker_.check(input, info_, kv_pool_.num_blocks(), state_memory_.num_slots());
    check_encoder_inputs(input, info_, cross_pool_.num_blocks());
    if (!input.copies_from.empty()) kv_pool_.copy_blocks(input.copies_from, input.copies_to, *threads_);
    if (info_.has_states()) prepare_states(input);
    overlapped_sum_.forget();
    const TileReleaser releaser(kernels_);
    if (recorder_) recorder_->begin_step(input);
    if (weights_) {
      weights_->begin_step(std::ssize(input.token_ids) <= most_sparse_rows(kernels_, program_.dtype));
    }
    if (!input.encoder.empty()) run_encoder(input);
    rows_.describe(input, step_local_kv_.tokens_per_block(), threads_->num_threads());
    output_rows_.set(input.logit_rows, input.hidden_rows);
    group_output_rows(output_rows_.all());
    Step step = make_step(input, rows_);
    step.groups_of_output_rows = groups_of_output_rows_;
    step.output_rows = output_rows_.all();
    step.kept_output_rows = kept_output_rows_;
    if (usage_) usage_->update([&](WeightUsage& usage) { usage.tokens += step.rows; });
    run(body_, {0, body_.size()}, step);
    const auto rows_of_body = step.output_rows;
    run_head(step, output_rows_.logit_rows(rows_of_body), input.logit_rows, head_.size(), sink,
             [&] { return context_.rows_of(program_.logits).float_row(0); });
    if (!input.hidden_rows.empty()) {
      run_head(step, output_rows_.hidden_rows(rows_of_body), input.hidden_rows, num_hidden_ops_, hidden_sink,
               [&] { return widen_hidden(step); });
    }
    // Checked before the step's results are used.
    if (program_.mapped_file) program_.mapped_file->check();
    if (recorder_) recorder_->end_step();
  }

 private:
  /// Releases the kernels' state of the calling thread, even if a step throws.
  class TileReleaser {
   public:
    explicit TileReleaser(const KernelTable& kernels) : release_(kernels.release_tiles) {}
    ~TileReleaser() {
      if (release_ != nullptr) release_();
    }
    TileReleaser(const TileReleaser&) = delete;
    TileReleaser& operator=(const TileReleaser&) = delete;

   private:
    void (*release_)();
  };

  /// Copies states, and clears those of sequences that start.
  void prepare_states(const StepInput& input) {
    state_memory_.copy(input.state_copies_from, input.state_copies_to, *threads_);
    for (std::size_t sequence = 0; sequence < input.state_slots.size(); ++sequence) {
      const auto first = static_cast<std::size_t>(input.sequence_offsets[sequence]);
      if (input.positions[first] == 0) state_memory_.clear(input.state_slots[sequence], *threads_);
    }
  }

  void require_block_size(std::size_t bytes) const {
    if (bytes == kv_pool_.block_bytes()) return;
    throw EngineError("a KV block has " + std::to_string(kv_pool_.block_bytes()) + " bytes, not " +
                      std::to_string(bytes));
  }

  /// Runs the first ops of the head for slices of `rows`, and passes the `result` of each slice to the sink.
  template <class Result>
  void run_head(Step& step, std::span<const std::int32_t> rows, std::span<const std::int32_t> tokens,
                std::size_t num_ops,
                const std::function<void(std::int64_t, std::int64_t, const float*)>& sink,
                const Result& result) {
    const auto slice = static_cast<std::size_t>(program_.max_batch_size);
    for (std::size_t first = 0; first < rows.size(); first += slice) {
      step.output_rows = rows.subspan(first, std::min(slice, rows.size() - first));
      step.rows = static_cast<std::int64_t>(step.output_rows.size());
      group_slice(tokens.subspan(first, step.output_rows.size()));
      step.groups = groups_of_slice_;
      run(head_, {0, num_ops}, step);
      if (recorder_) recorder_->begin_op(StepSection::kSink, 0);
      sink(static_cast<std::int64_t>(first), step.rows, result());
      if (recorder_) recorder_->end_op([] { return OpCost{}; });
    }
  }

  /// The hidden states of a slice in float32.
  const float* widen_hidden(const Step& step) {
    const Rows hidden = context_.rows_of(program_.hidden);
    if (hidden.dtype == DType::kFloat32) return hidden.float_row(0);
    const std::int64_t size = step.rows * info_.hidden_size;
    const auto* bits = reinterpret_cast<const std::uint16_t*>(hidden.row(0));
    std::transform(bits, bits + size, hidden_rows_.begin(), bfloat16_to_float);
    return hidden_rows_.data();
  }

  /// Ops [first, last) of a section.
  struct OpRange {
    std::size_t first;
    std::size_t last;
  };

  void run(const LoweredSection& section, OpRange range, Step& step) {
    for (std::size_t i = range.first; i < range.last; ++i) {
      if (step.rows == 0) return;  // KeepLogitRowsOp in a step without requested rows
      if (recorder_) recorder_->begin_op(section.section(), i);
      section.run(i, step);
      if (overlapped_sum_.is_under_way()) overlapped_sum_.go_on();
      if (usage_ && section.section() == StepSection::kBody) {
        usage_->update(
            [&](WeightUsage& usage) { count_usage(i, section.op(i), context_, step.rows, &usage); });
      }
      if (recorder_) recorder_->end_op([&] { return cost_of(section.op(i), context_, step); });
    }
  }

  CpuContext make_context() {
    return {.program = program_,
            .kernels = kernels_,
            .threads = *threads_,
            .memory = memory_,
            .kv_pool = kv_pool_,
            .cross_pool = cross_pool_,
            .step_local_kv = step_local_kv_,
            .position_biases = position_biases_,
            .state_memory = state_memory_,
            .weights = weights_.get(),
            .communicator = communicator_.get(),
            .stage_communicator = stage_communicator_.get(),
            .rank_messages = rank_messages_,
            .overlapped_sum = overlapped_sum_,
            .recorder = recorder_.get()};
  }

  static Step make_step(const StepInput& input, const SectionRows& rows) {
    return {.input = input,
            .sequence_of_token = rows.sequence_of_token,
            .first_local_blocks = rows.first_local_blocks,
            .groups = rows.groups,
            .rows = static_cast<std::int64_t>(input.token_ids.size())};
  }

  /// Runs the encoder over a step's encoder inputs. If there are several stages, inputs pass through them in
  /// micro-batches, and the last stage broadcasts the whole output.
  void run_encoder(const StepInput& input) {
    if (program_.num_stages > 1) pass_encoder_layers(input);
    encoder_step_.set(input);
    Step step = make_encoder_step();
    if (program_.num_stages > 1 && program_.is_last_stage()) {
      std::ranges::copy(encoded_rows_, context_.rows_of(program_.encoder_output).row(0));
    }
    run(encoder_, {num_encoder_layer_ops_, encoder_.size()}, step);
    copy_encoder_outputs(input.encoder, context_.rows_of(program_.encoder_output));
  }

  /// Runs the ops before the BroadcastOp. The last stage keeps their output for each micro-batch.
  void pass_encoder_layers(const StepInput& input) {
    encoded_rows_.clear();
    for (const SequenceRun& microbatch : runs_of_whole_sequences(input.encoder.offsets)) {
      encoder_step_.set(input, microbatch);
      Step step = make_encoder_step();
      run(encoder_, {0, num_encoder_layer_ops_}, step);
      if (!program_.is_last_stage()) continue;
      const Rows made = context_.rows_of(program_.encoder_output);
      encoded_rows_.insert(encoded_rows_.end(), made.data, made.row(step.rows));
    }
  }

  /// Makes the step of encoder_step_'s inputs.
  Step make_encoder_step() {
    encoder_rows_.describe(encoder_step_.input(), step_local_kv_.tokens_per_block(), threads_->num_threads());
    return make_step(encoder_step_.input(), encoder_rows_);
  }

  /// Copies encoder outputs to the caller's arrays.
  static void copy_encoder_outputs(const EncoderInputs& inputs, const Rows& made) {
    for (std::size_t i = 0; i < inputs.outputs.size(); ++i) {
      if (inputs.outputs[i] == nullptr) continue;
      const std::int32_t begin = inputs.offsets[i];
      for (std::int32_t row = begin; row < inputs.offsets[i + 1]; ++row) {
        const std::byte* from = made.row(row);
        float* to = inputs.outputs[i] + (row - begin) * made.width;
        for (std::int64_t k = 0; k < made.width; ++k) {
          to[k] = load_as_float(from, made.dtype, static_cast<std::size_t>(k));
        }
      }
    }
  }

  /// Prepares KeepLogitRowsOp. Call it after group_tokens.
  void group_output_rows(std::span<const std::int32_t> rows) {
    kept_output_rows_.resize(rows.size());
    std::iota(kept_output_rows_.begin(), kept_output_rows_.end(), 0);
    groups_of_output_rows_.clear();
    for (const AdapterGroup& group : rows_.groups) {
      const auto begin = std::ranges::lower_bound(rows, group.begin) - rows.begin();
      const auto end = std::ranges::lower_bound(rows, group.end) - rows.begin();
      if (begin < end) groups_of_output_rows_.push_back({begin, end, group.adapter});
    }
  }

  /// Finds the groups of a slice of the head's rows, which belong to these tokens of the step.
  void group_slice(std::span<const std::int32_t> tokens) {
    groups_of_slice_.clear();
    for (const AdapterGroup& group : rows_.groups) {
      const auto begin = std::ranges::lower_bound(tokens, group.begin) - tokens.begin();
      const auto end = std::ranges::lower_bound(tokens, group.end) - tokens.begin();
      if (begin < end) groups_of_slice_.push_back({begin, end, group.adapter});
    }
  }

  Program program_;
  /// nullptr: all weights are in memory, where the program's ops point.
  std::unique_ptr<PlacedWeights> weights_;
  std::shared_ptr<WeightUsageCounter> usage_;  ///< nullptr: not recorded
  const KernelTable& kernels_;
  std::shared_ptr<ThreadPool> threads_;
  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<Communicator> stage_communicator_;
  EngineInfo info_;
  RankMessages rank_messages_;
  /// Number of ops of the head up to the one that writes Program::hidden.
  std::size_t num_hidden_ops_ = 0;
  /// Number of ops of the encoder before its BroadcastOp; 0: it has none.
  std::size_t num_encoder_layer_ops_ = 0;
  std::vector<float> hidden_rows_;  // hidden states of a slice, converted from bfloat16
  KvPool kv_pool_;
  KvPool cross_pool_;
  KvPool step_local_kv_;
  PositionBiases position_biases_;
  StateMemory state_memory_;
  StepMemory memory_;
  /// nullptr without a profile.
  std::unique_ptr<StepRecorder> recorder_;
  CpuContext context_;
  OverlappedSum overlapped_sum_;
  SectionRows rows_;
  SectionRows encoder_rows_;
  LoweredSection encoder_;
  LoweredSection body_;
  LoweredSection head_;
  StepInputChecker checker_;
  // State of the current step.
  EncoderStep encoder_step_;
  std::vector<std::byte> encoded_rows_;  // the last stage's encoder output, if there are several stages
  std::vector<AdapterGroup> groups_of_output_rows_;
  std::vector<AdapterGroup> groups_of_slice_;
  OutputRows output_rows_;
  std::vector<std::int32_t> kept_output_rows_;
};

/// If one rank failed to read its weights, the others would wait for it.
void require_one_rank(const Program& program, const WeightMemory& memory) {
  if (program.num_ranks == 1) return;
  throw ConfigError("weight_memory is " + std::to_string(memory.bytes) +
                    "; accepted: None, the engine has several ranks");
}

/// Throws the errors of make_cpu_engine.
std::unique_ptr<PlacedWeights> place_weights(Program* program, const WeightMemory& memory) {
  require_one_rank(*program, memory);
  try {
    return std::make_unique<PlacedWeights>(program, memory);
  } catch (const StepError& error) {
    throw EngineError(error.what());
  } catch (const std::bad_alloc&) {
    throw ConfigError("weight_memory is " + std::to_string(memory.bytes) +
                      "; the system refuses that much memory");
  }
}

/// Throws EngineError if a program and its communicator have different ranks.
void require_ranks(const Program& program, const Communicator* communicator) {
  const std::int32_t size = communicator == nullptr ? 1 : communicator->size();
  const std::int32_t rank = communicator == nullptr ? 0 : communicator->rank();
  if (size == program.num_ranks && rank == program.rank) return;
  throw EngineError("the engine is rank " + std::to_string(program.rank) + " of " +
                    std::to_string(program.num_ranks) + ", the communicator's is rank " +
                    std::to_string(rank) + " of " + std::to_string(size));
}

}  // namespace

EngineInfo cpu_engine_info(const Program& program, std::string_view kernels) {
  EngineInfo info = info_of(program, find_kernels(kernels), make_kv_pool(program), make_cross_pool(program),
                            StateMemory(program));
  if (program.num_stages > 1) info.attention_windows.clear();
  return info;
}

void check_weight_memory(const Program& program, const WeightMemory& memory) {
  require_one_rank(program, memory);
  static_cast<void>(plan_weights(program, memory));
}

std::unique_ptr<Engine> make_cpu_engine(Program program, std::shared_ptr<ThreadPool> pool,
                                        std::string_view kernels, std::shared_ptr<StepProfile> profile,
                                        std::shared_ptr<Communicator> communicator,
                                        const WeightMemory* weight_memory,
                                        std::shared_ptr<WeightUsageCounter> usage) {
  return make_cpu_engine(std::move(program), std::move(pool), find_kernels(kernels), std::move(profile),
                         std::move(communicator), weight_memory, std::move(usage));
}

std::unique_ptr<Engine> make_cpu_engine(Program program, std::shared_ptr<ThreadPool> pool,
                                        const KernelTable& kernels, std::shared_ptr<StepProfile> profile,
                                        std::shared_ptr<Communicator> communicator,
                                        const WeightMemory* weight_memory,
                                        std::shared_ptr<WeightUsageCounter> usage) {
  program.validate().throw_if_any<EngineError>("the engine's program is inconsistent");
  if (program.matrix_layout != MatrixLayout::kPanels) {
    throw EngineError("the engine's matrices are row-major, for GPUs; the CPU engine expects panels");
  }
  require_ranks(program, communicator.get());
  std::unique_ptr<PlacedWeights> weights;
  if (weight_memory != nullptr) weights = place_weights(&program, *weight_memory);
  try {
    return std::make_unique<CpuEngine>(std::move(program), std::move(pool), kernels, std::move(profile),
                                       std::move(communicator), std::move(weights), std::move(usage));
  } catch (const std::bad_alloc&) {
    throw EngineError("no memory for the engine's activations");
  }
}

}  // namespace adaptrt
