// Stages of a pipeline as threads: steps that pass through them in pieces give the results of one engine.

#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/sharded/sharded_engine.h"
#include "adaptrt/sharded/step_pieces.h"
#include "engine/random_model.h"
#include "sharded/thread_ranks.h"

namespace adaptrt::testing {
namespace {

namespace data = boost::unit_test::data;

constexpr std::int32_t kBlocks = 40;

/// One of as many stages as `whole` has layers.
Program of_stage(const Program& whole, std::int32_t stage) {
  Program program = whole;
  program.num_stages = program.num_ranks = whole.num_layers;
  program.rank = stage;
  program.num_layers = 1;
  const BufferId hidden = std::get<EmbeddingOp>(whole.body.front()).output;
  program.body.clear();
  if (stage > 0) program.body.push_back(ReceiveOp{hidden});
  std::int32_t layer = -1;  // a layer begins with the norm before its attention
  std::int32_t norms = 0;
  for (const Op& op : whole.body) {
    if (std::holds_alternative<RmsNormOp>(op) && norms++ % 2 == 0) ++layer;
    const bool is_table = std::holds_alternative<RopeTableOp>(op);
    if (!is_table && std::max(layer, 0) != stage) continue;
    program.body.push_back(op);
    if (auto* attention = std::get_if<AttentionOp>(&program.body.back())) attention->layer = 0;
  }
  if (stage + 1 < whole.num_layers) {
    program.body.push_back(SendOp{hidden});
    program.head.clear();
    program.logits = program.hidden = kNoBuffer;
  }
  return program;
}

class Pipeline {
 public:
  explicit Pipeline(const Program& whole, const std::shared_ptr<StepProfile>& profile = nullptr)
      : room_(std::make_shared<MailRoom>(whole.num_layers)) {
    for (std::int32_t stage = whole.num_layers - 1; stage >= 0; --stage) {
      auto communicator = std::make_shared<ThreadCommunicator>(room_, stage);
      std::shared_ptr<Engine> local = make_cpu_engine(of_stage(whole, stage), std::make_shared<ThreadPool>(1),
                                                      "", stage == 0 ? profile : nullptr, communicator);
      if (stage > 0) {
        others_.emplace_back([local, communicator] { serve_rank(*local, *communicator); });
        continue;
      }
      BOOST_CHECK_THROW(make_sharded_engine(local, communicator), EngineError);
      engine = make_sharded_engine(std::move(local), std::move(communicator),
                                   PipelineFacts{.hidden_size = 0, .max_reusable_prompt_len = 7}, profile);
    }
    engine->allocate_kv_blocks(kBlocks);
  }
  ~Pipeline() { engine.reset(); }
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;
  Pipeline(Pipeline&&) = delete;
  Pipeline& operator=(Pipeline&&) = delete;

 private:
  std::shared_ptr<MailRoom> room_;
  std::vector<std::jthread> others_;

 public:
  std::unique_ptr<Engine> engine;
};

/// Sequences of these lengths, each from position 0 on.
StepArrays sequences(const std::vector<std::int32_t>& lengths) {
  std::vector<Piece> pieces;
  Random random(9);
  std::int32_t block = 0;
  for (const std::int32_t length : lengths) {
    Piece piece{.prompt_length = length};
    for (std::int32_t i = 0; i < length; ++i) {
      piece.tokens.push_back(static_cast<std::int32_t>(random.below(61)));
      if (i % 16 == 0) piece.blocks.push_back(block++);
    }
    pieces.push_back(piece);
  }
  return StepArrays(pieces);
}

/// The same, of which the logits of each sequence's last token are wanted.
StepArrays with_last_logits(StepArrays step) {
  step.logit_rows.clear();
  for (std::size_t i = 1; i < step.offsets.size(); ++i) step.logit_rows.push_back(step.offsets[i] - 1);
  return step;
}

BOOST_AUTO_TEST_SUITE(pipeline)

BOOST_DATA_TEST_CASE(stages_make_what_one_engine_does, data::make({2, 4}), layers) {
  const RandomModel model({.num_layers = layers});
  Pipeline stages(model.program);
  const auto alone = make_cpu_engine(model.program, std::make_shared<ThreadPool>(1));
  alone->allocate_kv_blocks(kBlocks);
  const std::vector<std::vector<std::int32_t>> batches{
      {3}, {127}, {128}, {200, 1, 55}, {64, 64, 64, 64}, {1, 1, 254}};
  for (const auto& lengths : batches) {
    const StepArrays all = sequences(lengths);  // of more rows than a slice has: in one piece
    BOOST_TEST((logits_of(stages.engine.get(), all.input()) == logits_of(alone.get(), all.input())));
    const StepArrays last = with_last_logits(all);
    BOOST_TEST((logits_of(stages.engine.get(), last.input()) == logits_of(alone.get(), last.input())));
  }
}

BOOST_AUTO_TEST_CASE(a_step_in_pieces_is_recorded_as_one) {
  const RandomModel model({.num_layers = 2});
  const auto profile = std::make_shared<StepProfile>(4);
  Pipeline stages(model.program, profile);
  logits_of(stages.engine.get(), with_last_logits(sequences({200})).input());
  const std::vector<StepRecord> steps = profile->take_steps();
  BOOST_TEST_REQUIRE(steps.size() == 1U);
  BOOST_TEST(steps[0].num_tokens == 200);
  const auto count = [&](StepSection section, std::int32_t index) {
    return std::ranges::count_if(
        steps[0].ops, [&](const OpRecord& op) { return op.section == section && op.index == index; });
  };
  BOOST_TEST(count(StepSection::kBody, 0) == 3);  // pieces
  BOOST_TEST(count(StepSection::kRanks, static_cast<std::int32_t>(RankWork::kCommands)) == 1);
  BOOST_TEST(count(StepSection::kRanks, static_cast<std::int32_t>(RankWork::kResults)) == 1);
  BOOST_TEST(count(StepSection::kSink, 0) == 1);
}

BOOST_AUTO_TEST_CASE(what_is_known_of_a_pipeline) {
  const RandomModel model({.num_layers = 3});
  const Pipeline stages(model.program);
  BOOST_TEST(stages.engine->info().num_layers == 3);
  BOOST_TEST(stages.engine->info().has_logits);
  BOOST_TEST(stages.engine->info().max_reusable_prompt_len == 7);
  BOOST_TEST(stages.engine->info().attention_windows.empty());
}

BOOST_AUTO_TEST_CASE(a_refused_step_leaves_the_stages_in_step) {
  const RandomModel model({.num_layers = 2});
  Pipeline stages(model.program);
  const StepArrays good = with_last_logits(sequences({130}));
  const auto before = logits_of(stages.engine.get(), good.input());
  StepArrays bad = good;
  bad.logit_rows = {130};
  BOOST_CHECK_THROW(logits_of(stages.engine.get(), bad.input()), StepError);
  BOOST_TEST((logits_of(stages.engine.get(), good.input()) == before));
}

BOOST_AUTO_TEST_CASE(stages_that_do_not_fit_are_refused) {
  const RandomModel model({.num_layers = 2});
  Program program = of_stage(model.program, 0);
  BOOST_TEST(program.validate().empty());
  program.body.back() = ReceiveOp{std::get<SendOp>(program.body.back()).input};
  BOOST_TEST(!program.validate().empty());
  program = of_stage(model.program, 1);
  program.body.push_back(SendOp{std::get<ReceiveOp>(program.body.front()).output});
  BOOST_TEST(!program.validate().empty());
  program = of_stage(model.program, 0);
  program.head = model.program.head;
  BOOST_TEST(!program.validate().empty());
  program.num_stages = 3;
  BOOST_TEST(!program.validate().empty());
}

BOOST_AUTO_TEST_CASE(pieces_are_the_step) {
  EngineInfo info;
  info.max_batch_size = 8;
  const StepArrays arrays = with_last_logits(sequences({200, 1, 55}));
  StepInput step = arrays.input();
  const std::vector<std::int32_t> copies{1, 2};
  step.copies_from = step.copies_to = copies;
  const std::vector<StepPiece> pieces = pieces_of(step, info);
  BOOST_TEST_REQUIRE(pieces.size() == 4U);
  std::vector<std::int32_t> tokens;
  std::vector<std::int32_t> logit_rows;
  for (const StepPiece& piece : pieces) {
    const StepInput input = piece.input();
    BOOST_TEST(input.token_ids.size() == 64U);
    BOOST_TEST(input.sequence_offsets.back() == 64);
    BOOST_TEST(input.adapters.size() + 1 == input.sequence_offsets.size());
    BOOST_TEST(input.copies_from.size() == (tokens.empty() ? 2U : 0U));
    for (const std::int32_t row : input.logit_rows) {
      logit_rows.push_back(row + static_cast<std::int32_t>(tokens.size()));
    }
    tokens.insert(tokens.end(), input.token_ids.begin(), input.token_ids.end());
  }
  BOOST_TEST(tokens == arrays.tokens);
  BOOST_TEST(logit_rows == arrays.logit_rows);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing
