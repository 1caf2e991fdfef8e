// Ranks in threads: their exchanges, and that rank 0's engine acts as one engine.

#include "adaptrt/sharded/sharded_engine.h"

#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/cpu/cpu_engine.h"
#include "cpu/random_model.h"
#include "cpu/step_arrays.h"
#include "sharded/rank_programs.h"
#include "sharded/thread_ranks.h"

namespace adaptrt::testing::sharded_engine_test {
namespace {

namespace data = boost::unit_test::data;

/// Program of a rank whose embedding is one term of a sum over all ranks. Each rank has all of it, so the
/// result equals one engine with the embedding times the number of ranks.
Program of_rank(const Program& whole, std::int32_t rank, std::int32_t num_ranks) {
  Program program = of_ranks(whole, rank, num_ranks);
  auto& embedding = std::get<EmbeddingOp>(program.body.front());
  const BufferId hidden = embedding.output;
  embedding.output = add_term(hidden, &program);
  program.body.insert(program.body.begin() + 1, AllReduceOp{.input = embedding.output, .output = hidden});
  return program;
}

Program scaled(const Program& whole, float factor) {
  Program program = whole;
  std::get<EmbeddingOp>(program.body.front()).scale = factor;
  return program;
}

/// Engines of all ranks; those other than rank 0's run in threads.
class Ranks {
 public:
  Ranks(const Program& whole, std::int32_t num_ranks, MakeProgram make = of_rank,
        const std::shared_ptr<StepProfile>& profile = nullptr)
      : room_(std::make_shared<MailRoom>(num_ranks)) {
    for (std::int32_t rank = num_ranks - 1; rank >= 0; --rank) {
      auto communicator = std::make_shared<ThreadCommunicator>(room_, rank);
      std::shared_ptr<Engine> local =
          make_cpu_engine(make(whole, rank, num_ranks), std::make_shared<ThreadPool>(1), "",
                          rank == 0 ? profile : nullptr, communicator);
      if (rank == 0) {
        engine = make_sharded_engine(std::move(local), std::move(communicator), {}, profile);
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

// Rows have 48 floats. With five ranks, up to 170 tokens are sent whole to every rank; more are sent in
// shares, the last of which is smaller.
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

/// Compares the ranks' results, twice, with one engine of the whole program.
void check_ranks(const Program& whole, std::int32_t num_ranks, MakeProgram make, std::int64_t tokens) {
  Ranks ranks(whole, num_ranks, make);
  ranks.engine->allocate_kv_blocks(16);
  const auto alone = make_cpu_engine(whole, std::make_shared<ThreadPool>(1));
  alone->allocate_kv_blocks(16);
  const StepArrays step = arrays(tokens);
  const auto expected = logits_of(alone.get(), step.input());
  const auto found = logits_of(ranks.engine.get(), step.input());
  BOOST_TEST_REQUIRE(found.size() == expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    BOOST_TEST_REQUIRE(std::abs(found[i] - expected[i]) <= 1e-4F);
  }
  BOOST_TEST((logits_of(ranks.engine.get(), step.input()) == found));
}

// A token has two of six experts, so with six ranks most ranks have no work for it.
BOOST_DATA_TEST_CASE(ranks_have_different_experts, data::make({2, 3, 6}) * data::make({1, 7, 170}), num_ranks,
                     tokens) {
  const RandomModel model({.num_experts = 6, .routing = {.top_k = 2, .norm_topk_prob = true}});
  check_ranks(model.program, num_ranks, with_own_experts, tokens);
}

/// Every rank has all heads of q, so the whole is as many times as wide. For k, the first rank counts.
Program with_exchanged_squares(const Program& whole, std::int32_t rank, std::int32_t num_ranks) {
  Program program = of_ranks(whole, rank, num_ranks);
  for (std::size_t i = 0; i < program.body.size(); ++i) {
    auto* op = std::get_if<AttentionOp>(&program.body[i]);
    if (op == nullptr) continue;
    const AllHeadsNormOp norm{.qkv = op->qkv,
                              .query_norm = std::exchange(op->query_norm, {}),
                              .key_norm = std::exchange(op->key_norm, {}),
                              .whole_query_size = op->shape.query_size() * num_ranks,
                              .whole_key_size = op->shape.key_value_size(),
                              .counts_keys = rank == 0,
                              .epsilon = op->norm_epsilon};
    program.body.insert(program.body.begin() + static_cast<std::ptrdiff_t>(i++), norm);
  }
  return program;
}

BOOST_DATA_TEST_CASE(all_heads_are_normed_together, data::make({2, 3}) * data::make({1, 7, 170}), num_ranks,
                     tokens) {
  const RandomModel model({});
  Program whole = model.program;
  std::vector<float> weights;
  for (int i = 0; i < 1024; ++i) weights.push_back(0.5F + static_cast<float>(i % 17) / 16.0F);
  for (Op& op : whole.body) {
    auto* attention = std::get_if<AttentionOp>(&op);
    if (attention == nullptr) continue;
    attention->query_norm = {weights.data(), attention->shape.query_size()};
    attention->key_norm = {weights.data() + 5, attention->shape.key_value_size()};
  }
  check_ranks(whole, num_ranks, with_exchanged_squares, tokens);
  Program wrong = with_exchanged_squares(whole, 0, 2);
  BOOST_TEST(wrong.validate().empty());
  for (Op& op : wrong.body) {
    if (auto* norm = std::get_if<AllHeadsNormOp>(&op)) norm->whole_key_size = norm->key_norm.size - 1;
  }
  BOOST_TEST(!wrong.validate().empty());
}

BOOST_AUTO_TEST_CASE(a_step_is_recorded_with_what_goes_to_other_ranks) {
  const RandomModel model({});
  const auto profile = std::make_shared<StepProfile>(4);
  Ranks ranks(model.program, 2, of_rank, profile);
  ranks.engine->allocate_kv_blocks(16);
  const StepArrays step = arrays(30);
  logits_of(ranks.engine.get(), step.input());
  StepArrays bad = arrays(5);
  bad.tokens[2] = 61;
  BOOST_CHECK_THROW(logits_of(ranks.engine.get(), bad.input()), StepError);
  logits_of(ranks.engine.get(), arrays(7).input());
  const std::vector<StepRecord> steps = profile->take_steps();
  BOOST_TEST_REQUIRE(steps.size() == 2U);
  BOOST_TEST(steps[0].num_tokens == 30);
  BOOST_TEST(steps[1].num_tokens == 7);
  for (const StepRecord& record : steps) {
    BOOST_TEST((record.ops.front().section == StepSection::kRanks));
    BOOST_TEST(record.ops.front().index == static_cast<std::int32_t>(RankWork::kCommands));
    BOOST_TEST((record.ops.back().section == StepSection::kSink));
    double last = record.begin;
    for (const OpRecord& op : record.ops) {
      BOOST_TEST(op.begin >= last);
      last = op.end;
    }
    BOOST_TEST(record.end >= last);
  }
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

BOOST_AUTO_TEST_CASE(exceptions_of_a_sink_are_rethrown_when_the_step_has_ended) {
  const RandomModel model({});
  Ranks ranks(model.program, 2);
  ranks.engine->allocate_kv_blocks(16);
  const StepArrays step = arrays(30);  // logits in four slices
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
}  // namespace adaptrt::testing::sharded_engine_test
