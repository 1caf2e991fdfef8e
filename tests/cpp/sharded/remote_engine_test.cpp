// An engine that another thread serves: it gives the same results, and reports failures.

#include "adaptrt/sharded/remote_engine.h"

#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/cpu/cpu_engine.h"
#include "cpu/random_model.h"
#include "cpu/step_arrays.h"
#include "sharded/encoder_decoder.h"
#include "sharded/thread_ranks.h"

namespace adaptrt::testing::remote_engine_test {
namespace {

namespace data = boost::unit_test::data;

/// Runs serve_engine() in a thread and keeps its error.
class Served {
 public:
  explicit Served(Engine& engine) : room_(std::make_shared<MailRoom>(2)) {
    thread_ = std::jthread([this, &engine] {
      ThreadCommunicator leader(room_, 1);
      try {
        serve_engine(engine, leader);
      } catch (const std::exception& error) {
        failure_ = error.what();
      }
    });
    remote = make_remote_engine(std::make_shared<ThreadCommunicator>(room_, 0));
  }

  /// Ends the steps, if they have not ended, and returns the server's error.
  std::optional<std::string> failure() {
    remote->end_steps();
    thread_.join();
    return failure_;
  }

 private:
  std::shared_ptr<MailRoom> room_;
  std::optional<std::string> failure_;
  std::jthread thread_;

 public:
  std::unique_ptr<Engine> remote;
};

StepArrays arrays(std::int64_t tokens) {
  Piece piece{.prompt_length = static_cast<std::int32_t>(tokens)};
  Random random(9);
  for (std::int64_t i = 0; i < tokens; ++i) {
    piece.tokens.push_back(static_cast<std::int32_t>(random.below(61)));
  }
  for (std::int32_t block = 0; block < 16; ++block) piece.blocks.push_back(block);
  return StepArrays({piece});
}

/// Fails like an engine whose ranks are lost, or whose memory is refused.
class Failing final : public Engine {
 public:
  explicit Failing(Engine& sound) : sound_(sound) {}
  [[nodiscard]] const EngineInfo& info() const override { return sound_.info(); }
  void allocate_kv_blocks(std::int32_t num_blocks) override {
    if (num_blocks > 1000) throw ConfigError("rank 1: no memory for so many");
    sound_.allocate_kv_blocks(num_blocks);
  }
  using Engine::step;
  void step(const StepInput& input, const LogitsSink& sink, const HiddenSink& hidden_sink) override {
    ++num_steps;
    if (failures > 0) {
      --failures;
      if (is_refusal) throw StepError("refused there");
      throw EngineError("rank 1 of 2 has not answered");
    }
    sound_.step(input, sink, hidden_sink);
  }

  int num_steps = 0;
  int failures = 0;
  bool is_refusal = false;

 private:
  Engine& sound_;
};

BOOST_AUTO_TEST_SUITE(remote_engine)

BOOST_DATA_TEST_CASE(it_is_what_is_served, data::make({false, true}), has_encoder) {
  RandomModel decoder({.max_rank = 4});
  decoder.program.lora.rotary_factors = {2, 8};
  decoder.program.lora.max_base_positions = decoder.program.max_seq_len - 1;
  const EncoderDecoder both(2, DType::kFloat32, 4);
  const Program& program = has_encoder ? both.program : decoder.program;
  const auto engine = make_cpu_engine(program, std::make_shared<ThreadPool>(1));
  Served served(*engine);
  const EngineInfo& found = served.remote->info();
  const EngineInfo& expected = engine->info();
  BOOST_TEST(found.vocab_size == expected.vocab_size);
  BOOST_TEST(found.kernels == expected.kernels);
  BOOST_TEST(found.has_encoder() == has_encoder);
  BOOST_TEST(found.max_seq_len_of(1) == expected.max_seq_len_of(1));
  BOOST_TEST(found.max_seq_len_of(8) == expected.max_seq_len_of(8));
  BOOST_TEST_REQUIRE(!expected.lora.sites.empty());
  BOOST_TEST(found.lora.sites.size() == expected.lora.sites.size());
  BOOST_TEST(!served.failure().has_value());
}

/// A step with more rows of logits than one transfer takes.
BOOST_AUTO_TEST_CASE(it_makes_what_is_served) {
  const RandomModel model({});
  const auto alone = make_cpu_engine(model.program, std::make_shared<ThreadPool>(1));
  const auto engine = make_cpu_engine(model.program, std::make_shared<ThreadPool>(1));
  Served served(*engine);
  const StepArrays step = arrays(30);
  alone->allocate_kv_blocks(16);
  served.remote->allocate_kv_blocks(16);
  BOOST_TEST((logits_of(served.remote.get(), step.input()) == logits_of(alone.get(), step.input())));
  BOOST_TEST(!served.failure().has_value());
}

BOOST_AUTO_TEST_CASE(refusals_leave_it_usable) {
  RandomModel model({});
  const auto engine = make_cpu_engine(model.program, std::make_shared<ThreadPool>(1));
  Failing failing(*engine);
  Served served(failing);
  BOOST_CHECK_EXCEPTION(served.remote->allocate_kv_blocks(2000), ConfigError, [](const ConfigError& error) {
    return std::string(error.what()) == "rank 1: no memory for so many";
  });
  served.remote->allocate_kv_blocks(16);
  const StepArrays good = arrays(30);
  const auto before = logits_of(served.remote.get(), good.input());
  StepArrays bad = arrays(5);
  bad.tokens[2] = 61;
  BOOST_CHECK_THROW(logits_of(served.remote.get(), bad.input()), StepError);
  failing.failures = 1;
  failing.is_refusal = true;
  BOOST_CHECK_EXCEPTION(logits_of(served.remote.get(), good.input()), StepError,
                        [](const StepError& error) { return std::string(error.what()) == "refused there"; });
  int calls = 0;
  BOOST_CHECK_THROW(served.remote->step(good.input(),
                                        [&](std::int64_t, std::int64_t, const float*) {
                                          ++calls;
                                          throw StepError("refused here");
                                        }),
                    StepError);
  BOOST_TEST(calls == 1);
  BOOST_TEST((logits_of(served.remote.get(), good.input()) == before));
  BOOST_TEST(!served.failure().has_value());
}

BOOST_AUTO_TEST_CASE(a_step_before_allocation_is_not_sent) {
  RandomModel model({});
  const auto engine = make_cpu_engine(model.program, std::make_shared<ThreadPool>(1));
  Failing failing(*engine);
  Served served(failing);
  const StepArrays first_block({Piece{.tokens = {5}, .blocks = {0}}});
  BOOST_CHECK_THROW(logits_of(served.remote.get(), first_block.input()), StepError);
  BOOST_TEST(failing.num_steps == 0);
  served.remote->allocate_kv_blocks(1);
  logits_of(served.remote.get(), first_block.input());
  BOOST_TEST(failing.num_steps == 1);
  BOOST_TEST(!served.failure().has_value());
}

BOOST_AUTO_TEST_CASE(a_lost_rank_is_told_and_ends_the_server) {
  RandomModel model({});
  const auto engine = make_cpu_engine(model.program, std::make_shared<ThreadPool>(1));
  Failing failing(*engine);
  Served served(failing);
  served.remote->allocate_kv_blocks(16);
  failing.failures = 1;
  const StepArrays step = arrays(3);
  BOOST_CHECK_EXCEPTION(
      logits_of(served.remote.get(), step.input()), EngineError,
      [](const EngineError& error) { return std::string(error.what()) == "rank 1 of 2 has not answered"; });
  BOOST_TEST(served.failure().value() == "rank 1 of 2 has not answered");
}

BOOST_AUTO_TEST_CASE(kv_blocks_cannot_be_read) {
  RandomModel model({});
  const auto engine = make_cpu_engine(model.program, std::make_shared<ThreadPool>(1));
  Served served(*engine);
  BOOST_TEST(served.remote->info().kv_identity.empty());
  BOOST_CHECK_THROW(served.remote->read_kv_block(0, {}), EngineError);
  BOOST_TEST(!served.failure().has_value());
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::remote_engine_test
