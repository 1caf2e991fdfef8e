#include "adaptrt/sharded/sharded_engine.h"

#include <algorithm>
#include <exception>
#include <optional>
#include <string>
#include <utility>

#include "adaptrt/core/error.h"
#include "adaptrt/engine/check_step_input.h"
#include "adaptrt/sharded/step_microbatches.h"
#include "rank_commands.h"
#include "rank_times.h"
#include "stages.h"
#include "step_message.h"

namespace adaptrt {
namespace {

/// Rank 0's pages. The other ranks get the packed adapters before the next step.
class ShardedPages final : public AdapterPages {
 public:
  ShardedPages(std::unique_ptr<AdapterPages> local, std::shared_ptr<PendingLoads> pending)
      : local_(std::move(local)), pending_(std::move(pending)) {}

  [[nodiscard]] std::size_t page_bytes() const override { return local_->page_bytes(); }
  [[nodiscard]] std::int64_t num_pages() const override { return local_->num_pages(); }
  [[nodiscard]] std::byte* address(std::int64_t page) const override { return local_->address(page); }
  void load(std::span<const std::int64_t> pages, const Write& write) override { local_->load(pages, write); }
  [[nodiscard]] bool shares_adapters() const override { return true; }
  void share(const std::shared_ptr<const HostAdapter>& adapter, std::span<const std::int64_t> pages,
             std::uint64_t load_id) override {
    pending_->add({adapter, {pages.begin(), pages.end()}, load_id});
  }

 private:
  std::unique_ptr<AdapterPages> local_;
  std::shared_ptr<PendingLoads> pending_;
};

class ShardedEngine final : public Engine {
 public:
  ShardedEngine(std::shared_ptr<Engine> local, std::shared_ptr<Communicator> communicator,
                const std::optional<PipelineFacts>& pipeline, std::shared_ptr<StepProfile> profile)
      : local_(std::move(local)),
        commands_(std::move(communicator)),
        info_(local_->info()),
        times_(std::move(profile)) {
    info_.kv_identity.clear();
    if ((info_.num_stages > 1) != pipeline.has_value()) {
      throw EngineError("PipelineFacts are those of an engine of several stages, which needs them");
    }
    if (pipeline) describe(*pipeline);
  }
  ~ShardedEngine() override { commands_.dismiss(); }
  ShardedEngine(const ShardedEngine&) = delete;
  ShardedEngine& operator=(const ShardedEngine&) = delete;
  ShardedEngine(ShardedEngine&&) = delete;
  ShardedEngine& operator=(ShardedEngine&&) = delete;

  [[nodiscard]] const EngineInfo& info() const override { return info_; }

  void allocate_kv_blocks(std::int32_t num_blocks) override {
    commands_.new_body().add(num_blocks);
    commands_.send(CommandKind::kAllocateKv);
    with_replies([&] { local_->allocate_kv_blocks(num_blocks); });
    num_blocks_ = num_blocks;
  }

  void allocate_cross_kv_blocks(std::int32_t num_blocks) override {
    commands_.new_body().add(num_blocks);
    commands_.send(CommandKind::kAllocateCrossKv);
    with_replies([&] { local_->allocate_cross_kv_blocks(num_blocks); });
    num_cross_blocks_ = num_blocks;
  }

  void allocate_states(std::int32_t num_slots) override {
    if (!info_.has_states()) return Engine::allocate_states(num_slots);
    commands_.new_body().add(num_slots);
    commands_.send(CommandKind::kAllocateStates);
    with_replies([&] {
      if (local_->info().has_states()) local_->allocate_states(num_slots);
    });
    num_state_slots_ = num_slots;
  }

  using Engine::step;
  void step(const StepInput& input, const LogitsSink& sink, const HiddenSink& hidden_sink) override {
    // Otherwise only the last stage would find invalid result rows, in the middle of the step.
    if (info_.num_stages > 1) {
      checker_.check(input, info_, num_blocks_, num_state_slots_);
      check_encoder_inputs(input, info_, num_cross_blocks_);
    }
    times_.begin_step(input);
    for (const AdapterLoad& load : pending_->take()) commands_.send_load(load);
    StepInput told = input;
    told.encoder.outputs = {};  // they are complete on each rank
    add_step(told, &commands_.new_body());
    commands_.send(CommandKind::kStep);
    times_.take(RankWork::kCommands);
    // Every rank refuses an invalid step before any exchange. A step whose results a sink refuses continues,
    // because the other ranks continue.
    std::exception_ptr refusal;
    if (info_.num_stages == 1) {
      local_->step(input, guarded(sink, &refusal), guarded(hidden_sink, &refusal));
    } else {
      const StepInput step = local_->info().has_states() ? input : without_states(input);
      for (const Microbatch& microbatch : split_into_microbatches(step, info_)) {
        local_->step(without_results(microbatch.input()), {}, {});
      }
      const std::int32_t last = first_rank_of_last_stage(commands_.communicator(), info_.num_stages);
      const auto slice = static_cast<std::size_t>(info_.max_batch_size);
      const RowSink logits = guarded(sink, &refusal);
      const RowSink hidden = guarded(hidden_sink, &refusal);
      times_.leave_out();
      commands_.receive_rows(last, input.logit_rows.size(), info_.vocab_size, slice, true,
                             times_.timed(logits));
      commands_.receive_rows(last, input.hidden_rows.size(), info_.hidden_size, slice, true,
                             times_.timed(hidden));
    }
    times_.end_step();
    if (refusal) std::rethrow_exception(refusal);
  }

  void end_steps() override {
    local_->end_steps();
    commands_.dismiss();
  }

  [[nodiscard]] std::unique_ptr<AdapterPages> make_adapter_pages(std::size_t page_bytes,
                                                                 std::int64_t num_pages,
                                                                 std::int32_t num_copy_streams) override {
    MessageWriter& body = commands_.new_body();
    body.add(static_cast<std::uint64_t>(page_bytes));
    body.add(num_pages);
    commands_.send(CommandKind::kMakePages);
    std::unique_ptr<AdapterPages> local;
    with_replies([&] { local = local_->make_adapter_pages(page_bytes, num_pages, num_copy_streams); });
    return std::make_unique<ShardedPages>(std::move(local), pending_);
  }

 private:
  /// Replaces the facts of the first stage by those of the whole pipeline.
  void describe(const PipelineFacts& facts) {
    info_.hidden_size = facts.hidden_size;
    info_.has_logits = facts.has_logits;
    info_.max_reusable_prompt_len = facts.max_reusable_prompt_len;
    info_.num_layers = facts.num_layers;
    info_.kv_block_bytes = std::max(info_.kv_block_bytes, facts.kv_block_bytes);
    info_.cross_kv_block_bytes = std::max(info_.cross_kv_block_bytes, facts.cross_kv_block_bytes);
    info_.state_bytes = std::max(info_.state_bytes, facts.state_bytes);
    info_.attention_windows.clear();  // the other stages' windows are unknown
  }

  /// Runs this rank's part of a command and always receives the other ranks' replies, so that none is left
  /// for the next command. Throws the error of this rank's part, or as await_replies() does.
  template <class Action>
  void with_replies(const Action& action) {
    std::exception_ptr failure;
    try {
      action();
    } catch (...) {
      failure = std::current_exception();
    }
    try {
      await_replies();
    } catch (const ConfigError&) {
      if (!failure) throw;
    }
    if (failure) std::rethrow_exception(failure);
  }

  /// Throws ConfigError with the errors of all ranks that failed.
  void await_replies() {
    std::string failures;
    for (std::int32_t rank = 1; rank < commands_.communicator().size(); ++rank) {
      const std::optional<Failure> failure = commands_.receive_reply(rank);
      if (!failure) continue;
      failures += (failures.empty() ? "rank " : "; rank ") + std::to_string(rank) + ": " + failure->message;
    }
    if (!failures.empty()) throw ConfigError(failures);
  }

  std::shared_ptr<Engine> local_;
  RankCommands commands_;
  EngineInfo info_;
  RankTimes times_;
  std::shared_ptr<PendingLoads> pending_ = std::make_shared<PendingLoads>();
  // For several stages:
  StepInputChecker checker_;
  std::int32_t num_blocks_ = 0;
  std::int32_t num_cross_blocks_ = 0;
  std::int32_t num_state_slots_ = 0;
};

}  // namespace

std::unique_ptr<Engine> make_sharded_engine(std::shared_ptr<Engine> local,
                                            std::shared_ptr<Communicator> communicator,
                                            const std::optional<PipelineFacts>& pipeline,
                                            std::shared_ptr<StepProfile> profile) {
  return std::make_unique<ShardedEngine>(std::move(local), std::move(communicator), pipeline,
                                         std::move(profile));
}

}  // namespace adaptrt
