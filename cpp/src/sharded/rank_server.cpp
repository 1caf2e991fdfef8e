#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/engine/acked_send.h"
#include "adaptrt/sharded/sharded_engine.h"
#include "adaptrt/sharded/step_microbatches.h"
#include "command_server.h"
#include "stages.h"

namespace adaptrt {
namespace {

class RankServer final : public CommandServer {
 public:
  RankServer(Engine& rank, Communicator& all)
      : CommandServer(rank, all),
        num_stages_(rank.info().num_stages),
        has_results_(num_stages_ > 1 && all.rank() == first_rank_of_last_stage(all, num_stages_)) {}

 private:
  void step(const StepInput& input) override {
    if (num_stages_ > 1) {
      step_in_microbatches(input);
      return;
    }
    const auto nowhere = [](std::int64_t, std::int64_t, const float*) {};
    try {
      local().step(input, nowhere, nowhere);
    } catch (const StepError&) {
      // Rank 0 has refused the step for the same reason, and reports it.
    }
  }

  /// Rank 0 receives results only after all its micro-batches, so all results except those of the last
  /// micro-batch are kept until then.
  void step_in_microbatches(const StepInput& told) {
    StepInput step = is_first_stage(communicator(), num_stages_) ? told : without_types(told);
    if (!local().info().has_states()) step = without_states(step);
    const std::vector<Microbatch> microbatches = split_into_microbatches(step, local().info());
    logits_.clear();
    hidden_.clear();
    const auto sink_to = [&](std::vector<float>* kept, std::int64_t width) {
      return [this, &microbatches, kept, width](std::int64_t, std::int64_t rows, const float* values) {
        if (!has_results_) return;
        const std::span<const float> made(values, static_cast<std::size_t>(rows * width));
        if (microbatches.size() == 1) {
          acked_send({0, std::as_bytes(made)}, communicator());
        } else {
          kept->insert(kept->end(), made.begin(), made.end());
        }
      };
    };
    const auto logits_sink = sink_to(&logits_, local().info().vocab_size);
    const auto hidden_sink = sink_to(&hidden_, local().info().hidden_size);
    const bool is_last = is_last_stage(communicator(), num_stages_);
    for (const Microbatch& microbatch : microbatches) {
      local().step(is_last ? microbatch.input() : without_results(microbatch.input()), logits_sink,
                   hidden_sink);
    }
    send_rows(logits_, local().info().vocab_size);
    send_rows(hidden_, local().info().hidden_size);
  }

  /// Sends rows in the slices that RankCommands::receive_rows() expects.
  void send_rows(std::span<const float> rows, std::int64_t width) {
    const auto most = static_cast<std::size_t>(local().info().max_batch_size * width);
    for (; !rows.empty(); rows = rows.subspan(std::min(most, rows.size()))) {
      acked_send({0, std::as_bytes(rows.first(std::min(most, rows.size())))}, communicator());
    }
  }

  std::int32_t num_stages_;
  /// True if this rank sends the step's results to rank 0.
  bool has_results_;
  std::vector<float> logits_;  // for steps of several micro-batches
  std::vector<float> hidden_;
};

}  // namespace

void serve_rank(Engine& local, Communicator& communicator) {
  RankServer(local, communicator).run();
}

}  // namespace adaptrt
