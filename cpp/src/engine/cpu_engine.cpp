#include <algorithm>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/core/huge_array.h"
#include "adaptrt/engine/engine.h"
#include "kv_pool.h"
#include "step.h"

namespace adaptrt {
namespace {

class CpuEngine final : public Engine {
 public:
  CpuEngine(Program program, std::shared_ptr<ThreadPool> pool, const KernelTable& kernels)
      : program_(std::move(program)), kernels_(kernels), threads_(std::move(pool)), kv_pool_(program_) {
    arena_ = HugeArray(program_.arena_bytes);
    if (!program_.lora.sites.empty()) {
      shrink_stride_ = std::int64_t{program_.lora.max_rank} * static_cast<std::int64_t>(kMaxPartsPerSite);
      shrink_ = HugeArray(static_cast<std::size_t>(program_.max_num_tokens * shrink_stride_) * sizeof(float));
    }
    const std::size_t floats = std::max(linear_scratch_floats(), attention_scratch_floats(program_.shape));
    for (int thread = 0; thread < threads_->num_threads(); ++thread) scratch_.emplace_back(floats);
    fill_info();
  }

  [[nodiscard]] const EngineInfo& info() const override { return info_; }

  void allocate_kv_blocks(std::int32_t num_blocks) override { kv_pool_.allocate(num_blocks); }

  void step(const StepInput& input, const LogitsSink& sink) override {
    check_step_input(input, info_, kv_pool_.num_blocks());
    name_sequences(input);
    group_tokens(input);
    Step step{.program = program_,
              .kernels = kernels_,
              .threads = *threads_,
              .arena = arena_.data(),
              .kv_pool = kv_pool_,
              .scratch = scratch_,
              .shrink = shrink_.data(),
              .shrink_stride = shrink_stride_,
              .input = input,
              .sequence_of_token = sequence_of_token_,
              .groups = groups_,
              .rows = static_cast<std::int64_t>(input.token_ids.size()),
              .logit_rows = {}};
    run(program_.body, step);
    const auto all_rows = input.logit_rows;
    const auto slice = static_cast<std::size_t>(program_.max_batch_size);
    for (std::size_t first = 0; first < all_rows.size(); first += slice) {
      step.logit_rows = all_rows.subspan(first, std::min(slice, all_rows.size() - first));
      step.rows = static_cast<std::int64_t>(step.logit_rows.size());
      run(program_.head, step);
      sink(static_cast<std::int64_t>(first), step.rows, step.float_row(program_.logits, 0));
    }
  }

 private:
  static void run(const std::vector<Op>& ops, const Step& step) {
    for (const auto& op : ops) {
      std::visit([&](const auto& found) { run_op(found, step); }, op);
    }
  }

  void name_sequences(const StepInput& input) {
    sequence_of_token_.resize(input.token_ids.size());
    for (std::size_t sequence = 0; sequence < input.prompt_lengths.size(); ++sequence) {
      std::fill(sequence_of_token_.begin() + input.sequence_offsets[sequence],
                sequence_of_token_.begin() + input.sequence_offsets[sequence + 1],
                static_cast<std::int32_t>(sequence));
    }
  }

  void group_tokens(const StepInput& input) {
    groups_.clear();
    const DeviceAdapter* before = nullptr;
    for (std::size_t sequence = 0; sequence < input.adapters.size(); ++sequence) {
      const DeviceAdapter* adapter = input.adapters[sequence];
      if (adapter != nullptr && adapter == before) {
        groups_.back().end = input.sequence_offsets[sequence + 1];
      } else if (adapter != nullptr) {
        groups_.push_back({input.sequence_offsets[sequence], input.sequence_offsets[sequence + 1], adapter});
      }
      before = adapter;
    }
  }

  void fill_info() {
    info_ = {.dtype = program_.dtype,
             .vocab_size = program_.vocab_size,
             .num_layers = program_.num_layers,
             .max_batch_size = program_.max_batch_size,
             .max_num_tokens = program_.max_num_tokens,
             .max_input_len = program_.max_input_len,
             .max_seq_len = program_.max_seq_len,
             .max_beam_width = program_.max_beam_width,
             .tokens_per_block = program_.tokens_per_block,
             .kv_block_bytes = kv_pool_.block_bytes(),
             .max_reusable_prompt_len = program_.max_seq_len,
             .lora = program_.lora};
    for (const auto& op : program_.body) {
      const auto* rope = std::get_if<RopeTableOp>(&op);
      if (rope != nullptr && rope->kind == RopeKind::kDynamic) {
        // Longer prompts turn all their positions by angles of their own length.
        info_.max_reusable_prompt_len = std::min(info_.max_reusable_prompt_len, rope->original_max_position);
      }
    }
  }

  Program program_;
  const KernelTable& kernels_;
  std::shared_ptr<ThreadPool> threads_;
  EngineInfo info_;
  HugeArray arena_;
  HugeArray shrink_;
  std::int64_t shrink_stride_ = 0;
  KvPool kv_pool_;
  std::vector<Scratch> scratch_;
  // Of the step that runs.
  std::vector<std::int32_t> sequence_of_token_;
  std::vector<AdapterGroup> groups_;
};

}  // namespace

std::unique_ptr<Engine> make_cpu_engine(Program program, std::shared_ptr<ThreadPool> pool,
                                        std::string_view kernels) {
  const KernelTable& table = find_kernels(kernels);
  program.validate().throw_if_any<EngineError>("the engine's program is inconsistent");
  try {
    return std::make_unique<CpuEngine>(std::move(program), std::move(pool), table);
  } catch (const std::bad_alloc&) {
    throw EngineError("no memory for the engine's activations");
  }
}

}  // namespace adaptrt
