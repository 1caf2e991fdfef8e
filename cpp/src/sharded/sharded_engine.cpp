#include "adaptrt/sharded/sharded_engine.h"

#include <algorithm>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "adapter_message.h"
#include "adaptrt/core/error.h"
#include "adaptrt/engine/check_step_input.h"
#include "adaptrt/sharded/step_pieces.h"
#include "message.h"
#include "stages.h"
#include "step_message.h"

namespace adaptrt {
namespace {

std::span<const std::byte> bytes_of(const CommandHeader& header) {
  return std::as_bytes(std::span(&header, 1));
}

/// Adapters that were loaded here and not yet on the other ranks. Load workers add to it while a step runs.
class PendingLoads {
 public:
  void add(AdapterLoad load) {
    const std::lock_guard lock(mutex_);
    loads_.push_back(std::move(load));
  }
  [[nodiscard]] std::vector<AdapterLoad> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(loads_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<AdapterLoad> loads_;
};

/// Rank 0's pages. What is packed into them reaches the other ranks before the next step.
class ShardedPages final : public AdapterPages {
 public:
  ShardedPages(std::unique_ptr<AdapterPages> local, std::shared_ptr<PendingLoads> pending)
      : local_(std::move(local)), pending_(std::move(pending)) {}

  [[nodiscard]] std::size_t page_bytes() const override { return local_->page_bytes(); }
  [[nodiscard]] std::int64_t num_pages() const override { return local_->num_pages(); }
  [[nodiscard]] std::byte* address(std::int64_t page) const override { return local_->address(page); }
  void load(std::span<const std::int64_t> pages, const Write& write) override { local_->load(pages, write); }
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
                const std::optional<PipelineFacts>& pipeline)
      : local_(std::move(local)), communicator_(std::move(communicator)), info_(local_->info()) {
    info_.kv_identity.clear();
    if ((info_.num_stages > 1) != pipeline.has_value()) {
      throw EngineError("PipelineFacts are those of an engine of several stages, which needs them");
    }
    if (pipeline) describe(*pipeline);
  }
  ~ShardedEngine() override { dismiss_others(); }
  ShardedEngine(const ShardedEngine&) = delete;
  ShardedEngine& operator=(const ShardedEngine&) = delete;
  ShardedEngine(ShardedEngine&&) = delete;
  ShardedEngine& operator=(ShardedEngine&&) = delete;

  [[nodiscard]] const EngineInfo& info() const override { return info_; }

  void allocate_kv_blocks(std::int32_t num_blocks) override {
    message_.clear();
    message_.add(num_blocks);
    send_command(CommandKind::kAllocateKv);
    local_->allocate_kv_blocks(num_blocks);
    num_blocks_ = num_blocks;
    await_replies();
  }

  using Engine::step;
  void step(const StepInput& input, const LogitsSink& sink, const HiddenSink& hidden_sink) override {
    // Only the last stage would find rows of results that break the rules, in the middle of the step.
    if (info_.num_stages > 1) checker_.check(input, info_, num_blocks_);
    for (const AdapterLoad& load : pending_->take()) send_load(load);
    message_.clear();
    add_step(input, &message_);
    send_command(CommandKind::kStep);
    // A step that breaks the rules is refused by every rank before they exchange anything. One whose results
    // are refused by a sink goes on, since the others do.
    std::exception_ptr refusal;
    if (info_.num_stages == 1) {
      local_->step(input, guarded(sink, &refusal), guarded(hidden_sink, &refusal));
    } else {
      for (const StepPiece& piece : pieces_of(input, info_)) {
        local_->step(without_results(piece.input()), {}, {});
      }
      receive_rows(input.logit_rows.size(), info_.vocab_size, guarded(sink, &refusal));
      receive_rows(input.hidden_rows.size(), info_.hidden_size, guarded(hidden_sink, &refusal));
    }
    if (refusal) std::rethrow_exception(refusal);
  }

  void end_steps() override {
    local_->end_steps();
    dismiss_others();
  }

  [[nodiscard]] std::unique_ptr<AdapterPages> make_adapter_pages(std::size_t page_bytes,
                                                                 std::int64_t num_pages,
                                                                 std::int32_t num_copy_streams) override {
    message_.clear();
    message_.add(static_cast<std::uint64_t>(page_bytes));
    message_.add(num_pages);
    send_command(CommandKind::kMakePages);
    auto local = local_->make_adapter_pages(page_bytes, num_pages, num_copy_streams);
    await_replies();
    return std::make_unique<ShardedPages>(std::move(local), pending_);
  }

 private:
  using Sink = std::function<void(std::int64_t, std::int64_t, const float*)>;

  static Sink guarded(const Sink& sink, std::exception_ptr* refusal) {
    if (!sink) return {};
    return [&sink, refusal](std::int64_t first_row, std::int64_t rows, const float* values) {
      if (*refusal) return;
      try {
        sink(first_row, rows, values);
      } catch (...) {
        *refusal = std::current_exception();
      }
    };
  }

  /// Puts what the whole pipeline is in the place of what its first stage is.
  void describe(const PipelineFacts& facts) {
    info_.hidden_size = facts.hidden_size;
    info_.has_logits = facts.has_logits;
    info_.max_reusable_prompt_len = facts.max_reusable_prompt_len;
    info_.num_layers *= info_.num_stages;
    info_.attention_windows.clear();  // those of the other stages are not known
  }

  /// Rows of results from the last stage to a sink, as many at a time as an engine makes.
  void receive_rows(std::size_t count, std::int64_t width, const Sink& sink) {
    const auto slice = static_cast<std::size_t>(info_.max_batch_size);
    for (std::size_t first = 0; first < count; first += slice) {
      const std::size_t rows = std::min(slice, count - first);
      received_.resize(rows * static_cast<std::size_t>(width));
      receive(first_rank_of_last_stage(*communicator_, info_.num_stages),
              std::as_writable_bytes(std::span(received_)));
      sink(static_cast<std::int64_t>(first), static_cast<std::int64_t>(rows), received_.data());
    }
  }

  /// Tells the other ranks, once, that no command follows.
  void dismiss_others() noexcept {
    if (!std::exchange(has_others_, false)) return;
    try {
      message_.clear();
      send_command(CommandKind::kEnd);
    } catch (const std::exception&) {
      // One of them is lost, as the step that found it has said: there is nobody to tell.
    }
  }

  void send_to_others(std::span<const std::byte> bytes) {
    sent_.clear();
    for (std::int32_t rank = 1; rank < communicator_->size(); ++rank) sent_.push_back({rank, bytes});
    communicator_->exchange(sent_, {});
  }

  /// With message_ for its body.
  void send_command(CommandKind kind) {
    const CommandHeader header{.kind = kind, .body_bytes = message_.bytes().size()};
    send_to_others(bytes_of(header));
    if (header.body_bytes > 0) send_to_others(message_.bytes());
  }

  void send_load(const AdapterLoad& load) {
    message_.clear();
    add_load(load, &message_);
    send_command(CommandKind::kLoadAdapter);
    if (load.adapter->bytes() > 0) send_to_others({load.adapter->data(), load.adapter->bytes()});
  }

  /// Throws ConfigError with what ranks say that could not do what they were told.
  void await_replies() {
    std::string failures;
    for (std::int32_t rank = 1; rank < communicator_->size(); ++rank) {
      CommandReply reply;
      receive(rank, std::as_writable_bytes(std::span(&reply, 1)));
      if (reply.failed == 0) continue;
      std::string message(reply.message_bytes, '\0');
      receive(rank, std::as_writable_bytes(std::span(message)));
      failures += (failures.empty() ? "rank " : "; rank ") + std::to_string(rank) + ": " + message;
    }
    if (!failures.empty()) throw ConfigError(failures);
  }

  void receive(std::int32_t rank, std::span<std::byte> bytes) {
    const IncomingMessage message{rank, bytes};
    communicator_->exchange({}, {&message, 1});
  }

  std::shared_ptr<Engine> local_;
  std::shared_ptr<Communicator> communicator_;
  EngineInfo info_;
  std::shared_ptr<PendingLoads> pending_ = std::make_shared<PendingLoads>();
  MessageWriter message_;
  std::vector<OutgoingMessage> sent_;
  // Of several stages:
  StepInputChecker checker_;
  std::int32_t num_blocks_ = 0;
  std::vector<float> received_;
  /// They have not been dismissed.
  bool has_others_ = true;
};

}  // namespace

std::unique_ptr<Engine> make_sharded_engine(std::shared_ptr<Engine> local,
                                            std::shared_ptr<Communicator> communicator,
                                            const std::optional<PipelineFacts>& pipeline) {
  return std::make_unique<ShardedEngine>(std::move(local), std::move(communicator), pipeline);
}

}  // namespace adaptrt
