// Rank 0 hangs in the middle of a step, after everything that it sends: the other ranks notice.

#include <atomic>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "adaptrt/cpu/cpu_engine.h"
#include "adaptrt/sharded/sharded_engine.h"
#include "cpu/random_model.h"
#include "cpu/step_arrays.h"
#include "sharded/rank_programs.h"
#include "sharded/stage_programs.h"
#include "sharded/thread_ranks.h"

namespace adaptrt::testing::taken_test {
namespace {

/// Rank 0's end, which stops receiving at some point.
class Hanging final : public Communicator {
 public:
  explicit Hanging(const std::shared_ptr<MailRoom>& room) : ends_(room, 0) {}
  [[nodiscard]] std::int32_t rank() const override { return 0; }
  [[nodiscard]] std::int32_t size() const override { return ends_.size(); }
  [[nodiscard]] bool is_lost() const override { return false; }
  void exchange(std::span<const OutgoingMessage> sent, std::span<const IncomingMessage> received) override {
    if (hangs && !received.empty()) throw std::runtime_error("hangs");
    ends_.exchange(sent, received);
  }
  void wait_for(const IncomingMessage& message) override { ends_.wait_for(message); }

  std::atomic<bool> hangs = false;

 private:
  ThreadCommunicator ends_;
};

/// Another rank's end with a short exchange limit. It does not wait for a command after a step.
class Impatient final : public Communicator {
 public:
  explicit Impatient(const std::shared_ptr<MailRoom>& room)
      : commands_(room, 1), ends_(room, 1, std::chrono::milliseconds(500)) {}
  [[nodiscard]] std::int32_t rank() const override { return 1; }
  [[nodiscard]] std::int32_t size() const override { return ends_.size(); }
  [[nodiscard]] bool is_lost() const override { return ends_.is_lost(); }
  void exchange(std::span<const OutgoingMessage> sent, std::span<const IncomingMessage> received) override {
    ends_.exchange(sent, received);
  }
  void wait_for(const IncomingMessage& message) override {
    if (has_step) throw std::logic_error("waits for a command behind the step");
    commands_.wait_for(message);
  }

  std::atomic<bool> has_step = false;

 private:
  ThreadCommunicator commands_;
  ThreadCommunicator ends_;
};

/// Reports when it is told to run a step.
class Announcing final : public Engine {
 public:
  Announcing(std::unique_ptr<Engine> engine, std::atomic<bool>& has_step)
      : engine_(std::move(engine)), has_step_(has_step) {}
  [[nodiscard]] const EngineInfo& info() const override { return engine_->info(); }
  void allocate_kv_blocks(std::int32_t num_blocks) override { engine_->allocate_kv_blocks(num_blocks); }
  using Engine::step;
  void step(const StepInput& input, const LogitsSink& sink, const HiddenSink& hidden_sink) override {
    has_step_ = true;
    engine_->step(input, sink, hidden_sink);
  }

 private:
  std::unique_ptr<Engine> engine_;
  std::atomic<bool>& has_step_;
};

/// Returns rank 1's error while rank 0 hangs before the last receive of a step.
std::string what_is_noticed(const Program& first, const Program& second,
                            const std::optional<PipelineFacts>& pipeline) {
  const auto room = std::make_shared<MailRoom>(2);
  std::string noticed;
  std::jthread other([&] {
    const auto ends = std::make_shared<Impatient>(room);
    Announcing engine(make_cpu_engine(second, std::make_shared<ThreadPool>(1), "", nullptr, ends),
                      ends->has_step);
    try {
      serve_rank(engine, *ends);
    } catch (const std::exception& error) {
      noticed = error.what();
    }
  });
  const auto ends = std::make_shared<Hanging>(room);
  const auto engine = make_sharded_engine(
      make_cpu_engine(first, std::make_shared<ThreadPool>(1), "", nullptr, ends), ends, pipeline);
  engine->allocate_kv_blocks(16);
  ends->hangs = true;
  const Piece piece{.tokens = {5, 6, 7}, .prompt_length = 3, .blocks = {0}};
  const StepArrays step({piece});
  BOOST_CHECK_THROW(logits_of(engine.get(), step.input()), std::runtime_error);
  other.join();
  return noticed;
}

constexpr std::int64_t kColumns = 61;

/// A rank that computes half of the logits, with the head of a model of that size.
Program with_gathered_logits(const Program& whole, const Program& half, std::int32_t rank) {
  Program program = of_ranks(whole, rank, 2);
  const BufferId columns = add_term(program.logits, &program);
  program.buffers[static_cast<std::size_t>(columns)].width = kColumns;
  program.head = half.head;
  auto& layer = std::get<LinearOp>(program.head.back());
  layer.output = columns;
  program.head.emplace_back(GatherOp{.input = columns, .output = program.logits});
  return program;
}

BOOST_AUTO_TEST_SUITE(taken)

BOOST_AUTO_TEST_CASE(a_rank_whose_columns_nobody_takes_notices_it) {
  const RandomModel whole({.vocab_size = 2 * kColumns});
  const RandomModel half({.vocab_size = kColumns});
  BOOST_TEST(what_is_noticed(with_gathered_logits(whole.program, half.program, 0),
                             with_gathered_logits(whole.program, half.program, 1),
                             {}) == "rank 0 has not answered");
}

BOOST_AUTO_TEST_CASE(a_last_stage_whose_results_nobody_takes_notices_it) {
  const RandomModel model({.num_layers = 2});
  const std::int64_t hidden_size =
      model.program.buffers[static_cast<std::size_t>(model.program.hidden)].width;
  BOOST_TEST(what_is_noticed(of_stage(model.program, 0), of_stage(model.program, 1),
                             PipelineFacts{.hidden_size = hidden_size, .max_reusable_prompt_len = 7}) ==
             "rank 0 has not answered");
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::taken_test
