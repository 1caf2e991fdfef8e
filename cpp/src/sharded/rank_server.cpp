#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "adapter_message.h"
#include "adaptrt/core/error.h"
#include "adaptrt/lora/pack_adapter.h"
#include "adaptrt/sharded/sharded_engine.h"
#include "adaptrt/sharded/step_pieces.h"
#include "message.h"
#include "stages.h"
#include "step_message.h"

namespace adaptrt {
namespace {

/// The adapters in a rank's pages.
class RankAdapters {
 public:
  RankAdapters(const LoraLayout& layout, std::unique_ptr<AdapterPages> pages)
      : layout_(layout), index_(layout), pages_(std::move(pages)) {}

  /// Packs this rank's share. What its pages held before is gone.
  void load(ReceivedLoad received, HugeArray weights) {
    const auto adapter =
        HostAdapter::received(received.task_id, received.dtype, std::move(received.rows), std::move(weights));
    const DevicePlan plan = plan_device_images(*adapter, layout_, index_, pages_->page_bytes());
    if (plan.pages != std::ssize(received.pages)) {
      throw EngineError("an adapter takes " + std::to_string(plan.pages) + " pages here and " +
                        std::to_string(received.pages.size()) + " on rank 0");
    }
    std::vector<std::byte*> addresses;
    for (const std::int64_t page : received.pages) {
      if (const auto before = load_of_page_.find(page); before != load_of_page_.end()) {
        adapters_.erase(before->second);
      }
      load_of_page_[page] = received.load_id;
      addresses.push_back(pages_->address(page));
    }
    pages_->load(received.pages, [&](std::span<std::byte* const> host_pages) {
      adapters_[received.load_id] = pack_adapter(*adapter, layout_, plan, host_pages, addresses);
    });
  }

  [[nodiscard]] const DeviceAdapter* find(std::uint64_t load_id) const {
    const auto found = adapters_.find(load_id);
    if (found == adapters_.end()) throw EngineError("rank 0 names an adapter that it has not sent");
    return &found->second;
  }

 private:
  const LoraLayout& layout_;
  SiteIndex index_;
  std::unique_ptr<AdapterPages> pages_;
  std::map<std::uint64_t, DeviceAdapter> adapters_;  // by rank 0's load id
  std::map<std::int64_t, std::uint64_t> load_of_page_;
};

class RankServer {
 public:
  RankServer(Engine& local, Communicator& communicator)
      : local_(local),
        communicator_(communicator),
        num_stages_(local.info().num_stages),
        has_results_(num_stages_ > 1 &&
                     communicator.rank() == first_rank_of_last_stage(communicator, num_stages_)) {}

  void run() {
    for (;;) {
      CommandHeader header;
      communicator_.wait_for({0, std::as_writable_bytes(std::span(&header, 1))});
      body_.resize(header.body_bytes);
      if (!body_.empty()) receive(body_);
      MessageReader message(body_);
      switch (header.kind) {
        case CommandKind::kAllocateKv:
          reply([&] { local_.allocate_kv_blocks(message.number<std::int32_t>()); });
          break;
        case CommandKind::kMakePages:
          reply([&] { make_pages(&message); });
          break;
        case CommandKind::kLoadAdapter:
          load_adapter(&message);
          break;
        case CommandKind::kStep:
          step(&message);
          break;
        case CommandKind::kEnd:
          local_.end_steps();
          return;
      }
    }
  }

 private:
  void receive(std::span<std::byte> bytes) {
    const IncomingMessage message{0, bytes};
    communicator_.exchange({}, {&message, 1});
  }

  void make_pages(MessageReader* message) {
    const auto page_bytes = message->number<std::uint64_t>();
    const auto num_pages = message->number<std::int64_t>();
    adapters_.emplace(local_.info().lora, local_.make_adapter_pages(page_bytes, num_pages, 1));
  }

  void load_adapter(MessageReader* message) {
    ReceivedLoad load = read_load(message);
    HugeArray weights(load.weight_bytes);
    if (load.weight_bytes > 0) receive({weights.data(), weights.bytes()});
    adapters_.value().load(std::move(load), std::move(weights));
  }

  void step(MessageReader* message) {
    step_.read(message, [&](std::uint64_t load_id) { return adapters_.value().find(load_id); });
    if (num_stages_ > 1) {
      step_in_pieces(step_.input());
      return;
    }
    const auto nowhere = [](std::int64_t, std::int64_t, const float*) {};
    try {
      local_.step(step_.input(), nowhere, nowhere);
    } catch (const StepError&) {
      // Rank 0 has refused the step for the same reason, and tells those who asked for it.
    }
  }

  /// Rank 0 takes results when it has done all of its pieces, so those of all but the last wait for that.
  void step_in_pieces(const StepInput& input) {
    const std::vector<StepPiece> pieces = pieces_of(input, local_.info());
    logits_.clear();
    hidden_.clear();
    const auto sink_to = [&](std::vector<float>* kept, std::int64_t width) {
      return [this, &pieces, kept, width](std::int64_t, std::int64_t rows, const float* values) {
        if (!has_results_) return;
        const std::span<const float> made(values, static_cast<std::size_t>(rows * width));
        if (pieces.size() == 1) {
          send(std::as_bytes(made));
        } else {
          kept->insert(kept->end(), made.begin(), made.end());
        }
      };
    };
    const auto logits_sink = sink_to(&logits_, local_.info().vocab_size);
    const auto hidden_sink = sink_to(&hidden_, local_.info().hidden_size);
    const bool is_last = is_last_stage(communicator_, num_stages_);
    for (const StepPiece& piece : pieces) {
      local_.step(is_last ? piece.input() : without_results(piece.input()), logits_sink, hidden_sink);
    }
    if (!logits_.empty()) send(std::as_bytes(std::span(logits_)));
    if (!hidden_.empty()) send(std::as_bytes(std::span(hidden_)));
  }

  /// To rank 0.
  void send(std::span<const std::byte> bytes) {
    const OutgoingMessage message{0, bytes};
    communicator_.exchange({&message, 1}, {});
  }

  /// Does what rank 0 waits for, and tells it how that went.
  template <class Action>
  void reply(const Action& action) {
    std::string failure;
    try {
      action();
    } catch (const ConfigError& error) {
      failure = error.what();
    }
    const CommandReply reply{.failed = failure.empty() ? 0U : 1U,
                             .message_bytes = static_cast<std::uint32_t>(failure.size())};
    std::vector<OutgoingMessage> sent{{0, std::as_bytes(std::span(&reply, 1))}};
    if (!failure.empty()) sent.push_back({0, std::as_bytes(std::span(failure))});
    communicator_.exchange(sent, {});
  }

  Engine& local_;
  Communicator& communicator_;
  std::int32_t num_stages_;
  /// Whether it tells rank 0 what steps result in.
  bool has_results_;
  std::vector<float> logits_;  // of a step in several pieces
  std::vector<float> hidden_;
  std::optional<RankAdapters> adapters_;
  ReceivedStep step_;
  std::vector<std::byte> body_;
};

}  // namespace

void serve_rank(Engine& local, Communicator& communicator) {
  RankServer(local, communicator).run();
}

}  // namespace adaptrt
