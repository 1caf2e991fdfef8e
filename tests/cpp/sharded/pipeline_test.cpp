// Pipeline stages in threads: steps in micro-batches give the results of one engine.

#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <memory>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/cpu/cpu_engine.h"
#include "adaptrt/sharded/step_microbatches.h"
#include "cpu/random_model.h"
#include "cpu/step_arrays.h"
#include "sharded/stage_programs.h"
#include "sharded/thread_pipeline.h"

namespace adaptrt::testing::pipeline_test {
namespace {

namespace data = boost::unit_test::data;

/// Bytes of a KV block if another stage had more layers.
constexpr std::size_t kLargestBlock = std::size_t{1} << 20;

/// One stage per layer of `whole`.
class LayerStages : public Pipeline {
 public:
  explicit LayerStages(const Program& whole, const std::shared_ptr<StepProfile>& profile = nullptr)
      : Pipeline(
            whole.num_layers, [&](std::int32_t stage) { return of_stage(whole, stage); },
            {.hidden_size = whole.buffers[static_cast<std::size_t>(whole.hidden)].width,
             .max_reusable_prompt_len = 7,
             .num_layers = whole.num_layers,
             .kv_block_bytes = kLargestBlock},
            profile) {}
};

/// The same model with attention to later tokens and two token types.
Program seeing_behind(RandomModel* model) {
  Program program = model->program;
  for (Op& op : program.body) {
    if (auto* attention = std::get_if<AttentionOp>(&op)) attention->kind = AttentionKind::kBidirectional;
  }
  auto& embedding = std::get<EmbeddingOp>(program.body.front());
  Random random(3);
  embedding.types = model->storage().matrix(DType::kFloat32, 2, embedding.table.k, 1.0F, &random);
  return program;
}

/// Sequences of these lengths, all from position 0.
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

/// The same with logits only for each sequence's last token.
StepArrays with_last_logits(StepArrays step) {
  step.logit_rows.clear();
  for (std::size_t i = 1; i < step.offsets.size(); ++i) step.logit_rows.push_back(step.offsets[i] - 1);
  return step;
}

BOOST_AUTO_TEST_SUITE(pipeline)

BOOST_DATA_TEST_CASE(stages_make_what_one_engine_does, data::make({2, 4}), layers) {
  const RandomModel model({.num_layers = layers});
  LayerStages stages(model.program);
  const auto alone = make_cpu_engine(model.program, std::make_shared<ThreadPool>(1));
  alone->allocate_kv_blocks(Pipeline::kBlocks);
  const std::vector<std::vector<std::int32_t>> batches{
      {3}, {127}, {128}, {200, 1, 55}, {64, 64, 64, 64}, {1, 1, 254}};
  for (const auto& lengths : batches) {
    const StepArrays all = sequences(lengths);  // more rows than a slice: one micro-batch
    BOOST_TEST((logits_of(stages.engine.get(), all.input()) == logits_of(alone.get(), all.input())));
    const StepArrays last = with_last_logits(all);
    BOOST_TEST((logits_of(stages.engine.get(), last.input()) == logits_of(alone.get(), last.input())));
  }
}

/// Micro-batches are whole sequences, and all rows may be wanted: more than one transfer takes.
BOOST_DATA_TEST_CASE(stages_of_an_encoder_make_what_one_engine_does, data::make({2, 4}), layers) {
  RandomModel model({.num_layers = layers});
  const Program program = seeing_behind(&model);
  LayerStages stages(program);
  const auto alone = make_cpu_engine(program, std::make_shared<ThreadPool>(1));
  BOOST_TEST(!stages.engine->info().has_kv_cache);
  BOOST_TEST(stages.engine->info().num_token_types == 2);
  const std::vector<std::vector<std::int32_t>> batches{
      {3}, {200}, {200, 1, 55}, {64, 64, 64, 64}, {1, 1, 254}, {63, 2, 63, 2}};
  for (const auto& lengths : batches) {
    StepArrays step = with_last_logits(sequences(lengths));
    for (const bool wants_all : {false, true}) {
      step.hidden_rows = step.logit_rows;
      if (wants_all) step.hidden_rows = sequences(lengths).logit_rows;
      step.token_types.resize(wants_all ? step.tokens.size() : 0);
      for (std::size_t i = 0; i < step.token_types.size(); i += 3) step.token_types[i] = 1;
      const StepResults expected = results_of(alone.get(), step.input());
      const StepResults made = results_of(stages.engine.get(), step.input());
      BOOST_TEST((made.logits == expected.logits));
      BOOST_TEST((made.hidden == expected.hidden));
    }
  }
}

BOOST_AUTO_TEST_CASE(a_step_in_microbatches_is_recorded_as_one) {
  const RandomModel model({.num_layers = 2});
  const auto profile = std::make_shared<StepProfile>(4);
  LayerStages stages(model.program, profile);
  logits_of(stages.engine.get(), with_last_logits(sequences({200})).input());
  const std::vector<StepRecord> steps = profile->take_steps();
  BOOST_TEST_REQUIRE(steps.size() == 1U);
  BOOST_TEST(steps[0].num_tokens == 200);
  const auto count = [&](StepSection section, std::int32_t index) {
    return std::ranges::count_if(
        steps[0].ops, [&](const OpRecord& op) { return op.section == section && op.index == index; });
  };
  BOOST_TEST(count(StepSection::kBody, 0) == 3);  // micro-batches
  BOOST_TEST(count(StepSection::kRanks, static_cast<std::int32_t>(RankWork::kCommands)) == 1);
  BOOST_TEST(count(StepSection::kRanks, static_cast<std::int32_t>(RankWork::kResults)) == 1);
  BOOST_TEST(count(StepSection::kSink, 0) == 1);
  double last = steps[0].begin;
  for (const OpRecord& op : steps[0].ops) {
    BOOST_TEST(op.begin >= last);
    last = op.end;
  }
  BOOST_TEST(steps[0].end >= last);
}

BOOST_AUTO_TEST_CASE(the_engine_info_of_a_pipeline) {
  const RandomModel model({.num_layers = 3});
  const LayerStages stages(model.program);
  BOOST_TEST(stages.engine->info().num_layers == 3);
  BOOST_TEST(stages.engine->info().kv_block_bytes == kLargestBlock);
  BOOST_TEST(stages.engine->info().has_logits);
  BOOST_TEST(stages.engine->info().max_reusable_prompt_len == 7);
  BOOST_TEST(stages.engine->info().attention_windows.empty());
}

BOOST_AUTO_TEST_CASE(a_refused_step_leaves_the_stages_in_step) {
  const RandomModel model({.num_layers = 2});
  LayerStages stages(model.program);
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
  // Rows of tokens that were dropped already.
  program = of_stage(model.program, 0);
  program.body.insert(program.body.end() - 1, KeepLogitRowsOp{{std::get<SendOp>(program.body.back()).input}});
  BOOST_TEST(!program.validate().empty());
}

BOOST_AUTO_TEST_CASE(pieces_are_the_step) {
  EngineInfo info;
  info.max_batch_size = 8;
  const StepArrays arrays = with_last_logits(sequences({200, 1, 55}));
  StepInput step = arrays.input();
  const std::vector<std::int32_t> copies{1, 2};
  step.copies_from = step.copies_to = copies;
  const std::vector<Microbatch> pieces = split_into_microbatches(step, info);
  BOOST_TEST_REQUIRE(pieces.size() == 4U);
  std::vector<std::int32_t> tokens;
  std::vector<std::int32_t> logit_rows;
  for (const Microbatch& piece : pieces) {
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

/// A micro-batch takes sequences until it has enough tokens; the remaining ones join the last micro-batch.
BOOST_AUTO_TEST_CASE(pieces_of_whole_sequences) {
  EngineInfo info;
  info.max_batch_size = 8;
  info.has_kv_cache = false;
  StepArrays arrays = with_last_logits(sequences({10, 60, 64, 20, 5}));
  for (const std::int32_t row : arrays.logit_rows)
    arrays.token_types.resize(static_cast<std::size_t>(row) + 1, row);
  const auto lengths_of = [&](const StepInput& step) {
    std::vector<std::vector<std::int32_t>> lengths;
    for (const Microbatch& piece : split_into_microbatches(step, info)) {
      const StepInput input = piece.input();
      BOOST_TEST(input.token_types.size() == input.token_ids.size());
      BOOST_TEST(input.token_types.back() ==
                 arrays.token_types[static_cast<std::size_t>(input.token_ids.data() + input.token_ids.size() -
                                                             1 - arrays.tokens.data())]);
      lengths.emplace_back(input.prompt_lengths.begin(), input.prompt_lengths.end());
      BOOST_TEST(input.logit_rows.size() == lengths.back().size());
    }
    return lengths;
  };
  BOOST_TEST((lengths_of(arrays.input()) == std::vector<std::vector<std::int32_t>>{{10, 60}, {64, 20, 5}}));
  info.max_batch_size = 4;  // fewer than the rows of logits
  BOOST_TEST((lengths_of(arrays.input()) == std::vector<std::vector<std::int32_t>>{{10, 60, 64, 20, 5}}));
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::pipeline_test
