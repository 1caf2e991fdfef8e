#include "adaptrt/sharded/remote_engine.h"

#include <cstdint>
#include <exception>
#include <span>
#include <utility>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/core/huge_array.h"
#include "adaptrt/engine/check_step_input.h"
#include "adaptrt/engine/engine_fields.h"
#include "adaptrt/lora/host_pages.h"
#include "rank_commands.h"
#include "step_message.h"
#include "struct_message.h"

namespace adaptrt {
namespace {

constexpr std::int32_t kLeader = 1;

[[noreturn]] void throw_failure(const Failure& failure) {
  switch (failure.outcome) {
    case Outcome::kConfigError:
      throw ConfigError(failure.message);
    case Outcome::kStepError:
      throw StepError(failure.message);
    case Outcome::kEngineError:
    case Outcome::kDone:
      break;
  }
  throw EngineError(failure.message);
}

/// Pages of the leader. Here they have addresses but no memory. The cache packs an adapter here only for its
/// accounting; the leader gets the adapter before the next step.
class RemotePages final : public AdapterPages {
 public:
  RemotePages(std::size_t page_bytes, std::int64_t num_pages, std::shared_ptr<PendingLoads> pending)
      : untouched_(page_bytes, num_pages), pending_(std::move(pending)) {}

  [[nodiscard]] std::size_t page_bytes() const override { return untouched_.page_bytes(); }
  [[nodiscard]] std::int64_t num_pages() const override { return untouched_.num_pages(); }
  [[nodiscard]] std::byte* address(std::int64_t page) const override { return untouched_.address(page); }

  void load(std::span<const std::int64_t> pages, const Write& write) override {
    const HugeArray scratch(page_bytes());
    for (std::size_t i = 0; i < pages.size(); ++i) write(i, scratch.data());
  }

  [[nodiscard]] bool shares_adapters() const override { return true; }
  void share(const std::shared_ptr<const HostAdapter>& adapter, std::span<const std::int64_t> pages,
             std::uint64_t load_id) override {
    pending_->add({adapter, {pages.begin(), pages.end()}, load_id});
  }

 private:
  HostPages untouched_;
  std::shared_ptr<PendingLoads> pending_;
};

class RemoteEngine final : public Engine {
 public:
  explicit RemoteEngine(std::shared_ptr<Communicator> communicator) : commands_(std::move(communicator)) {
    std::uint64_t size = 0;
    commands_.receive(kLeader, std::as_writable_bytes(std::span(&size, 1)));
    std::vector<std::byte> told(size);
    commands_.receive(kLeader, told);
    MessageReader message(told);
    info_ = read_struct<EngineInfo>(&message);
  }
  ~RemoteEngine() override { commands_.dismiss(); }
  RemoteEngine(const RemoteEngine&) = delete;
  RemoteEngine& operator=(const RemoteEngine&) = delete;
  RemoteEngine(RemoteEngine&&) = delete;
  RemoteEngine& operator=(RemoteEngine&&) = delete;

  [[nodiscard]] const EngineInfo& info() const override { return info_; }

  void allocate_kv_blocks(std::int32_t num_blocks) override {
    allocate(CommandKind::kAllocateKv, num_blocks);
    num_blocks_ = num_blocks;
  }

  void allocate_cross_kv_blocks(std::int32_t num_blocks) override {
    allocate(CommandKind::kAllocateCrossKv, num_blocks);
    num_cross_blocks_ = num_blocks;
  }

  void allocate_states(std::int32_t num_slots) override {
    allocate(CommandKind::kAllocateStates, num_slots);
    num_state_slots_ = num_slots;
  }

  using Engine::step;
  void step(const StepInput& input, const LogitsSink& sink, const HiddenSink& hidden_sink) override {
    checker_.check(input, info_, num_blocks_, num_state_slots_);
    check_encoder_inputs(input, info_, num_cross_blocks_);
    for (const AdapterLoad& load : pending_->take()) commands_.send_load(load);
    add_step(input, &commands_.new_body());
    commands_.send(CommandKind::kStep);
    // The leader replies first that it begins, so that a hanging leader is detected before a long step.
    if (const auto failure = commands_.receive_reply(kLeader)) throw_failure(*failure);
    if (const auto failure = commands_.wait_for_reply(kLeader)) throw_failure(*failure);
    receive_results(input, sink, hidden_sink);
  }

  void end_steps() override { commands_.dismiss(); }

  [[nodiscard]] std::unique_ptr<AdapterPages> make_adapter_pages(std::size_t page_bytes,
                                                                 std::int64_t num_pages,
                                                                 std::int32_t /*num_copy_streams*/) override {
    MessageWriter& body = commands_.new_body();
    body.add(static_cast<std::uint64_t>(page_bytes));
    body.add(num_pages);
    commands_.send(CommandKind::kMakePages);
    if (const auto failure = commands_.receive_reply(kLeader)) throw_failure(*failure);
    return std::make_unique<RemotePages>(page_bytes, num_pages, pending_);
  }

 private:
  void allocate(CommandKind what, std::int32_t count) {
    commands_.new_body().add(count);
    commands_.send(what);
    if (const auto failure = commands_.receive_reply(kLeader)) throw_failure(*failure);
  }

  /// Receives results. A sink may refuse rows, but the following rows are already being sent.
  void receive_results(const StepInput& input, const LogitsSink& sink, const HiddenSink& hidden_sink) {
    std::exception_ptr refusal;
    const auto slice = static_cast<std::size_t>(info_.max_batch_size);
    commands_.receive_rows(kLeader, input.logit_rows.size(), info_.logits_width(), slice, false,
                           guarded(sink, &refusal));
    commands_.receive_rows(kLeader, input.hidden_rows.size(), info_.hidden_size, slice, false,
                           guarded(hidden_sink, &refusal));
    receive_encoder_outputs(input.encoder);
    if (refusal) std::rethrow_exception(refusal);
  }

  void receive_encoder_outputs(const EncoderInputs& inputs) {
    for (std::size_t i = 0; i < inputs.outputs.size(); ++i) {
      if (inputs.outputs[i] == nullptr) continue;
      const std::int64_t tokens = inputs.offsets[i + 1] - inputs.offsets[i];
      const auto floats = static_cast<std::size_t>(tokens * info_.encoder_hidden_size);
      commands_.receive(kLeader, std::as_writable_bytes(std::span(inputs.outputs[i], floats)));
    }
  }

  RankCommands commands_;
  EngineInfo info_;
  std::shared_ptr<PendingLoads> pending_ = std::make_shared<PendingLoads>();
  StepInputChecker checker_;
  std::int32_t num_blocks_ = 0;
  std::int32_t num_cross_blocks_ = 0;
  std::int32_t num_state_slots_ = 0;
};

}  // namespace

std::unique_ptr<Engine> make_remote_engine(std::shared_ptr<Communicator> communicator) {
  return std::make_unique<RemoteEngine>(std::move(communicator));
}

}  // namespace adaptrt
