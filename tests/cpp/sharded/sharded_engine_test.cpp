// Ranks as threads: what they exchange, and that rank 0's engine is one engine.

#include "adaptrt/sharded/sharded_engine.h"

#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "adaptrt/core/error.h"
#include "engine/random_model.h"
#include "sharded/thread_ranks.h"

namespace adaptrt::testing {
namespace {

namespace data = boost::unit_test::data;

/// The program of a rank whose embedding is a term of a sum of all ranks', each of which has it whole: what
/// one rank computes whose embedding is as many times as large. lm_head's outputs are those of one rank,
/// gathered.
Program of_rank(const Program& whole, std::int32_t rank, std::int32_t num_ranks) {
  Program program = whole;
  program.rank = rank;
  program.num_ranks = num_ranks;
  const auto add_buffer = [&](BufferId like, std::int64_t width) {
    Buffer buffer = program.buffers[static_cast<std::size_t>(like)];
    buffer.name += " of rank";
    buffer.width = width;
    buffer.offset = program.arena_bytes;
    const std::int64_t rows =
        buffer.rows == RowKind::kLogits ? program.max_batch_size : program.max_num_tokens;
    const std::size_t bytes = static_cast<std::size_t>(rows * width) * size_of(buffer.dtype);
    program.arena_bytes += (bytes + 63) / 64 * 64;
    program.buffers.push_back(buffer);
    return static_cast<BufferId>(program.buffers.size() - 1);
  };
  auto& embedding = std::get<EmbeddingOp>(program.body.front());
  const BufferId hidden = embedding.output;
  embedding.output = add_buffer(hidden, program.buffers[static_cast<std::size_t>(hidden)].width);
  program.body.insert(program.body.begin() + 1, AllReduceOp{.input = embedding.output, .output = hidden});
  return program;
}

Program scaled(const Program& whole, float factor) {
  Program program = whole;
  std::get<EmbeddingOp>(program.body.front()).scale = factor;
  return program;
}

/// Engines of all ranks, those but rank 0's in threads of their own.
class Ranks {
 public:
  Ranks(const Program& whole, std::int32_t num_ranks) : room_(std::make_shared<MailRoom>(num_ranks)) {
    for (std::int32_t rank = num_ranks - 1; rank >= 0; --rank) {
      auto communicator = std::make_shared<ThreadCommunicator>(room_, rank);
      std::shared_ptr<Engine> local = make_cpu_engine(
          of_rank(whole, rank, num_ranks), std::make_shared<ThreadPool>(1), "", nullptr, communicator);
      if (rank == 0) {
        engine = make_sharded_engine(std::move(local), std::move(communicator));
      } else {
        others_.emplace_back([local, communicator] { serve_rank(*local, *communicator); });
      }
    }
  }
  ~Ranks() { engine.reset(); }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;
  Ranks(Ranks&&) = delete;
  Ranks& operator=(Ranks&&) = delete;

 private:
  std::shared_ptr<MailRoom> room_;
  std::vector<std::jthread> others_;

 public:
  std::unique_ptr<Engine> engine;
};

StepArrays arrays(std::int64_t tokens) {
  Piece piece{.prompt_length = static_cast<std::int32_t>(tokens)};
  Random random(9);
  for (std::int64_t i = 0; i < tokens; ++i)
    piece.tokens.push_back(static_cast<std::int32_t>(random.below(61)));
  for (std::int32_t block = 0; block < 16; ++block) piece.blocks.push_back(block);
  return StepArrays({piece});
}

BOOST_AUTO_TEST_SUITE(sharded_engine)

// Rows of 48 floats: of five ranks, up to 170 tokens go to every rank whole, more in shares, of which the
// last is smaller.
BOOST_DATA_TEST_CASE(a_sum_over_ranks_is_in_their_order, data::make({2, 3, 5}) * data::make({1, 7, 170, 250}),
                     num_ranks, tokens) {
  const RandomModel model({.max_rank = 4});
  Ranks ranks(model.program, num_ranks);
  ranks.engine->allocate_kv_blocks(16);
  const StepArrays step = arrays(tokens);
  const auto alone =
      make_cpu_engine(scaled(model.program, static_cast<float>(num_ranks)), std::make_shared<ThreadPool>(1));
  alone->allocate_kv_blocks(16);
  const auto expected = logits_of(alone.get(), step.input());
  const auto found = logits_of(ranks.engine.get(), step.input());
  BOOST_TEST_REQUIRE(found.size() == expected.size());
  // (x + x) + x is rounded as 3 x is, since 2 x is exact; sums of five are rounded more than once.
  const float tolerance = num_ranks <= 3 ? 0.0F : 1e-4F;
  for (std::size_t i = 0; i < found.size(); ++i) {
    BOOST_TEST_REQUIRE(std::abs(found[i] - expected[i]) <= tolerance);
  }
  BOOST_TEST((logits_of(ranks.engine.get(), step.input()) == found));
}

BOOST_AUTO_TEST_CASE(a_refused_step_leaves_the_ranks_in_step) {
  const RandomModel model({});
  Ranks ranks(model.program, 2);
  ranks.engine->allocate_kv_blocks(16);
  const StepArrays good = arrays(5);
  const auto before = logits_of(ranks.engine.get(), good.input());
  StepArrays bad = arrays(5);
  bad.tokens[2] = 61;
  BOOST_CHECK_THROW(logits_of(ranks.engine.get(), bad.input()), StepError);
  BOOST_TEST((logits_of(ranks.engine.get(), good.input()) == before));
}

BOOST_AUTO_TEST_CASE(what_a_sink_throws_comes_when_the_step_has_ended) {
  const RandomModel model({});
  Ranks ranks(model.program, 2);
  ranks.engine->allocate_kv_blocks(16);
  const StepArrays step = arrays(30);  // of which four slices have logits
  int calls = 0;
  const auto refuse = [&](std::int64_t, std::int64_t, const float*) {
    ++calls;
    throw StepError("refused");
  };
  BOOST_CHECK_THROW(ranks.engine->step(step.input(), refuse), StepError);
  BOOST_TEST(calls == 1);
  BOOST_TEST(logits_of(ranks.engine.get(), step.input()).size() == 30U * 61U);
}

BOOST_AUTO_TEST_CASE(a_communicator_of_other_ranks_is_refused) {
  const RandomModel model({});
  const auto room = std::make_shared<MailRoom>(3);
  const auto communicator = std::make_shared<ThreadCommunicator>(room, 1);
  BOOST_CHECK_THROW(make_cpu_engine(of_rank(model.program, 0, 2), std::make_shared<ThreadPool>(1), "",
                                    nullptr, communicator),
                    EngineError);
  BOOST_CHECK_THROW(make_cpu_engine(of_rank(model.program, 0, 2), std::make_shared<ThreadPool>(1)),
                    EngineError);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing
